"""One line of the journal's ``samples`` table: how a sample ended, by what two runs are compared."""

from __future__ import annotations

import math
from typing import Final

import msgspec
import numpy as np
import xxhash

from actors.ledger.batch import SampleState, StepBatch
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
    """xxh3-128 of the response tokens as little-endian int32, in hex."""
    n_tokens: int
    reward: float | None
    finish: str
    first_version: int | None
    """Policy version of the first token; None for an empty response."""
    last_version: int | None
    attempts: int
    """Number of times that it was handed to a worker."""
    reason: str
    """Reason why it was dropped."""


def committed_rows(job: str, batch: StepBatch) -> list[CommittedSample]:
    """All samples of a committed batch."""
    n = len(batch)
    ragged = batch.ragged(np.arange(n, dtype=np.int32))
    tokens = memoryview(ragged.tokens.astype("<i4").tobytes())
    ends = np.cumsum(ragged.lengths)
    some = ragged.lengths > 0
    at = np.minimum(np.stack([ends - ragged.lengths, ends - 1]), max(ends[-1] - 1, 0))  # an empty row's are not read
    first, last = ragged.versions[at] if ends[-1] else np.zeros((2, n), np.int32)
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
