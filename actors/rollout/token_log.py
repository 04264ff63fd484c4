"""What a worker has said last, and what it could not say: enough to go on with another life of its scheduler.

    engine step ─▶ add ─▶ newest reports, bounded ──── the scheduler is gone: nothing is trimmed, up to a bound ────┐
                                                                                                                   ▼
    Registered(which of them the next one takes, and how many tokens of each it has) ──────▶ continuation ─▶ reports

The journal of a head that was killed may lack what was said within its last moments; the newest reports hold that too.

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

from actors.protocol.tokens import FinishReason, TokenReport


@dataclass(frozen=True, slots=True)
class Kept:
    """Names an assignment that the next scheduler has taken over."""

    number: int
    """Under which it goes on."""
    length: int
    """Response tokens that the scheduler has."""


class TokenLog:
    """Holds reports in the order in which they were made.

    Args:
        newest_tokens: how many are remembered of what has been said.
        orphan_tokens: how many are kept that nobody has heard.
    """

    def __init__(self, newest_tokens: int, orphan_tokens: int) -> None:
        self._newest = newest_tokens
        self._most = newest_tokens + orphan_tokens
        self._reports: deque[TokenReport] = deque()
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

    def add(self, report: TokenReport) -> None:
        """Remember a report; a row without tokens counts as one."""
        self._reports.append(report)
        self._size += report.weight
        if self.orphaned:
            self._unheard += len(report.tokens)
            return
        while self._size > self._newest and len(self._reports) > 1:
            self._size -= self._reports.popleft().weight

    def assignments(self) -> set[int]:
        """Every assignment of which something is remembered."""
        return {number for report in self._reports for number in report.assignments.tolist()}

    def clear(self) -> None:
        """Nobody will go on with any of it."""
        self._reports.clear()
        self._size, self.orphaned = 0, False

    def continuation(self, kept: dict[int, Kept], term: int) -> list[TokenReport]:
        """What the scheduler lacks of ``kept`` (by their former numbers), one report for each version in a row."""
        at = {number: has.length for number, has in kept.items()}
        return [
            report for version in _runs(self._reports) if (report := _following(version, kept, at, term)) is not None
        ]


def _runs(reports: deque[TokenReport]) -> Iterator[list[TokenReport]]:
    """Reports of the same version that follow each other."""
    run: list[TokenReport] = []
    for report in reports:
        if run and run[-1].policy_version != report.policy_version:
            yield run
            run = []
        run.append(report)
    if run:
        yield run


@dataclass(slots=True)
class _Row:
    """Holds one assignment's part of a continuation."""

    offset: int
    tokens: list[np.ndarray]
    logprobs: list[np.ndarray]
    finished: int = FinishReason.RUNNING


def _following(run: list[TokenReport], kept: dict[int, Kept], at: dict[int, int], term: int) -> TokenReport | None:
    """The rows of ``run`` that follow on, one an assignment; ``at`` says where each goes on, and is moved along."""
    rows: dict[int, _Row] = {}
    for report in run:
        ends = np.cumsum(report.counts).tolist()
        ids, logprobs = report.tokens, report.logprobs
        columns = zip(
            report.assignments.tolist(), report.offsets.tolist(), report.counts.tolist(), report.finished.tolist(),
            ends, strict=True,
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
    return TokenReport.of(
        job=newest.job,
        worker=newest.worker,
        term=term,
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
