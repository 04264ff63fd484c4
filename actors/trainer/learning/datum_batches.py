"""Datums become micro-batches, and their log-probabilities come back in the datums' order and shapes.

    Datum* ─ check_datums ─ cut_datums ─▶ DatumBatch* ─ the backend ─▶ Learned* ─ logprobs_of ─▶ float32[n] or [n, K]*

    a datum of n tokens is a row of n + 1 positions, or K such rows with the same inputs

    position     0    1    2   ...   n
    input        x0   x1   x2        any: nothing is predicted from it
    target       -    y0   y1        y(n-1)

Always true
- What is wrong is found before anything is computed, and the error names the datum, the field, the value found, and
  what was expected.
- Which rows come together depends on the datums and the budget alone. Datums that begin alike and stand side by side
  stay side by side, and so do the K rows of one datum: a layout may then compute what they share once (``packing``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from actors.protocol.datums import LOSS_INPUTS, Datum
from actors.protocol.training import Learned, LossSpec, MicroBatch
from actors.trainer.errors import CallRefused

_UNLESS_WANTED: Final = {"weights": 1.0, "advantages": 1.0, "logprobs": 0.0, "sequence_ratio_mask": 0.0}
"""All columns that some loss wants, and what stands in them where one does not."""


@dataclass(frozen=True, slots=True)
class DatumBatch:
    """Holds a micro-batch, and for each row the number of its datum and which of the K targets it has."""

    batch: MicroBatch
    places: tuple[tuple[int, int], ...]


# ------------------------------------------------------------ what is refused


def explicit_loss(name: str, parameters: Mapping[str, float]) -> LossSpec:
    """The loss of that name, with the values of all its parameters.

    Raises:
        CallRefused: there is no such loss, it has no such parameter, or a value is missing or out of its range.
    """
    if name not in LOSS_INPUTS:
        raise CallRefused(f"loss: {name!r} is not computed here; expected one of {', '.join(LOSS_INPUTS)}")
    known = LOSS_INPUTS[name].parameters
    for key, value in parameters.items():
        if key not in known:
            expected = f"one of {', '.join(known)}" if known else "none"
            raise CallRefused(f"parameters: {name} has no parameter {key!r}, expected {expected}")
        if not (isinstance(value, int | float) and math.isfinite(value) and value >= 0):
            raise CallRefused(f"parameters: {key} is {value!r}, expected a finite number that is not negative")
    values = {key: parameters.get(key, default) for key, default in known.items()}
    given = {key: float(value) for key, value in values.items() if value is not None}
    if len(given) < len(values):
        missing = ", ".join(key for key, value in values.items() if value is None)
        raise CallRefused(f"parameters: {name} needs {missing}, for which there is no value that fits all; give it")
    low, high = given.get("clip_low_threshold", 0.0), given.get("clip_high_threshold", math.inf)
    if low > high:
        raise CallRefused(f"parameters: clip_low_threshold is {low:g}, expected at most clip_high_threshold, {high:g}")
    return LossSpec(function=name, parameters=given)


def check_datums(datums: Sequence[Datum], loss: str, *, vocabulary: int, context_tokens: int) -> None:
    """Check datums for a loss that exists. ``vocabulary``: number of token ids; ``context_tokens``: of longest inputs.

    Raises:
        CallRefused: a datum cannot be computed; the first such one is told.
    """
    for number, datum in enumerate(datums):
        try:
            _check_datum(datum, loss, vocabulary, context_tokens)
        except CallRefused as error:
            raise CallRefused(f"datum {number}: {error}") from None


def _check_datum(datum: Datum, loss: str, vocabulary: int, context_tokens: int) -> None:
    wants, tokens, targets = LOSS_INPUTS[loss], datum.tokens, datum.targets
    if tokens.ndim != 1 or not 1 <= tokens.size <= context_tokens:
        raise CallRefused(
            f"tokens: shape {tokens.shape}, expected from 1 to {context_tokens} tokens, the model's context, in a row"
        )
    _check_ids("tokens", tokens, vocabulary)
    if targets.ndim not in (1, 2) or targets.shape[0] != tokens.size or not targets.size:
        raise CallRefused(
            f"targets: shape {targets.shape}, expected ({tokens.size},) or ({tokens.size}, K), a target for each token"
        )
    if targets.ndim == 2 and not wants.many_targets:
        raise CallRefused(f"targets: shape {targets.shape}, expected ({tokens.size},): {loss} has one target a token")
    _check_ids("targets", targets, vocabulary)
    for name in wants.columns:
        if name not in datum.columns:
            raise CallRefused(f"{name}: missing, expected a number for each target, as {loss} needs it")
        _check_numbers(name, datum.columns[name], targets.shape)
    if loss == "gspo" and not (datum.columns["sequence_ratio_mask"] != 0).any():
        raise CallRefused("sequence_ratio_mask: 0 everywhere, expected at least one token that the ratio is taken over")


def _check_ids(name: str, ids: np.ndarray, vocabulary: int) -> None:
    if ids.dtype.kind not in "iu":
        raise CallRefused(f"{name}: dtype {ids.dtype}, expected whole numbers")
    wrong = np.argwhere((ids < 0) | (ids >= vocabulary))
    if len(wrong):
        at = tuple(wrong[0].tolist())
        raise CallRefused(f"{name}: token {ids[at]} at {_place(at)}, expected 0 to {vocabulary - 1}, the vocabulary")


def _check_numbers(name: str, numbers: np.ndarray, shape: tuple[int, ...]) -> None:
    if numbers.dtype.kind not in "fiub":
        raise CallRefused(f"{name}: dtype {numbers.dtype}, expected float32")
    if numbers.shape != shape:
        raise CallRefused(f"{name}: shape {numbers.shape}, expected {shape} as targets")
    with np.errstate(over="ignore"):
        wrong = np.argwhere(~np.isfinite(numbers.astype(np.float32)))
    if len(wrong):
        at = tuple(wrong[0].tolist())
        raise CallRefused(f"{name}: {numbers[at]} at {_place(at)}, expected a finite float32")


def _place(at: tuple[int, ...]) -> str:
    return f"position {at[0]}" if len(at) == 1 else f"position {at[0]}, target {at[1]}"


# ------------------------------------------------------------ there and back


def cut_datums(datums: Sequence[Datum], loss: str, *, budget_tokens: int) -> list[DatumBatch]:
    """Micro-batches of at most ``budget_tokens`` padded tokens, or of one row; longest first, as it needs most memory.

    The datums have passed ``check_datums`` for that loss.
    """
    parts, width = list[list[tuple[int, int]]](), 0
    for number in _order(datums):
        size = datums[number].tokens.size + 1
        for target in range(_targets(datums[number])):
            width = max(width, size)
            if not parts or (len(parts[-1]) + 1) * width > budget_tokens:
                parts.append([])
                width = size
            parts[-1].append((number, target))
    return [DatumBatch(_padded(datums, places, loss), tuple(places)) for places in parts]


def logprobs_of(datums: Sequence[Datum], parts: Sequence[DatumBatch], answers: Sequence[Learned]) -> list[np.ndarray]:
    """The log-probabilities of each datum's targets, float32 of their shape, from the answers for its rows."""
    found = [np.zeros((datum.tokens.size, _targets(datum)), np.float32) for datum in datums]
    for part, answer in zip(parts, answers, strict=True):
        for row, (number, target) in enumerate(part.places):
            found[number][:, target] = answer.logprobs[row, 1 : len(found[number]) + 1]
    return [own.reshape(datum.targets.shape) for own, datum in zip(found, datums, strict=True)]


