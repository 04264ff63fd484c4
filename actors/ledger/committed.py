"""One line of the journal's ``samples`` table: how a sample ended, by what two runs are compared."""

from __future__ import annotations

import math
from typing import Final

import msgspec
import numpy as np
import xxhash

from actors.ledger.batch import Ragged, SampleState, StepBatch
from actors.protocol.tokens import FinishReason

_STATES: Final = {int(state): state.name.lower() for state in SampleState}
_FINISHES: Final = {int(finish): finish.name.lower() for finish in FinishReason}


class CommittedSample(msgspec.Struct, frozen=True):
    """Two that are equal up to ``reward`` are the same sample with the same tokens and the same reward."""

    job: str
    step: int
    prompt: int
    sibling: int
    state: str
    """``committed`` or ``dropped``."""
    tokens_hash: str
    """xxh3-128 of the response tokens as little-endian int32, in hex; of an episode with those of its environment."""
    n_tokens: int
    reward: float | None
    finish: str
    first_version: int | None
    """Policy version of the model's first token; None where it has said nothing."""
    last_version: int | None
    attempts: int
    """Number of times that it was handed to a worker; of an episode: in its last turn."""
    reason: str
    """Reason why it was dropped."""


def committed_rows(job: str, batch: StepBatch) -> list[CommittedSample]:
    """All samples of a committed batch."""
    n = len(batch)
    ragged = batch.ragged(np.arange(n, dtype=np.int32))
    tokens = memoryview(ragged.tokens.astype("<i4").tobytes())
    ends = np.cumsum(ragged.lengths)
    some, first, last = _versions(batch, ragged, ends)
    columns = zip(
        range(n), ragged.lengths.tolist(), ends.tolist(), some.tolist(), first.tolist(), last.tolist(),
        batch.state.tolist(), batch.reward.tolist(), batch.finish.tolist(), batch.attempts.tolist(), strict=True,
    )  # fmt: skip
    prompts = batch.prompts.tolist()
    return [
        CommittedSample(
            job,
            batch.step,
            prompts[row // batch.group_size],
            row % batch.group_size,
            _STATES[state],
            xxhash.xxh3_128_hexdigest(tokens[4 * (end - length) : 4 * end]),
            length,
            None if math.isnan(reward) else reward,
            _FINISHES[finish],
            first if some else None,
            last if some else None,
            attempts,
            batch.drop_reasons.get(row, ""),
        )
        for row, length, end, some, first, last, state, reward, finish, attempts in columns
    ]


def _versions(batch: StepBatch, ragged: Ragged, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Whether the model has said something in each row, and the versions of its first and last token there."""
    said = np.flatnonzero(ragged.versions >= 0)  # what an environment has written is passed over
    starts, ends = np.searchsorted(said, ends - ragged.lengths), np.searchsorted(said, ends)
    if not len(said):
        return ends > starts, ends, ends
    at = np.minimum(np.stack([starts, ends - 1]), len(said) - 1)  # an empty row's are not read
    first, last = ragged.versions[said[at]]
    return ends > starts, first, last
