"""Datums there and back: what is refused, which rows come together, and whose numbers come back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.protocol.datums import LOSS_INPUTS, Datum
from actors.protocol.training import Learned
from actors.trainer.errors import CallRefused
from actors.trainer.learning.datum_batches import DatumBatch, check_datums, cut_datums, explicit_loss, logprobs_of

VOCABULARY, CONTEXT = 50, 40
NAMES = ("weights", "logprobs", "advantages", "sequence_ratio_mask")


def datum(tokens: list[int], targets: np.ndarray, draw: int = 0, names: tuple[str, ...] = NAMES) -> Datum:
    rng = np.random.default_rng(draw)
    columns = {name: rng.normal(size=targets.shape).astype(np.float32) for name in names}
    return Datum(np.array(tokens, np.int32), targets.astype(np.int32), columns)


@st.composite
def batches(draw: st.DrawFn, loss: str | None = None) -> tuple[str, list[Datum]]:
    """A loss, and datums of few different tokens, so that many begin alike."""
    loss = loss or draw(st.sampled_from(sorted(LOSS_INPUTS)))
    made = list[Datum]()
    for number in range(draw(st.integers(0, 7))):
        tokens = draw(st.lists(st.integers(0, 2), min_size=1, max_size=9))
        many = LOSS_INPUTS[loss].many_targets and draw(st.booleans())
        shape = (len(tokens), draw(st.integers(1, 4))) if many else (len(tokens),)
        targets = np.random.default_rng(number).integers(0, VOCABULARY, shape)
        made.append(datum(tokens, targets, number))
    return loss, made


def answered(part: DatumBatch) -> Learned:
    """Numbers that tell which target after which inputs was asked for, from the arrays alone."""
    batch = part.batch
    assert batch.targets is not None
    before = np.cumsum(batch.input_ids + 1, axis=1)
    found = np.zeros(batch.input_ids.shape, np.float32)
    for row, length in enumerate(batch.lengths.tolist()):
        found[row, 1:length] = batch.targets[row, 1:length] + 100 * before[row, : length - 1]
    return Learned(logprobs=found, loss_sum=0.0)


def expected(one: Datum) -> np.ndarray:
    before = 100 * np.cumsum(one.tokens + 1)
    return (one.targets + (before if one.targets.ndim == 1 else before[:, None])).astype(np.float32)


@given(batches(), st.integers(1, 60))
def test_every_target_comes_back_to_its_place_however_datums_are_cut(
    drawn: tuple[str, list[Datum]], budget: int
) -> None:
    loss, datums = drawn
    check_datums(datums, loss, vocabulary=VOCABULARY, context_tokens=CONTEXT)
    parts = cut_datums(datums, loss, budget_tokens=budget)
    for part in parts:
        assert part.batch.input_ids.size <= budget or len(part.places) == 1
        assert len(part.batch.lengths) == len(part.places)
    found = logprobs_of(datums, parts, [answered(part) for part in parts])
    assert len(found) == len(datums)
    for own, one in zip(found, datums, strict=True):
        assert own.dtype == np.float32
        np.testing.assert_array_equal(own, expected(one))


@given(batches(), st.integers(1, 60))
def test_every_number_that_the_loss_wants_stands_with_its_target_once_and_no_other(
    drawn: tuple[str, list[Datum]], budget: int
) -> None:
    loss, datums = drawn
    seen: dict[str, list[tuple[float, ...]]] = {"found": [], "wanted": []}
    wants = LOSS_INPUTS[loss].columns
    for part in cut_datums(datums, loss, budget_tokens=budget):
        batch = part.batch
        t = np.arange(batch.input_ids.shape[1])
        where = (t >= 1) & (t < batch.lengths[:, None])
        mask = np.zeros(where.shape, np.float32) if batch.ratio_mask is None else batch.ratio_mask
        assert (batch.ratio_mask is None) == ("sequence_ratio_mask" not in wants)
        columns = (batch.loss_weight, batch.behaviour_logprobs, batch.advantages, mask)
        assert all((column[~where] == 0).all() for column in columns)
        seen["found"] += zip(*(column[where].tolist() for column in columns), strict=True)
    defaults = {"weights": 1.0, "logprobs": 0.0, "advantages": 1.0, "sequence_ratio_mask": 0.0}
    for one in datums:
        full = {name: np.full(one.targets.shape, value, np.float32) for name, value in defaults.items()}
        full |= {name: one.columns[name] for name in wants}
        seen["wanted"] += zip(*(full[name].ravel().tolist() for name in NAMES), strict=True)
    assert sorted(seen["found"]) == sorted(seen["wanted"])


def test_rows_of_one_datum_and_datums_that_begin_alike_stay_together() -> None:
    stem = [5, 6, 7, 8]
    twins = [datum([*stem, tail], np.zeros(5)) for tail in (1, 2)]
    long, other = datum(list(range(9)), np.zeros(9)), datum([9, 9], np.zeros((2, 3)), names=("weights",))
    parts = cut_datums([twins[0], twins[1], other, long], "cross_entropy", budget_tokens=1000)
    assert [part.places for part in parts] == [((3, 0), (0, 0), (1, 0), (2, 0), (2, 1), (2, 2))]


def changed(**changes: Any) -> Datum:
    good = datum([1, 2, 3], np.array([4, 5, 6]))
    fields: dict[str, Any] = {"tokens": good.tokens, "targets": good.targets, "columns": good.columns}
    return Datum(**(fields | changes))


def with_column(name: str, column: np.ndarray) -> Datum:
    return changed(columns=changed().columns | {name: column})


REFUSED = [
    (changed(tokens=np.zeros(0, np.int32)), "cross_entropy", r"tokens: shape \(0,\), expected from 1 to 40 tokens"),
    (changed(tokens=np.zeros(41, np.int32)), "cross_entropy", r"tokens: shape \(41,\), expected from 1 to 40"),
    (changed(tokens=np.zeros((3, 1), np.int32)), "cross_entropy", r"tokens: shape \(3, 1\)"),
    (changed(tokens=np.array([1, -1, 2])), "cross_entropy", r"tokens: token -1 at position 1, expected 0 to 49"),
    (changed(tokens=np.array([1.0, 2.0, 3.0])), "cross_entropy", r"tokens: dtype float64, expected whole numbers"),
    (changed(targets=np.array([1, 2])), "cross_entropy", r"targets: shape \(2,\), expected \(3,\) or \(3, K\)"),
    (changed(targets=np.zeros((2, 3), int)), "cross_entropy", r"targets: shape \(2, 3\), expected \(3,\) or \(3, K\)"),
    (changed(targets=np.zeros((3, 0), int)), "cross_entropy", r"targets: shape \(3, 0\)"),
    (changed(targets=np.zeros((3, 1, 1), int)), "cross_entropy", r"targets: shape \(3, 1, 1\)"),
    (changed(targets=np.zeros((3, 2), int)), "ppo", r"targets: shape \(3, 2\), .*ppo has one target a token"),
    (changed(targets=np.full((3, 2), 50)), "cross_entropy", r"targets: token 50 at position 0, target 0, expected 0"),
    (changed(columns={}), "dro", r"logprobs: missing, expected a number for each target, as dro needs it"),
    (with_column("weights", np.zeros(2, np.float32)), "cross_entropy", r"weights: shape \(2,\), expected \(3,\)"),
    (with_column("weights", np.array([0, np.nan, 0])), "cross_entropy", r"weights: nan at position 1"),
    (with_column("advantages", np.array([0, 0, np.inf])), "cispo", r"advantages: inf at position 2"),
    (with_column("logprobs", np.array([1e300, 0, 0])), "ppo", r"logprobs: 1e\+300 at position 0, expected a finite"),
    (with_column("weights", np.array(["a", "b", "c"])), "cross_entropy", r"weights: dtype <U1, expected float32"),
    (with_column("sequence_ratio_mask", np.zeros(3, np.float32)), "gspo", r"sequence_ratio_mask: 0 everywhere"),
]


@pytest.mark.parametrize(("wrong", "loss", "says"), REFUSED)
def test_what_is_wrong_with_a_datum_is_told_with_its_number_the_field_the_value_and_what_was_expected(
    wrong: Datum, loss: str, says: str
) -> None:
    with pytest.raises(CallRefused, match=rf"^datum 2: {says}"):
        check_datums([changed(), changed(), wrong], loss, vocabulary=VOCABULARY, context_tokens=CONTEXT)


@pytest.mark.parametrize(
    ("loss", "parameters", "says"),
    [
        ("stable_reinforce", {}, "loss: 'stable_reinforce' is not computed here; expected one of cross_entropy, "),
        ("ppo", {"clip": 0.2}, "ppo has no parameter 'clip', expected one of clip_low_threshold, clip_high_threshold"),
        ("cross_entropy", {"beta": 0.2}, "cross_entropy has no parameter 'beta', expected none"),
        ("dro", {"beta": float("inf")}, "beta is inf, expected a finite number that is not negative"),
        ("dro", {"beta": "a lot"}, "beta is 'a lot', expected a finite number"),
        ("dro", {}, "dro needs beta"),
        ("ppo", {"clip_low_threshold": 1.3}, "clip_low_threshold is 1.3, expected at most clip_high_threshold, 1.2"),
    ],
)
def test_a_loss_or_a_parameter_that_does_not_exist_is_refused(loss: str, parameters: Any, says: str) -> None:
    with pytest.raises(CallRefused, match=says):
        explicit_loss(loss, parameters)


def test_parameters_that_are_not_given_have_their_values() -> None:
    given_one = explicit_loss("ppo", {"clip_low_threshold": 0.9})
    assert given_one.parameters == {"clip_low_threshold": 0.9, "clip_high_threshold": 1.2}
    assert given_one.function == "ppo"