def _targets(datum: Datum) -> int:
    """K, the number of targets at each position."""
    return 1 if datum.targets.ndim == 1 else datum.targets.shape[1]


def _order(datums: Sequence[Datum]) -> list[int]:
    """Numbers of the datums: runs of those that begin alike, by their longest one; within a run the longest first."""
    runs: list[list[int]] = []
    for number, datum in enumerate(datums):
        if number and _begin_alike(datums[number - 1].tokens, datum.tokens):
            runs[-1].append(number)
        else:
            runs.append([number])
    runs = [sorted(run, key=lambda number: -datums[number].tokens.size) for run in runs]
    return [number for run in sorted(runs, key=lambda run: -datums[run[0]].tokens.size) for number in run]


def _begin_alike(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether the shorter one has more than half of its tokens in common with the start of the other."""
    half = min(one.size, other.size) // 2 + 1
    return bool((one[:half] == other[:half]).all())


def _padded(datums: Sequence[Datum], places: Sequence[tuple[int, int]], loss: str) -> MicroBatch:
    """One row for each place. Numbers that the loss does not want are as if they were not there."""
    sizes = np.array([datums[number].tokens.size for number, _ in places], np.int32)
    shape = (len(places), int(sizes.max()) + 1)
    ids, targets = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    wanted = LOSS_INPUTS[loss].columns
    columns = {name: np.zeros(shape, np.float32) for name in _UNLESS_WANTED}
    for row, (number, target) in enumerate(places):
        datum, size = datums[number], int(sizes[row])
        ids[row, :size] = datum.tokens
        targets[row, 1 : size + 1] = datum.targets.reshape(size, -1)[:, target]
        for name, column in columns.items():
            own = datum.columns[name].reshape(size, -1)[:, target] if name in wanted else _UNLESS_WANTED[name]
            column[row, 1 : size + 1] = own
    return MicroBatch(
        input_ids=ids,
        targets=targets,
        lengths=sizes + 1,
        prompt_lengths=np.ones(len(places), np.int32),
        behaviour_logprobs=columns["logprobs"],
        advantages=columns["advantages"],
        loss_weight=columns["weights"],
        ratio_mask=columns["sequence_ratio_mask"] if "sequence_ratio_mask" in wanted else None,
    )
