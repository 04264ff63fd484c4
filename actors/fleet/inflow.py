"""Enters the tokens that workers report into the ledger: all waiting reports become one event.

    mailbox ─▶ reports ─▶ of this term, and of living workers ─▶ joined, columns end to end ─▶ ledger and journal
                            └─ stale: ignored                        └─ unsound: its worker's samples are taken back

Invariants
- A report of another life of its worker, or of an older term, never enters.
- A report that cannot be read, or that no sound engine can have made (``ledger/report_check.py``), never enters, and
  keeps no other one from entering. Its worker's samples go elsewhere; with ``unsound_reports_max`` of them in one life
  the worker loses its lease.
- One turn of the loop enters few tokens, however many are waiting, since the head has other messages to handle.
- A worker that asks is told up to which report all has been taken; until then it sends little more (``outbox.py``).
- A sample whose tokens the ledger refuses is stopped at its worker, which would generate it in vain.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import cast

import numpy as np

from actors.core.actor import Delivery
from actors.fleet.returns import Returns
from actors.fleet.scope import JobScope
from actors.fleet.workers import Worker
from actors.ledger import events as ev
from actors.ledger.errors import IllegalTransition, Nonsense
from actors.ledger.report_check import ReportCheck
from actors.policies.assigning.latency_table import step_shapes
from actors.protocol.failures import FailureKind
from actors.protocol.tokens import ROW, TOKEN, TokenReport, joined_routes
from actors.protocol.work import ReportsTaken


class Inflow:
    """The inflow enters the tokens that workers send into the ledger."""

    def __init__(
        self, scope: JobScope, returns: Returns, check: ReportCheck, dismiss: Callable[[Worker, str], None]
    ) -> None:
        """``dismiss``: takes a worker's lease for good."""
        self._scope, self._returns = scope, returns
        self._check, self._dismiss = check, dismiss

    async def take_in_portions(self, batch: Sequence[Delivery]) -> None:
        """Take TokenReports in the order in which they came, handling other messages between two portions."""
        for number, portion in enumerate(self.portions(batch)):
            if number:
                await asyncio.sleep(0)
            await self._scope.ledger_writer.journal.room()
            self.take(portion)

    def portions(self, batch: Sequence[Delivery]) -> Iterator[list[Delivery]]:
        """Cut ``batch`` into portions, each of which ends with the report that makes it reach ``entry_tokens``."""
        portion, tokens = list[Delivery](), 0
        for delivery in batch:
            portion.append(delivery)
            tokens += cast("TokenReport", delivery.message).weight
            if tokens >= self._scope.ctx.limits.entry_tokens:
                yield portion
                portion, tokens = [], 0
        if portion:
            yield portion

    def take(self, batch: Sequence[Delivery]) -> None:
        """Take one portion of TokenReports, in the order in which they came."""
        scope = self._scope
        now, term = scope.ctx.now(), scope.ledger.term
        said: list[tuple[Worker, TokenReport]] = []
        confirmed: dict[str, tuple[Worker, int]] = {}
        for delivery in batch:
            report = cast("TokenReport", delivery.message)
            worker = scope.speaker(report.worker, delivery.sender)
            if worker is None or report.term != term:
                continue
            scope.workers.heard(worker, report.stats, now)
            if report.confirm:
                confirmed[worker.name] = worker, report.sequence
            if report.row_bytes or report.token_bytes:
                said.append((worker, report))
        if said:
            self._enter(said)
        for worker, sequence in confirmed.values():
            scope.tell(worker.address, ReportsTaken(job=scope.name, term=term, sequence=sequence))

    def _enter(self, said: list[tuple[Worker, TokenReport]]) -> None:
        scope = self._scope
        try:
            event = joined([report for _, report in said])
            self._check.check(scope.ledger, event)
            outcome = scope.ledger_writer.apply(event)
        except IllegalTransition as error:
            if len(said) == 1:
                self._refuse(said[0][0], error)
            else:
                for one in said:
                    if scope.workers.by_name.get(one[0].name) is one[0]:  # else it was dismissed for the one before
                        self._enter([one])
            return
        newest = next(reversed(scope.ledger.batches.values()), None)
        prompt_tokens = 0.0 if newest is None else newest.prompt_tokens
        shapes = step_shapes(event.offsets, event.counts, event.row_counts)
        for (worker, report), shape in zip(said, shapes, strict=True):
            if not worker.began:
                worker.began = True
                scope.record("worker_began", worker=worker.name, version=report.policy_version)
            worker.latency.add(report.stats.step_s, shape, prompt_tokens)
            worker.ran(max(shape.sequences, report.stats.running), others_waited=report.stats.queued > 0)
        self._returns.after(outcome)
        for name, numbers in outcome.broken.items():
            scope.event("assignments_broken", worker=name, samples=len(numbers))
            self._returns.revoke(scope.workers.by_name[name], numbers, "its tokens did not follow on")

    def _refuse(self, worker: Worker, error: IllegalTransition) -> None:
        """Take back what the worker holds. Samples that may be the cause are counted as failed, and dropped in time."""
        scope, why = self._scope, str(error)
        scope.event("delta_refused", worker=worker.name, why=why)
        scope.trouble("unsound_report", f"a report of {worker.name} on {worker.node} is refused: {why}")
        numbers = scope.ledger.in_flight(worker.name)
        blamed = np.intersect1d(numbers, error.samples) if isinstance(error, Nonsense) else numbers[:0]
        suspects = scope.ledger.located(worker.name, blamed).items()
        if not suspects or not all(scope.ledger.batches[step].failures[rows].all() for step, rows in suspects):
            worker.unsound_reports += 1  # else these samples have failed before: they are the cause, and not the worker
        worker.rest(scope.ctx.now(), scope.limits.backoff_first_s, scope.limits.backoff_max_s)  # others try them first
        self._returns.revoke(worker, blamed, f"{FailureKind.DATA}: {why}", blame=True)
        if worker.unsound_reports < scope.limits.unsound_reports_max:
            self._returns.revoke(worker, np.setdiff1d(numbers, blamed), "its report could not be read")
        else:
            self._dismiss(worker, f"it has made {worker.unsound_reports} reports that no sound engine makes")


