"""A log of a worker's newest reports, sent or not: enough to continue with the next life of its scheduler.

    engine step ─▶ add ─▶ newest reports, bounded ──── the scheduler is gone: nothing is trimmed, up to a bound ────┐
                                                                                                                   ▼
    Registered(which samples the next one keeps, and how many tokens of each it has) ──────▶ continuation ─▶ reports

The journal of a head that was killed may lack the last reports that it got; the newest reports here include those.

Invariants
- A continuation has for each assignment the rows that follow the scheduler's tokens without a gap, oldest first, each
  with the version that made it. If a row is missing, the continuation ends before it.
- Tokens are never thrown away while the scheduler is gone: the engine has to stop when the log is ``full``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from actors.protocol.tokens import FinishReason, TokenReport, joined_routes


@dataclass(frozen=True, slots=True)
class KeptAssignment:
    """Describes an assignment that the next scheduler continues."""

    number: int
    """Number of the assignment from now on."""
    length: int
    """Number of response tokens that the scheduler has."""


class TokenLog:
    """Holds reports in the order in which they were made.

    Args:
        newest_tokens: number of sent tokens to remember.
        orphan_tokens: number of further tokens to keep while there is no scheduler.
    """

    def __init__(self, newest_tokens: int, orphan_tokens: int) -> None:
        self._newest = newest_tokens
        self._most = newest_tokens + orphan_tokens
        self._reports: deque[TokenReport] = deque()
        self._size = 0
        self._unheard = 0
        self.orphaned = False
        """Whether there is no scheduler to send reports to."""

    @property
    def full(self) -> bool:
        """Whether no further token may be generated."""
        return self.orphaned and self._size >= self._most

    @property
    def unheard_tokens(self) -> int:
        """Number of tokens generated since the scheduler was lost."""
        return self._unheard

    def lose(self) -> None:
        """Note that the scheduler is gone: trim nothing from now on."""
        self.orphaned, self._unheard = True, 0

    def add(self, report: TokenReport) -> None:
        """Remember a report; towards the bound a row without tokens counts as one token."""
        self._reports.append(report)
        self._size += report.weight
        if self.orphaned:
            self._unheard += len(report.tokens)
            return
        while self._size > self._newest and len(self._reports) > 1:
            self._size -= self._reports.popleft().weight

    def assignments(self) -> set[int]:
        """All assignments that have a row in a remembered report."""
        return {number for report in self._reports for number in report.assignments.tolist()}

    def clear(self) -> None:
        """Forget all reports, which nobody will need any more."""
        self._reports.clear()
        self._size, self.orphaned = 0, False

    def continuation(self, kept: dict[int, KeptAssignment], term: int) -> list[TokenReport]:
        """Reports with all that the scheduler lacks of ``kept`` (by former number). Those of one version become one."""
        at = {number: has.length for number, has in kept.items()}
        return [
            report for version in _runs(self._reports) if (report := _following(version, kept, at, term)) is not None
        ]


def _runs(reports: deque[TokenReport]) -> Iterator[list[TokenReport]]:
    """Group consecutive reports of the same version."""
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
    routes: list[np.ndarray | None]
    finished: int = FinishReason.RUNNING


def _following(
    run: list[TokenReport], kept: dict[int, KeptAssignment], at: dict[int, int], term: int
) -> TokenReport | None:
    """One report of the rows in ``run`` that continue an assignment from its offset in ``at``, which is advanced."""
    rows: dict[int, _Row] = {}
    for report in run:
        ends = np.cumsum(report.counts).tolist()
        ids, logprobs, routes = report.tokens, report.logprobs, report.routes
        columns = zip(
            report.assignments.tolist(), report.offsets.tolist(), report.counts.tolist(), report.finished.tolist(),
            ends, strict=True,
        )  # fmt: skip
        for number, offset, count, finished, end in columns:
            if at.get(number) != offset:
                continue
            row = rows.setdefault(number, _Row(offset, [], [], []))
            row.tokens.append(ids[end - count : end])
            row.logprobs.append(logprobs[end - count : end])
            row.routes.append(None if routes is None else routes[end - count : end])
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
        routes=joined_routes(
            [routes for row in parts for routes in row.routes], [len(tokens) for row in parts for tokens in row.tokens]
        ),
    )
