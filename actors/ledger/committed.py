"""Rows of the journal's ``samples`` table: how each sample ended, by which two runs can be compared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
import xxhash

from actors.ledger.batch import Ragged, SampleState, StepBatch
from actors.protocol.endings import Ending
from actors.protocol.tokens import FinishReason

_STATES: Final = {int(state): state.name.lower() for state in SampleState}
_FINISHES: Final = {
    **{int(ending): ending.label for ending in Ending},
    **{int(finish): finish.name.lower() for finish in FinishReason},
}


class CommittedSample(msgspec.Struct, frozen=True):
    """Tells how a sample ended. Two that are equal up to ``reward`` have the same name, tokens and reward."""

    job: str
    step: int
    prompt: int
    sibling: int
    state: str
    """State in which the sample ended: ``committed`` or ``dropped``."""
    tokens_hash: str
    """Hash xxh3-128 of the response tokens as little-endian int32, in hex; in an episode, the environment's too."""
    n_tokens: int
    reward: float | None
    finish: str
    first_version: int | None
    """Policy version of the model's first token; None if it has said nothing."""
    last_version: int | None
    attempts: int
    """Number of times that the sample was handed out; of an episode: in its last turn."""
    reason: str
    """Reason why the sample was dropped; empty if it was not."""

    @classmethod
    def of_row(cls, row: Sequence[object]) -> CommittedSample:
        """A row of the table, as it was read.

        Raises:
            ValueError: it is none that a run has written.
        """
        try:
            sample = msgspec.convert(dict(zip(cls.__struct_fields__, row, strict=True)), cls)
        except msgspec.ValidationError as error:
            raise ValueError(f"a row of samples is {tuple(row)!r:.200}: {error}") from error
        if not 0 <= sample.n_tokens < 1 << 31:
            raise ValueError(f"a row of samples has {sample.n_tokens} tokens")
        return sample


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
    at = np.minimum(np.stack([starts, ends - 1]), len(said) - 1)  # positions of empty rows are not read
    first, last = ragged.versions[said[at]]
    return ends > starts, first, last
