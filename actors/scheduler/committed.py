"""One line of the journal's ``samples`` table: how a sample ended, by what two runs are compared."""

from __future__ import annotations

import msgspec
import numpy as np
import xxhash

from actors.scheduler.batch import SampleState, StepBatch
from actors.scheduler.messages import FinishReason


class CommittedSample(msgspec.Struct, frozen=True):
    """Equal fields up to ``reward`` mean: the same sample with the same tokens and the same reward."""

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
    """How often it was handed to a worker."""
    reason: str
    """Why it was dropped."""


def committed_rows(job: str, batch: StepBatch) -> list[CommittedSample]:
    """All samples of a committed batch."""
    n = len(batch)
    ragged = batch.ragged(np.arange(n, dtype=np.int32))
    tokens = memoryview(ragged.tokens.astype("<i4").tobytes())
    ends = np.cumsum(ragged.lengths).tolist()
    rows: list[CommittedSample] = []
    start = 0
    for row, end in enumerate(ends):
        some = end > start
        reward = float(batch.reward[row])
        rows.append(
            CommittedSample(
                job,
                batch.step,
                int(batch.prompts[row // batch.group_size]),
                row % batch.group_size,
                SampleState(int(batch.state[row])).name.lower(),
                xxhash.xxh3_128_hexdigest(tokens[4 * start : 4 * end]),
                end - start,
                None if np.isnan(reward) else reward,
                FinishReason(int(batch.finish[row])).name.lower(),
                int(ragged.versions[start]) if some else None,
                int(ragged.versions[end - 1]) if some else None,
                int(batch.attempts[row]),
                batch.drop_reasons.get(row, ""),
            )
        )
        start = end
    return rows
