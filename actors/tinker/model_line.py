"""One model's line of operations: each executed once in effect, in the order of their numbers.

    submit(n) ─▶ stored ─┐ n is next
                         └─▶ learner ready? ─no─▶ make ─▶ load the saved state ─▶ execute again what came after it
                             compute ─▶ boundary, and much since the saved state? ─▶ save the state
                             commit: answer, n, state ─▶ tell who polls

Invariants
- The learner's state is the one after operation ``next - 1``, or there is no learner. Whatever goes wrong in the
  middle of an operation ends the learner: the next one comes from the saved state and the log.
- A number that has not come stalls this line only. A repeat is stored once and executed once.
- A refused operation is answered and committed like any other, and has no effect. One exception: a refused optimizer
  step forgets its gradient, so it is executed again too.
- The operation that is next is always taken in, however much waits: else a full line would wait for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from actors.host.clock import time_of_day_s
from actors.tinker import operations as op
from actors.tinker.accounts import Events, Stopwatch
from actors.tinker.directories import Directories, What
from actors.tinker.errors import LearnerBusy, LearnerLost, LogFailed, LogUnreadable, OperationRefused, Problem
from actors.tinker.learner import Learner, LearnerFactory
from actors.tinker.operation_log import ModelRow, OperationLog, Outcome, SamplerRow, WeightsRow
from actors.tinker.paths import WeightsPath
from actors.tinker.tenants import Room, Tenants
from configs.limits import Limits

_LOSS = "loss:sum"


class _NotFiniteError(Exception):
    """A loss is no number, and its gradient has spoilt what was there."""


@dataclass
class _SinceSaved:
    """Counts what a death would cost now."""

    operations: int = 0
    bytes: int = 0
    seconds: float = 0.0
    unstepped: int = 0
    """Number of calls whose gradients no step has used yet."""

    def add(self, operation: op.Operation, size: int, seconds: float) -> None:
        self.operations += 1
        self.bytes += size
        self.seconds += seconds
        self.unstepped = 0 if isinstance(operation, op.OptimStep | op.Load) else self.unstepped + 1

    def is_much(self, limits: Limits) -> bool:
        return (
            self.operations >= limits.tinker_replay_operations
            or self.bytes >= limits.tinker_replay_bytes
            or self.seconds >= limits.tinker_replay_s
        )


@dataclass(frozen=True)
class LineParts:
    """Holds what all lines of a server use."""

    log: OperationLog
    factory: LearnerFactory
    directories: Directories
    limits: Limits
    tenants: Tenants
    room: Room
    events: Events
    answered: Callable[[str, int], None]
    """Called when an operation has its answer."""
    made_sampler: Callable[[SamplerRow], None]
    """Called when an operation has made a sampling session."""


@dataclass
class ModelLine:
    """Takes in, orders and executes the operations of one model."""

    row: ModelRow
    parts: LineParts
    next: int = field(init=False)
    """Number of the operation that is executed, or waited for."""
    broken: str = ""
    """Why the line cannot go on, if it cannot."""

    def __post_init__(self) -> None:
        self.next = self.row.done + 1
        self.asked_at_s = time_of_day_s()
        self._state = self.row.state
        self._stored: dict[int, int] = {}
        self._storing: dict[int, asyncio.Task[None]] = {}
        self._waiting_bytes = 0
        self._news = asyncio.Event()
        self._learner: Learner | None = None
        self._since = _SinceSaved()
        self._logger = structlog.get_logger("headrace.tinker").bind(model=self.row.id)

    # ------------------------------------------------------------ what comes in

    def resume(self, seq: int, size: int) -> None:
        """Take in an operation that a former life has stored."""
        self._stored[seq] = size
        self._waiting_bytes += size
        self._news.set()

    async def submit(self, seq: int, body: bytes) -> None:
        """Store an encoded operation, unless it is there. It is durable when this returns.

        Raises:
            Problem: too many operations of this model wait.
        """
        self.asked_at_s = time_of_day_s()
        if seq < self.next or seq in self._stored:
            return
        storing = self._storing.get(seq)
        if storing is None:
            self._admit(seq, len(body))
            self._waiting_bytes += len(body)
            storing = self._storing[seq] = asyncio.create_task(self._store(seq, body), name=f"store {seq}")
        async with asyncio.timeout(self.parts.limits.tinker_log_s):
            await asyncio.shield(storing)

    async def _store(self, seq: int, body: bytes) -> None:
        try:
            await self.parts.log.store(self.row.id, seq, body)
        except BaseException:
            self._waiting_bytes -= len(body)
            raise
        finally:
            del self._storing[seq]
        self._stored[seq] = len(body)
        self._news.set()

    def _admit(self, seq: int, size: int) -> None:
        limits, count = self.parts.limits, len(self._stored) + len(self._storing)
        if count < limits.tinker_waiting_operations and self._waiting_bytes + size <= limits.tinker_waiting_bytes:
            return
        if seq == self.missing():
            return
        text = f"{count} operations of this model wait, {self._waiting_bytes} bytes: send more when some are answered"
        raise Problem(429, text, retry_after_s=limits.tinker_busy_s)

    def missing(self) -> int:
        """The lowest number that has not come."""
        seq = self.next
        while seq in self._stored or seq in self._storing:
            seq += 1
        return seq

    def holds(self, seq: int) -> bool:
        """Whether an operation waits, or is executed."""
        return seq in self._stored or seq in self._storing

    @property
    def waiting(self) -> int:
        """Number of operations that have come and are not answered."""
        return len(self._stored) + len(self._storing)

    @property
    def is_awake(self) -> bool:
        """Whether it holds what computes."""
        return self._learner is not None

    def gap(self) -> str:
        """What the line waits for, in a sentence, if operations wait behind one that has not come; else empty."""
        if not self._stored or self.next in self._stored:
            return ""
        return f"operation {self.next} of this model has not come; {len(self._stored)} wait behind it"

    # ------------------------------------------------------------ what is executed

    async def run(self) -> None:
        """Execute operations as they come, for as long as the model lives.

        Raises:
            LogFailed: the log cannot be written.
            LogUnreadable: an operation of this model is damaged.
        """
        while True:
            if await self._has_come():
                await self._execute(self.next)
            else:
                await self._rest()

    async def close(self) -> None:
        """Release the learner, after ``run`` has ended."""
        await self._drop()

    async def _has_come(self) -> bool:
        """Whether the next operation came before the line was idle for long."""
        try:
            async with asyncio.timeout(self.parts.limits.tinker_idle_s):
                while self.next not in self._stored:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            return False
        return True

    async def _execute(self, seq: int) -> None:
        watch = Stopwatch()
        operation = await self.parts.log.operation(self.row.id, seq)
        tokens = op.training_tokens(operation)
        await self.parts.tenants.take(self.row.tenant, self.row.id, tokens)
        watch.begins()
        outcome, before = await self._outcome(seq, operation), self._state
        spent = watch.spent(self.row.tenant, self.row.id, outcome.answer, tokens)
        await self.parts.log.commit(self.row.id, seq, outcome, spent)
        self.parts.events.operation(op.kind_of(operation), seq, outcome.answer, spent)
        self._waiting_bytes -= self._stored.pop(seq)
        self.next = seq + 1
        if outcome.state is not None:
            self._state, self._since = outcome.state, _SinceSaved()
        if outcome.sampler is not None:
            self.parts.made_sampler(outcome.sampler)
        self.parts.answered(self.row.id, seq)
        if outcome.state is not None and before is not None:
            await self.parts.directories.remove(before)

    async def _outcome(self, seq: int, operation: op.Operation) -> Outcome:
        """What comes of an operation; whatever is raised here was not the operation's fault."""
        error: Exception | None = None
        tries = 0
        while tries < self.parts.limits.tinker_attempts:
            try:
                return await self._attempt(seq, operation)
            except LearnerBusy as busy:
                self._logger.info("an operation waits for room", operation=seq, why=str(busy))
                await asyncio.sleep(self.parts.limits.tinker_busy_s)
                continue
            except OperationRefused as refused:
                return Outcome(op.Failed(str(refused), of_user=True), replays=isinstance(operation, op.OptimStep))
            except _NotFiniteError as spoilt:
                await self._drop()
                return Outcome(op.Failed(str(spoilt), of_user=True))
            except (LearnerLost, TimeoutError) as lost:
                error = lost
                tries += 1
                self._logger.warning("what computes was lost; it is made again", operation=seq, error=str(lost))
                self._event("model_lost", seq=seq, why=str(lost))
                await self._drop()
            except (LogFailed, LogUnreadable):
                raise
            except Exception as failure:
                self._logger.exception("an operation failed", operation=seq)
                await self._drop()
                return Outcome(op.Failed(f"it failed here: {type(failure).__name__}: {failure}", of_user=False))
        assert error is not None, "limits.tinker_attempts is 1 or more"
        text = f"what computes died {self.parts.limits.tinker_attempts} times on it, last: {error}"
        return Outcome(op.Failed(text, of_user=False))

    async def _attempt(self, seq: int, operation: op.Operation) -> Outcome:
        if isinstance(operation, op.Refused):
            raise OperationRefused(operation.why)
        learner = await self._ready()
        if isinstance(operation, op.Create):
            return Outcome(op.Json({"model_id": self.row.id, "type": "create_model"}))
        if isinstance(operation, op.Save):
            return await self._save(learner, seq, operation)
        if isinstance(operation, op.Export):
            return await self._export(learner, seq, operation)
        if (
            isinstance(operation, op.ForwardBackward)
            and self._since.unstepped >= self.parts.limits.tinker_batch_operations
        ):
            raise OperationRefused(f"{self._since.unstepped} calls wait for a step: call optim_step")
        began_s = asyncio.get_running_loop().time()
        answer = await self._compute(learner, operation)
        replays = not (isinstance(operation, op.ForwardBackward) and operation.forward_only)
        if replays:
            self._since.add(operation, self._stored[seq], asyncio.get_running_loop().time() - began_s)
        state = None
        if isinstance(operation, op.Load) or (isinstance(operation, op.OptimStep) and self._is_worth_saving()):
            state = await self._written("state", seq, learner.save)
        return Outcome(answer, replays=replays and state is None, state=state)

    def _is_worth_saving(self) -> bool:
        return self._since.is_much(self.parts.limits)

    async def _compute(self, learner: Learner, operation: op.Operation) -> op.Answer:
        """Let the learner compute what changes it, or a loss."""
        async with asyncio.timeout(self.parts.limits.tinker_operation_s):
            if isinstance(operation, op.ForwardBackward):
                datums = [one.datum() for one in operation.datums]
                logprobs, metrics = await learner.forward_backward(
                    datums, operation.loss, operation.parameters, forward_only=operation.forward_only
                )
                if not math.isfinite(metrics[_LOSS]) and not operation.forward_only:
                    what = "this call was taken back, with its gradient; the model is as it was"
                    raise _NotFiniteError(f"the loss is {metrics[_LOSS]}: {what}")
                return op.Losses.of(logprobs, metrics)
            if isinstance(operation, op.OptimStep):
                metrics = await learner.optim_step(operation.adam)
                return op.Json({"metrics": {name: value for name, value in metrics.items() if math.isfinite(value)}})
            assert isinstance(operation, op.Load), f"{operation} computes nothing"
            if not await self.parts.directories.exists(operation.directory):
                raise OperationRefused(f"path: {operation.path} is gone: it was replaced, or its time is over")
            await learner.load(self.parts.directories.path(operation.directory), optimizer=operation.optimizer)
            return op.Json({"path": operation.path, "model_id": self.row.id, "type": "load_weights"})

    # ------------------------------------------------------------ what is saved

    async def _written(self, what: What, seq: int, write: Callable[[Path], Awaitable[None]]) -> str:
        """The name of a new directory, which ``write`` has filled."""
        name = await self.parts.directories.fresh(self.row.number, what, seq)
        async with asyncio.timeout(self.parts.limits.tinker_operation_s):
            await write(self.parts.directories.path(name))
        await self.parts.directories.measure(name)
        return name

    async def _save(self, learner: Learner, seq: int, operation: op.Save) -> Outcome:
        path = WeightsPath(self.row.id, "weights", operation.name)
        if not operation.overwrite and await self.parts.log.weights(self.row.id, path.kind, path.name) is not None:
            raise OperationRefused(f"path: {path} exists: choose another name, or say overwrite")
        await self._require_room_for_weights()
        await self.parts.room.require(self.row.tenant)
        directory = await self._written("weights", seq, learner.save)
        row = WeightsRow(*self._named(path), directory, _expiry(operation.ttl_s))
        return Outcome(op.Json({"path": str(path), "type": "save_weights"}), weights=row)

    async def _export(self, learner: Learner, seq: int, operation: op.Export) -> Outcome:
        if operation.name is not None:
            await self._require_room_for_weights()
        await self.parts.room.require(self.row.tenant)
        directory = await self._written("sampler", seq, learner.export)
        answer: dict[str, Any] = {"type": "save_weights_for_sampler"}
        if operation.name is not None:
            path = WeightsPath(self.row.id, "sampler_weights", operation.name)
            row = WeightsRow(*self._named(path), directory, _expiry(operation.ttl_s))
            return Outcome(op.Json(answer | {"path": str(path)}), weights=row)
        assert operation.session is not None, "an export has a name or makes a sampling session"
        sampler = SamplerRow(
            operation.session, self.row.tenant, self.row.session, self.row.spec.base_model,
            model=self.row.id, directory=directory, in_flight=operation.in_flight,
        )  # fmt: skip
        return Outcome(op.Json(answer | {"sampling_session_id": operation.session}), sampler=sampler)

    def _named(self, path: WeightsPath) -> tuple[str, str, str]:
        return path.run, path.kind, path.name

    async def _require_room_for_weights(self) -> None:
        most = self.parts.limits.tinker_weights
        if await self.parts.log.count_weights(self.row.tenant) >= most:
            raise OperationRefused(f"{most} saved weights are kept for you: save with ttl_seconds, or ask for more")

    # ------------------------------------------------------------ the learner's lives

    async def _ready(self) -> Learner:
        """The learner, in the state after the operation before ``next``."""
        if self._learner is not None:
            return self._learner
        async with asyncio.timeout(self.parts.limits.tinker_operation_s):
            learner = self._learner = await self.parts.factory.make(self.row.spec, self.row.number)
            self._since = _SinceSaved()
            if self._state is not None:
                await learner.load(self.parts.directories.path(self._state), optimizer=True)
        replayed = await self.parts.log.to_replay(self.row.id)
        for seq in replayed:
            await self._replay(learner, seq)
        if self.next:
            self._event("model_woken", replayed=len(replayed))
        return learner

    async def _replay(self, learner: Learner, seq: int) -> None:
        """Execute again an operation that is answered."""
        operation, kept = (
            await self.parts.log.operation(self.row.id, seq),
            await self.parts.log.answer(self.row.id, seq),
        )
        began_s = asyncio.get_running_loop().time()
        try:
            answer = await self._compute(learner, operation)
        except OperationRefused as refused:
            if not isinstance(operation, op.OptimStep):
                raise LearnerLost(f"operation {seq} was executed before, and now it is refused: {refused}") from refused
            answer = op.Failed(str(refused), of_user=True)
        except _NotFiniteError as spoilt:
            raise LearnerLost(f"operation {seq} was finite before: {spoilt}") from spoilt
        if answer != kept:
            self._logger.warning("an operation that was executed again gave other numbers", operation=seq)
        self._since.add(operation, len(op.encode(operation)), asyncio.get_running_loop().time() - began_s)

    async def _rest(self) -> None:
        """Give the memory of an idle model back."""
        learner = self._learner
        if learner is None:
            return
        if self._since.operations and not self._since.unstepped:
            before, seq = self._state, self.next - 1
            try:
                self._state = await self._written("state", seq, learner.save)
            except (LearnerLost, TimeoutError, OSError) as error:
                self._logger.warning("an idle model could not be saved; it is executed again later", error=str(error))
            else:
                await self.parts.log.saved(self.row.id, seq, self._state)
                if before is not None:
                    await self.parts.directories.remove(before)
        await self._drop()
        self._event("model_parked")

    def _event(self, name: str, **fields: float | str) -> None:
        self.parts.events.event(name, tenant=self.row.tenant, model=self.row.id, **fields)

    async def _drop(self) -> None:
        learner, self._learner = self._learner, None
        if learner is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.parts.limits.stop_timeout_s):
                    await learner.close()


def _expiry(ttl_s: int | None) -> float | None:
    return None if ttl_s is None else time_of_day_s() + ttl_s
