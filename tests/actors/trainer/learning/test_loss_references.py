"""Every rule's loss beside a short one in numpy, token by token, written from the formulas; and finite differences.

Three sequences of 4, 1 and 3 tokens stand between tokens that are not learned from. Some tokens are stale, some fresh
ones differ from the engine by numerics alone, and the policy has moved since the step began.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from actors.trainer.backend import LossSpec
from actors.trainer.learning.losses import (
    KL_ESTIMATES,
    NUMERICS,
    TokenColumns,
    kl_penalty,
    policy_surrogate,
    token_losses,
)
from actors.trainer.setup import loss_spec
from tests.smallest_job import smallest_job

WHERE = np.array([[0, 1, 1, 0, 1, 1], [0, 0, 1, 0, 0, 0], [0, 0, 1, 1, 1, 0]], dtype=bool)
sequence_of = np.nonzero(WHERE)[0]
STALE = np.array([1, 1, 0, 0, 0, 1, 0, 0], dtype=bool)
RULES = ["grpo", "dapo", "gspo", "cispo"]
CORRECTIONS = ["none", "tis", "icepop", "sequence_mask"]


def numbers(seed: int = 0, spread: float = 0.5) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    old = rng.normal(-1.0, 0.5, 8)
    engine = old + rng.normal(0.0, spread, 8)
    engine[3] = old[3] + NUMERICS / 2
    return {
        "new": old + rng.normal(0.0, 0.3, 8),
        "old": old,
        "engine": engine,
        "advantages": rng.normal(0.0, 1.0, 8),
        "reference": old + rng.normal(0.0, 0.5, 8),
    }


def columns(found: dict[str, np.ndarray]) -> TokenColumns:
    tensors = {name: torch.from_numpy(column.copy()) for name, column in found.items()}
    tensors["new"].requires_grad_(True)
    return TokenColumns(**tensors, stale=torch.from_numpy(STALE), where=torch.from_numpy(WHERE))


def spec_of(name: str, **keys: object) -> LossSpec:
    return loss_spec(smallest_job(algorithm={"name": name, **keys}))


def reference_gradient(found: dict[str, np.ndarray], spec: LossSpec) -> np.ndarray:
    """d loss / d new of each token, from the papers: minus the weight of each grad log-probability."""
    new, old, advantages = found["new"], found["old"], found["advantages"]
    numerics = ~STALE & (np.abs(old - found["engine"]) <= NUMERICS)
    engine = np.where(numerics, old, found["engine"])
    clip_old = np.where(STALE, engine, old)
    gradient = np.zeros(8)
    for s in range(3):
        tokens = np.flatnonzero(sequence_of == s)
        product = np.exp(sum(old[i] - engine[i] for i in tokens))
        for i in tokens:
            group = tokens if spec.surrogate == "sequence" else [i]

            def ratio(one: np.ndarray, other: np.ndarray, over: list[int] | np.ndarray = group) -> float:
                return float(np.exp(np.mean([one[j] - other[j] for j in over])))

            w = float(np.exp(old[i] - engine[i]))
            kept = {"icepop": spec.importance_floor <= w <= spec.importance_cap}.get(spec.correction, True)
            kept = kept and not (spec.correction == "sequence_mask" and product > spec.importance_cap)
            if spec.surrogate == "weighted":
                weight = np.clip(np.exp(new[i] - engine[i]), 1 - spec.clip_low, 1 + spec.clip_high)
                gradient[i] = -weight * advantages[i] * kept
                continue
            r, a = ratio(new, clip_old), advantages[i]
            beyond = (a > 0 and r > 1 + spec.clip_high) or (a < 0 and r < 1 - spec.clip_low)
            factor = {
                "none": r,
                "tis": min(ratio(new, engine), spec.importance_cap),
                "icepop": ratio(new, engine),
                "sequence_mask": ratio(new, old) * product,
            }[spec.correction]
            for j in group:  # a sequence's ratio is of all of its tokens
                gradient[j] += 0.0 if beyond or not kept else -factor * a / len(group)
    return gradient


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("name", RULES)
def test_the_gradient_is_that_of_the_formulas(name: str, correction: str, seed: int) -> None:
    spec, found = spec_of(name, correction=correction, clip_low=0.2, clip_high=0.25), numbers(seed)
    given = columns(found)
    (gradient,) = torch.autograd.grad(token_losses(given, spec).loss.sum(), given.new)
    np.testing.assert_allclose(gradient.numpy(), reference_gradient(found, spec), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_the_loss_passes_a_finite_difference_check_away_from_its_kinks(name: str, correction: str) -> None:
    found = numbers(7)
    spec = spec_of(name, correction=correction, kl_coefficient=0.1, kl_unbiased=True, clip_low=0.2, clip_high=0.25)
    given = columns(found)

    def loss(new: torch.Tensor) -> torch.Tensor:
        return token_losses(dataclasses.replace(given, new=new), spec).loss

    assert torch.autograd.gradcheck(loss, (given.new,))


def test_cispo_lowers_what_its_weight_and_the_log_probability_make() -> None:
    """Finite differences of -w A log p with w held where it is; the loss itself is another function beside it."""
    spec, found = spec_of("cispo"), numbers(3)
    given = columns(found)
    loss = token_losses(given, spec).loss
    weights = loss.detach() / (-given.advantages * given.new.detach())

    def held(new: torch.Tensor) -> torch.Tensor:
        return -weights * given.advantages * new

    assert torch.autograd.gradcheck(held, (given.new,))
    (ours,), (theirs,) = (torch.autograd.grad(f.sum(), given.new) for f in (loss, held(given.new)))
    torch.testing.assert_close(ours, theirs)


def test_a_step_of_one_update_clips_no_fresh_token_and_cuts_what_the_engine_says_otherwise() -> None:
    found = numbers(2, spread=1.0)
    given = dataclasses.replace(columns(found), old=None)
    _, clipped, cut = policy_surrogate(given, spec_of("grpo"))
    assert not clipped[~given.stale].any()
    ratio = np.exp(found["new"] - found["engine"])
    np.testing.assert_array_equal(cut.numpy().astype(bool), ratio > 2.0)
    assert cut.any()


def test_a_token_is_counted_as_cut_exactly_where_its_weight_is_bounded_in_later_updates_too() -> None:
    found = numbers(2)
    moved = np.linspace(0.2, 1.2, 8)  # by the updates before, beside 0.3 by which trainer and engine differ
    given = columns(found | {"old": found["new"] - moved, "engine": found["new"] - moved - 0.3})
    losses = token_losses(given, spec_of("grpo", clip_low=1.0, clip_high=1e6, kl_coefficient=0.0))
    (gradient,) = torch.autograd.grad(losses.loss.sum(), given.new)
    bounded = torch.isclose(gradient.abs(), 2.0 * given.advantages.abs(), rtol=1e-9)
    assert 0 < bounded.sum() < 8 and torch.equal(losses.cut.bool(), bounded)


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("name", RULES)
def test_an_engines_last_bits_are_in_the_gradient_of_no_fresh_token(name: str, correction: str) -> None:
    found = numbers(1)
    stale = torch.zeros(8, dtype=torch.bool)
    gradients: list[torch.Tensor] = []
    for noise in (0.0, NUMERICS / 3):
        given = dataclasses.replace(columns(found | {"engine": found["old"] + noise}), stale=stale)
        losses = token_losses(given, spec_of(name, correction=correction))
        gradients.append(torch.autograd.grad(losses.loss.sum(), given.new)[0])
        assert not losses.cut.any()
    assert torch.equal(*gradients)


def test_a_sequence_is_dropped_as_a_whole_by_the_product_of_its_ratios() -> None:
    found = numbers(0)
    found["engine"] = found["old"] - np.array([0.3, 0.3, 0.3, 0.3, 1.2, 0.3, 0.3, 0.3])  # products e^1.2, e^1.2, e^0.9
    given = columns(found)
    losses = token_losses(given, spec_of("grpo", correction="sequence_mask"))
    np.testing.assert_array_equal(losses.cut.numpy(), [1, 1, 1, 1, 1, 0, 0, 0])
    (gradient,) = torch.autograd.grad(losses.loss.sum(), given.new)
    assert not gradient[:5].any()


@pytest.mark.parametrize(
    ("kind", "value", "slope"),
    [
        ("k1", lambda d: -d, lambda d: 1.0),
        ("k2", lambda d: d * d / 2, lambda d: -d),
        ("k3", lambda d: np.exp(d) - d - 1, lambda d: 1 - np.exp(d)),
        ("k3_with_k2_gradient", lambda d: np.exp(d) - d - 1, lambda d: -d),
    ],
)
@pytest.mark.parametrize("unbiased", [False, True])
def test_kinds_of_kl_by_their_formulas(kind, value, slope, unbiased: bool) -> None:
    found = numbers(5)
    given, spec = columns(found), LossSpec(kl_kind=kind, kl_unbiased=unbiased)
    assert given.reference is not None
    penalty = kl_penalty(given, given.reference, spec)
    (gradient,) = torch.autograd.grad(penalty.sum(), given.new)
    engine = np.where(~STALE & (np.abs(found["old"] - found["engine"]) <= NUMERICS), found["old"], found["engine"])
    d, ratio = found["reference"] - found["new"], np.exp(found["new"] - engine)
    through = kind in ("k1", "k3")  # of the others the slope alone is that of the KL, so the weight is held
    weight, more = (ratio, value(d) * through) if unbiased else (1.0, 0.0)
    np.testing.assert_allclose(penalty.detach().numpy(), weight * value(d))
    np.testing.assert_allclose(gradient.numpy(), weight * (slope(d) + more))
    assert set(KL_ESTIMATES) == {"k1", "k2", "k3", "k3_with_k2_gradient"}


def test_an_unbiased_estimate_has_the_gradient_of_the_kl_whoever_drew_the_tokens() -> None:
    """Three tokens: the mean of the estimate's gradient over draws of another policy is that of the KL itself."""
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([0.1, 0.6, -0.4], dtype=torch.float64), 0)
    drew = torch.log_softmax(torch.tensor([0.5, 0.0, 0.2], dtype=torch.float64), 0)
    new = torch.log_softmax(logits, 0)
    (exact,) = torch.autograd.grad((new.exp() * (new - reference)).sum(), logits, retain_graph=True)
    given = TokenColumns(
        new=new, engine=drew, advantages=new, stale=torch.ones(3, dtype=torch.bool), where=torch.ones(1, 3).bool()
    )
    for kind in KL_ESTIMATES:
        penalty = kl_penalty(given, reference, LossSpec(kl_kind=kind, kl_unbiased=True))
        (found,) = torch.autograd.grad((drew.exp() * penalty).sum(), logits, retain_graph=True)
        torch.testing.assert_close(found, exact)


def test_an_entropy_bonus_is_taken_off_the_loss() -> None:
    given = dataclasses.replace(columns(numbers()), entropy=torch.arange(8.0, dtype=torch.float64))
    plain, less = (token_losses(given, spec_of("grpo", entropy_coefficient=c)).loss for c in (0.0, 0.5))
    torch.testing.assert_close(plain - less, 0.5 * torch.arange(8.0, dtype=torch.float64))
