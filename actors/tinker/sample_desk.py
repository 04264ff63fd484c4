"""Samples of all sampling sessions: stored, drawn many at once, answered.

    submit ─▶ stored ─▶ room among tinker_samples_at_once? ─▶ sampler ─▶ settled ─▶ who polls is told

Invariants
- A sample is named by its sampling session and number, and is drawn with the seed in its stored request: one that was
  interrupted is drawn again, with the same tokens, and a repeat is answered with the first one's.
- A tenant that fills its own bound makes nobody else wait longer than its samples at hand take.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import structlog

from actors.tinker import operations as op
from actors.tinker.accounts import Events, Stopwatch
from actors.tinker.directories import Directories
from actors.tinker.errors import LearnerLost, LogFailed, LogUnreadable, OperationRefused, Problem
from actors.tinker.operation_log import OperationLog, SamplerRow
from actors.tinker.sampling import Sampled, Sampler, TopTokens
from configs.limits import Limits

_NEEDED: Final = 2
"""Unnamed snapshots of a model that a loop needs at once: the one it samples from, and the next."""


class SampleDesk:
    """Takes in and answers requests for samples."""

    def __init__(
        self,
        log: OperationLog,
        samplers: Mapping[str, Sampler],
        directories: Directories,
        limits: Limits,
        events: Events,
        answered: Callable[[str, int], None],
        failed: Callable[[LogFailed], None],
    ) -> None:
        self._log, self._samplers, self._directories, self._events = log, samplers, directories, events
        self._limits, self._answered, self._failed = limits, answered, failed
        self._rows: dict[str, SamplerRow] = {}
        self._used: dict[str, None] = {}
        """Sampling sessions whose weights have no name; the one that was used least recently is first."""
        self.waiting = Counter[str]()
        """Tenant → number of its samples that are not answered."""
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._storing: dict[tuple[str, int], asyncio.Future[bool]] = {}
        self._room = asyncio.Semaphore(limits.tinker_samples_at_once)
        self._logger = structlog.get_logger("headrace.tinker")

    # ------------------------------------------------------------ sampling sessions

    def add(self, row: SamplerRow) -> None:
        """Take in a sampling session; one of in-flight weights changes those of its like."""
        self._rows[row.id] = row
        if row.in_flight:
            for other in [one for one in self._rows.values() if one.in_flight and one.model == row.model]:
                self._rows[other.id] = other._replace(directory=row.directory)
        if row.model is not None:
            self._used[row.id] = None

    def row(self, tenant: str, sampler: str) -> SamplerRow:
        """Raises Problem: the tenant has no such sampling session, or it has ended."""
        row = self._rows.get(sampler)
        if row is None or row.tenant != tenant:
            text = f"there is no sampling session {sampler[:200]!r} of yours, or it has ended with its session or as"
            raise Problem(404, f"sampling_session_id: {text} the oldest of many snapshots: make a new one")
        return row

    def rows(self) -> list[SamplerRow]:
        return list(self._rows.values())

    def count(self, tenant: str) -> int:
        return sum(row.tenant == tenant for row in self._rows.values())

    def knows(self, sampler: str) -> bool:
        return sampler in self._rows

    def owner(self, sampler: str) -> str | None:
        """The tenant of a sampling session; None: there is none."""
        return self._rows[sampler].tenant if sampler in self._rows else None

    def superfluous(self, model: str) -> list[str]:
        """Unnamed snapshots of a model beyond the limit, those that were used least recently."""
        mine = [sampler for sampler in self._used if self._rows[sampler].model == model]
        return mine[: max(0, len(mine) - self._limits.tinker_snapshots)]

    def unneeded(self, tenant: str) -> str | None:
        """The unnamed snapshot of a tenant that was used least recently; each model keeps the two used last."""
        later = Counter[str | None]()
        found = None
        for row in (self._rows[sampler] for sampler in reversed(self._used)):
            later[row.model] += 1
            if row.tenant == tenant and not row.in_flight and later[row.model] > _NEEDED:
                found = row.id
        return found

    def of_session(self, session: str) -> list[str]:
        return [row.id for row in self._rows.values() if row.session == session]

    def end(self, sampler: str) -> None:
        """Stop the samples of a sampling session that has ended."""
        self._rows.pop(sampler, None)
        self._used.pop(sampler, None)
        for (other, _), task in self._tasks.items():
            if other == sampler:
                task.cancel()

    # ------------------------------------------------------------ samples

    async def submit(self, row: SamplerRow, seq: int, body: bytes) -> None:
        """Store a sample and begin to draw it, unless that has been done. It is durable when this returns.

        Raises:
            Problem: too many samples of the tenant wait.
        """
        if row.id in self._used:
            self._used[row.id] = self._used.pop(row.id)  # now the one that was used last
        name = (row.id, seq)
        if name in self._tasks:
            return
        storing = self._storing.get(name)
        if storing is None:
            if self.waiting[row.tenant] >= self._limits.tinker_waiting_samples:
                text = f"{self.waiting[row.tenant]} samples of yours wait: send more when some are answered"
                raise Problem(429, text, retry_after_s=self._limits.tinker_busy_s)
            self.waiting[row.tenant] += 1
            storing = self._storing[name] = asyncio.ensure_future(self._store(row, seq, body))
        async with asyncio.timeout(self._limits.tinker_log_s):
            await asyncio.shield(storing)

    async def _store(self, row: SamplerRow, seq: int, body: bytes) -> bool:
        begins = False
        try:
            begins = await self._log.store(row.id, seq, body)
        finally:
            del self._storing[row.id, seq]
            if not begins:
                self.waiting[row.tenant] -= 1
        if begins:
            self._begin(row, seq)
        return begins

    def resume(self, sampler: str, seq: int) -> None:
        """Draw a sample that a former life has stored."""
        row = self._rows[sampler]
        self.waiting[row.tenant] += 1
        self._begin(row, seq)

    def waits(self, sampler: str, seq: int) -> bool:
        return (sampler, seq) in self._tasks or (sampler, seq) in self._storing

    async def cancel(self, row: SamplerRow, seq: int) -> None:
        """End a sample that nobody waits for any more, unless it has an answer. Durable when this returns."""
        if (storing := self._storing.get((row.id, seq))) is not None:
            async with asyncio.timeout(self._limits.tinker_log_s):
                await asyncio.shield(storing)
        if (task := self._tasks.get((row.id, seq))) is not None:
            answer = op.Failed("the client has cancelled it", of_user=True)
            spent = Stopwatch().spent(row.tenant, row.origin, answer)
            await self._log.settle(row.id, seq, answer, spent)
            self._events.operation("sample", seq, answer, spent)
            await self._end_tasks([task])
            self._answered(row.id, seq)

    def _begin(self, row: SamplerRow, seq: int) -> None:
        self._tasks[row.id, seq] = asyncio.create_task(self._draw(row, seq), name=f"sample {row.id}/{seq}")

    async def _draw(self, row: SamplerRow, seq: int) -> None:
        watch = Stopwatch()
        try:
            async with self._room:
                watch.begins()
                answer = await self._outcome(row, seq)
            spent = watch.spent(row.tenant, row.origin, answer)
            await self._log.settle(row.id, seq, answer, spent)
            self._events.operation("sample", seq, answer, spent)
            self._answered(row.id, seq)
        except LogFailed as failure:
            self._failed(failure)
        finally:
            del self._tasks[row.id, seq]
            self.waiting[row.tenant] -= 1

    async def _outcome(self, row: SamplerRow, seq: int) -> op.Answer:
        error: Exception | None = None
        for _ in range(self._limits.tinker_attempts):
            try:
                operation = await self._log.operation(row.id, seq)
                if isinstance(operation, op.Refused):
                    return op.Failed(operation.why, of_user=True)
                assert isinstance(operation, op.Sample), f"{operation} is no sample"
                return op.Samples.of(await self._sampled(self._rows.get(row.id, row), operation))
            except OperationRefused as refused:
                return op.Failed(str(refused), of_user=True)
            except (LearnerLost, TimeoutError) as lost:
                error = lost
            except LogFailed:
                raise
            except LogUnreadable as damaged:
                return op.Failed(str(damaged), of_user=False)
            except Exception as failure:
                self._logger.exception("a sample failed", sampler=row.id, number=seq)
                return op.Failed(f"it failed here: {type(failure).__name__}: {failure}", of_user=False)
        return op.Failed(f"what samples died {self._limits.tinker_attempts} times, last: {error}", of_user=False)

    async def _sampled(self, row: SamplerRow, asked: op.Sample) -> Sampled:
        snapshot: Path | None = None
        if row.directory is not None:
            if not await self._directories.exists(row.directory):
                raise OperationRefused(f"the weights of {row.id} are gone: their time is over")
            snapshot = self._directories.path(row.directory)
        async with asyncio.timeout(self._limits.tinker_operation_s):
            sampled = await self._samplers[row.base_model].sample(
                snapshot, asked.prompt.array(), asked.n, asked.parameters,
                prompt_logprobs=asked.prompt_logprobs, topk_prompt_logprobs=asked.topk,
            )  # fmt: skip
        return _of_the_last(sampled, asked.last_prompt_logprobs)

    async def close(self) -> None:
        await self._end_tasks([*self._tasks.values()])

    async def _end_tasks(self, tasks: list[asyncio.Task[None]]) -> None:
        """Cancel tasks, and wait until they have ended; one that hangs is left behind."""
        for task in tasks:
            task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._limits.stop_timeout_s):
                await asyncio.gather(*tasks, return_exceptions=True)


def _of_the_last(sampled: Sampled, n: int | None) -> Sampled:
    """``sampled``, with log-probabilities of the prompt's last ``n`` tokens alone."""
    if n is None or sampled.prompt_logprobs is None:
        return sampled
    logprobs = sampled.prompt_logprobs.copy()
    before = slice(0, max(0, len(logprobs) - n))
    logprobs[before] = float("nan")
    top = sampled.prompt_top
    if top is not None:
        top = TopTokens(top.tokens.copy(), top.logprobs.copy())
        top.tokens[before], top.logprobs[before] = 0, -99999.0
    return Sampled(sampled.sequences, logprobs, top)