def joined(reports: Sequence[TokenReport]) -> ev.TokensAppended:
    """Make one event of many reports, each of which has rows.

    Raises:
        IllegalTransition: the bytes of one of them are not what they should be.
    """
    row_bytes, token_bytes = [report.row_bytes for report in reports], [report.token_bytes for report in reports]
    row_counts, token_counts = _whole(row_bytes, ROW.itemsize), _whole(token_bytes, TOKEN.itemsize)
    if row_counts is None or token_counts is None or 0 in row_counts:
        raise IllegalTransition("a report has a part of a row, a part of a token, or no row")
    rows, tokens = np.frombuffer(b"".join(row_bytes), ROW), np.frombuffer(b"".join(token_bytes), TOKEN)
    counts, starts = rows["count"].copy(), [0, *accumulate(row_counts[:-1])]
    if np.add.reduceat(counts, starts).tolist() != token_counts:
        raise IllegalTransition("the counts in the rows of a report do not add up to its number of tokens")
    try:
        versions = np.array([report.policy_version for report in reports], np.int32)
    except OverflowError as error:
        raise IllegalTransition(f"a report has a version that is none: {error}") from error
    try:
        routes = joined_routes([report.routes for report in reports], token_counts)
    except ValueError as error:
        raise IllegalTransition(f"a report has routes that do not fit its tokens: {error}") from error
    return ev.TokensAppended(
        workers=[report.worker for report in reports],
        versions=versions,
        row_counts=np.array(row_counts, np.int32),
        assignments=rows["assignment"].copy(),
        offsets=rows["offset"].copy(),
        counts=counts,
        finished=rows["finished"].copy(),
        tokens=tokens["id"].copy(),
        logprobs=tokens["logprob"].copy(),
        routes=routes,
    )


def _whole(parts: list[bytes], size: int) -> list[int] | None:
    """How many records of ``size`` bytes each part has; None if the bytes are no whole records."""
    counts = [len(part) // size for part in parts]
    return counts if sum(counts) * size == sum(map(len, parts)) else None
