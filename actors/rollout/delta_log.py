"""What a worker has said last, and what it could not say: enough to go on with another life of its scheduler.

    engine step ─▶ add ─▶ newest deltas, bounded ──── the scheduler is gone: nothing is trimmed, up to a bound ────┐
                                                                                                                   ▼
    Registered(which of them the next one takes, and how many tokens of each it has) ──────▶ continuation ─▶ deltas

The journal of a head that was killed may lack what was said within its last moments; the newest deltas hold that too.

Invariants
- A continuation has for each assignment the rows that follow on what the scheduler has, without a gap, oldest first,
  each with the version that made it. Where something is missing the rows before that are all there is.
- Tokens are never thrown away while the scheduler is gone: the engine has to stop when it is ``full``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from actors.protocol.tokens import FinishReason, TokenDelta


@dataclass(frozen=True, slots=True)
class Kept:
    """Names an assignment that the next scheduler has taken over."""

    number: int
    """Under which it goes on."""
    length: int
    """Response tokens that the scheduler has."""


class DeltaLog:
    """Holds deltas in the order in which they were made.

    Args:
        newest_tokens: how many are remembered of what has been said.
        orphan_tokens: how many are kept that nobody has heard.
    """

    def __init__(self, newest_tokens: int, orphan_tokens: int) -> None:
        self._newest = newest_tokens
        self._most = newest_tokens + orphan_tokens
        self._deltas: deque[TokenDelta] = deque()
        self._size = 0
        self._unheard = 0
        self.orphaned = False
        """Nobody hears what is added."""

    @property
    def full(self) -> bool:
        """No further token may be made."""
        return self.orphaned and self._size >= self._most

    @property
    def unheard_tokens(self) -> int:
        """Made since the scheduler was lost."""
        return self._unheard

    def lose(self) -> None:
        """The scheduler is gone."""
        self.orphaned, self._unheard = True, 0

    def add(self, delta: TokenDelta) -> None:
        """Remember a delta; a row without tokens counts as one."""
        self._deltas.append(delta)
        self._size += delta.weight
        if self.orphaned:
            self._unheard += len(delta.tokens)
            return
        while self._size > self._newest and len(self._deltas) > 1:
            self._size -= self._deltas.popleft().weight

    def assignments(self) -> set[int]:
        """Every assignment of which something is remembered."""
        return {number for delta in self._deltas for number in delta.assignments.tolist()}

    def clear(self) -> None:
        """Nobody will go on with any of it."""
        self._deltas.clear()
        self._size, self.orphaned = 0, False

    def continuation(self, kept: dict[int, Kept], epoch: int) -> list[TokenDelta]:
        """What the scheduler lacks of ``kept`` (by their former numbers), one delta for each version in a row."""
        at = {number: has.length for number, has in kept.items()}
        return [delta for version in _runs(self._deltas) if (delta := _following(version, kept, at, epoch)) is not None]


def _runs(deltas: deque[TokenDelta]) -> Iterator[list[TokenDelta]]:
    """Deltas of the same version that follow each other."""
    run: list[TokenDelta] = []
    for delta in deltas:
        if run and run[-1].policy_version != delta.policy_version:
            yield run
            run = []
        run.append(delta)
    if run:
        yield run


@dataclass(slots=True)
class _Row:
    """Holds one assignment's part of a continuation."""

    offset: int
    tokens: list[np.ndarray]
    logprobs: list[np.ndarray]
    finished: int = FinishReason.RUNNING


def _following(run: list[TokenDelta], kept: dict[int, Kept], at: dict[int, int], epoch: int) -> TokenDelta | None:
    """The rows of ``run`` that follow on, one an assignment; ``at`` says where each goes on, and is moved along."""
    rows: dict[int, _Row] = {}
    for delta in run:
        ends = np.cumsum(delta.counts).tolist()
        ids, logprobs = delta.tokens, delta.logprobs
        columns = zip(
            delta.assignments.tolist(), delta.offsets.tolist(), delta.counts.tolist(), delta.finished.tolist(), ends,
            strict=True,
        )  # fmt: skip
        for number, offset, count, finished, end in columns:
            if at.get(number) != offset:
                continue
            row = rows.setdefault(number, _Row(offset, [], []))
            row.tokens.append(ids[end - count : end])
            row.logprobs.append(logprobs[end - count : end])
            row.finished = finished
            at[number] = offset + count if finished == FinishReason.RUNNING else -1
    if not rows:
        return None
    parts, newest = list(rows.values()), run[-1]
    return TokenDelta.of(
        job=newest.job,
        worker=newest.worker,
        epoch=epoch,
        sequence=newest.sequence,
        policy_version=newest.policy_version,
        stats=newest.stats,
        assignments=np.array([kept[number].number for number in rows], np.int64),
        offsets=np.array([row.offset for row in parts], np.int32),
        counts=np.array([sum(map(len, row.tokens)) for row in parts], np.int32),
        finished=np.array([row.finished for row in parts], np.uint8),
        tokens=np.concatenate([tokens for row in parts for tokens in row.tokens]),
        logprobs=np.concatenate([logprobs for row in parts for logprobs in row.logprobs]),
    )
