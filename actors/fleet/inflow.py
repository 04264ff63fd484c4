"""Tokens from workers into the ledger: all reports that wait, as one event.

    mailbox ─▶ reports ─▶ of this reign, and of living workers ─▶ joined, columns end to end ─▶ ledger and journal
                            └─ stale: ignored                        └─ unreadable: its worker is stopped

Invariants
- A report of another life of its worker, or of an older term, never enters.
- A report that cannot be read keeps no other one from entering.
- One turn of the loop enters few tokens, however many the reports hold that wait: the head has others to hear.
- A worker is told what has been taken of what it asked about; until then it says little more (``outbox.py``).
- What the ledger does not take is stopped at its worker: it would go on generating for nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import cast

import numpy as np

from actors.core.actor import Delivery
from actors.fleet.returns import Returns
from actors.fleet.scope import JobScope
from actors.fleet.workers import Worker
from actors.ledger import events as ev
from actors.ledger.errors import IllegalTransition
from actors.policies.latency_table import step_shapes
from actors.protocol.tokens import ROW, TOKEN, TokenReport
from actors.protocol.work import ReportsTaken


class Inflow:
    """It brings the tokens that workers send into the ledger."""

    def __init__(self, scope: JobScope, returns: Returns) -> None:
        self._scope = scope
        self._returns = returns

    async def take_in_turns(self, batch: Sequence[Delivery]) -> None:
        """TokenReports in the order in which they came; others are heard between two turns."""
        for number, turn in enumerate(self.turns(batch)):
            if number:
                await asyncio.sleep(0)
            await self._scope.journaled.journal.room()
            self.take(turn)

    def turns(self, batch: Sequence[Delivery]) -> Iterator[list[Delivery]]:
        """``batch`` in order, cut so that each part but for its last report holds fewer than ``entry_tokens``."""
        turn, tokens = list[Delivery](), 0
        for delivery in batch:
            turn.append(delivery)
            tokens += cast("TokenReport", delivery.message).weight
            if tokens >= self._scope.ctx.limits.entry_tokens:
                yield turn
                turn, tokens = [], 0
        if turn:
            yield turn

    def take(self, batch: Sequence[Delivery]) -> None:
        """TokenReports in the order in which they came."""
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
            outcome = scope.journaled.apply(event)
        except IllegalTransition as error:
            if len(said) == 1:
                self._refuse(said[0][0], str(error))
            else:
                for one in said:
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

    def _refuse(self, worker: Worker, why: str) -> None:
        self._scope.event("delta_refused", worker=worker.name, why=why)
        numbers = self._scope.ledger.in_flight(worker.name)
        self._returns.revoke(worker, numbers, "its report could not be read")


def joined(reports: Sequence[TokenReport]) -> ev.TokensAppended:
    """One event of many reports, each of which has rows.

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
        raise IllegalTransition("the rows of a report do not count its tokens")
    return ev.TokensAppended(
        workers=[report.worker for report in reports],
        versions=np.array([report.policy_version for report in reports], np.int32),
        row_counts=np.array(row_counts, np.int32),
        assignments=rows["assignment"].copy(),
        offsets=rows["offset"].copy(),
        counts=counts,
        finished=rows["finished"].copy(),
        tokens=tokens["id"].copy(),
        logprobs=tokens["logprob"].copy(),
    )


def _whole(parts: list[bytes], size: int) -> list[int] | None:
    """How many records of that size each part has; None if one has a part of a record."""
    counts = [len(part) // size for part in parts]
    return counts if sum(counts) * size == sum(map(len, parts)) else None
