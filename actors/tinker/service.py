"""What the Tinker server does, without HTTP: sessions, models, sampling sessions, and their operations.

    routes.py ─▶ TinkerService ─┬─▶ sessions.py     who is alive
                                ├─▶ model_line.py   a line of operations for each model ─▶ learner
                                ├─▶ sample_desk.py  samples ─▶ samplers
                                ├─▶ futures.py      who waits for which answer
                                ├─▶ tenants.py      what each may use ─▶ accounts.py: what each has used
                                └─▶ operation_log.py, directories.py    all that outlives the process

Invariants
- Killed at any point and opened again, it goes on with what was stored, and answers as if nothing had happened.
- A tenant reaches what is its own. What is another's is answered as what does not exist.
- Nothing that a client asks ends the process; a log that cannot be written does: ``failed`` says so.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import structlog

from actors.host.clock import time_of_day_s
from actors.tinker import operations as op
from actors.tinker.accounts import Events, Record, uses
from actors.tinker.directories import Directories
from actors.tinker.errors import LogFailed, LogUnreadable, OperationRefused, Problem
from actors.tinker.futures import Futures, read_request_id, request_id
from actors.tinker.learner import LearnerFactory, ModelSpec
from actors.tinker.model_line import LineParts, ModelLine
from actors.tinker.operation_log import ModelRow, OperationLog, SamplerRow, Spent, WeightsRow
from actors.tinker.paths import Kind, read_path
from actors.tinker.sample_desk import SampleDesk
from actors.tinker.sampling import Sampler
from actors.tinker.sessions import Sessions
from actors.tinker.tenants import Room, Tenants
from configs.limits import DEFAULT_LIMITS, Limits
from configs.tenants import TenantsConfig

_LOG_FILE: Final = "operations.db"


@dataclass(frozen=True)
class ServedModel:
    """Describes a base model that clients may name."""

    name: str
    tokenizer: str
    """Name or directory that ``AutoTokenizer.from_pretrained`` takes, for clients on this machine or with the hub."""
    vocabulary: int
    """Number of token ids."""
    context_tokens: int
    sampler: Sampler


@dataclass(frozen=True)
class Pending:
    """Says that an answer is not there yet, and what it waits for, if that is known."""

    why: str = ""
    paused: bool = False
    """Whether the tenant's quota is what it waits for."""


class TinkerService:
    """Serves several tenants from one directory."""

    def __init__(
        self,
        directory: Path,
        served: Sequence[ServedModel],
        factory: LearnerFactory,
        limits: Limits = DEFAULT_LIMITS,
        *,
        tenants: TenantsConfig | None = None,
        record: Record = lambda *_: None,
        server_id: str | None = None,
    ) -> None:
        """Open the operation log in ``directory``. Blocks. ``record`` takes events; ``server_id`` begins session ids.

        Raises:
            LogUnreadable: the log is damaged, or of another version.
        """
        self.limits = limits
        self.served = {one.name: one for one in served}
        self._factory = factory
        self._log = OperationLog(directory / _LOG_FILE, limits, server_id=server_id)
        self._directories = Directories(directory, limits.blocking_call_s)
        self.tenants = Tenants(tenants or TenantsConfig(), limits)
        self.events = Events(record)
        self._futures = Futures(self._log, limits)
        self.sessions = Sessions(self._log, limits)
        self._lines: dict[str, ModelLine] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._look_task: asyncio.Task[None] | None = None
        self._opened_at_s = time_of_day_s()
        self.failed = asyncio.Event()
        """Set when the log cannot be written: close the service, and open another one."""
        self._desk = SampleDesk(
            self._log, {one.name: one.sampler for one in served}, self._directories, limits, self.events,
            self._futures.answered, self._fail,
        )  # fmt: skip
        self._parts = LineParts(
            self._log, factory, self._directories, limits, self.tenants,
            Room(self.tenants, self._log, self._directories, self._desk.unneeded, self._end_sampler), self.events,
            self._futures.answered, self._desk.add,
        )  # fmt: skip
        self._logger = structlog.get_logger("headrace.tinker")

    async def open(self) -> None:
        """Go on with all that the server's former lives have left."""
        self._directories.sweep(await self._log.directories())
        await self.sessions.open()
        for row in await self._log.models():
            self._lines[row.id] = ModelLine(row, self._parts)
        for row in await self._log.samplers():
            if row.base_model in self.served:
                self._desk.add(row)
        for line, seq, size in await self._log.waiting():
            if line in self._lines:
                self._lines[line].resume(seq, size)
            elif self._desk.knows(line):
                self._desk.resume(line, seq)
        for line in self._lines.values():
            self._start(line)
        self._look_task = asyncio.create_task(self._look_after(), name="tinker look")
        self.events.event("server_started", models=len(self._lines))

    async def close(self) -> None:
        """Stop; what was asked and not answered is executed by the next life."""
        tasks = [*self._tasks.values(), *([self._look_task] if self._look_task is not None else [])]
        for task in tasks:
            task.cancel()
        await self._until_ended(tasks)
        await asyncio.gather(*(line.close() for line in self._lines.values()))
        await self._desk.close()
        self._log.close()

    # ------------------------------------------------------------ sessions

    async def begin_session(self, tenant: str, metadata: dict[str, Any]) -> str:
        return await self.sessions.begin(tenant, metadata)

    async def end_session(self, tenant: str, session: str) -> None:
        """End a session; one that has ended already stays so, as this may be a repeat. Raises Problem."""
        try:
            await self.sessions.require(tenant, session)
        except Problem as problem:
            if problem.status != 410:
                raise
        else:
            await self._end(session, "finished")

    async def _end(self, session: str, why: str) -> None:
        self.sessions.forget(session)
        lines = [line for line in self._lines.values() if line.row.session == session]
        tasks = [self._tasks.pop(line.row.id) for line in lines]
        for line, task in zip(lines, tasks, strict=True):
            del self._lines[line.row.id]
            task.cancel()
        await self._until_ended(tasks)
        await asyncio.gather(*(line.close() for line in lines))
        ended = self._desk.of_session(session)
        for sampler in ended:
            self._desk.end(sampler)
        await self._log.end_session(session)
        for line in lines:
            self.events.event("model_ended", tenant=line.row.tenant, model=line.row.id, why=why)
        for name in [*(line.row.id for line in lines), *ended]:
            self._futures.ended(name)

    # ------------------------------------------------------------ models

    async def create_model(
        self, tenant: str, session: str, number: int, spec: ModelSpec | None, base_model: str, metadata: dict[str, Any],
        *, load: tuple[str, bool] | None = None,
    ) -> tuple[str, str]:  # fmt: skip
        """Make a model, new or from saved weights; returns its id and that of the request.

        ``spec``: None with ``load``, the path of the weights and whether their optimizer is taken over.

        Raises:
            Problem: the session has ended, the model cannot be made, or the tenant has too many.
        """
        await self.sessions.require(tenant, session)
        model = f"{session}:train:{number}"
        operation: op.Operation = op.Create()
        if load is not None:
            path, optimizer = load
            try:
                weights, source = await self.find_weights(tenant, path, "weights")
            except OperationRefused as refused:
                raise Problem(404, str(refused)) from refused
            spec = source.spec
            if base_model and base_model != spec.base_model:
                raise Problem(400, f"base_model: {path} was trained on {spec.base_model}, not on {base_model[:200]}")
            operation = op.Load(path, weights.directory, optimizer, creates=True)
        assert spec is not None, "a new model has a spec"
        if model not in self._lines:
            await self._add_line(tenant, session, model, spec, metadata)
        line = await self.line(tenant, model)
        await line.submit(0, op.encode(operation))
        return model, request_id(model, 0)

    async def _add_line(self, tenant: str, session: str, model: str, spec: ModelSpec, metadata: dict[str, Any]) -> None:
        mine = sum(line.row.tenant == tenant for line in self._lines.values())
        if mine >= self.tenants.of(tenant).models:
            raise Problem(403, f"{mine} models of yours are alive: end a session that has some, and save what you need")
        if spec.base_model not in self.served:
            known = ", ".join(sorted(self.served))
            raise Problem(400, f"base_model: {spec.base_model[:200]!r} is not served here: choose one of {known}")
        try:
            self._factory.check(spec)
        except OperationRefused as refused:
            raise Problem(400, str(refused)) from refused
        row = await self._log.add_model(model, tenant, session, spec, metadata)
        await self.sessions.require(tenant, session)  # it may have ended meanwhile
        if model not in self._lines:
            line = self._lines[model] = ModelLine(row, self._parts)
            self._start(line)
            self.events.event("model_made", tenant=tenant, model=model, base_model=spec.base_model, rank=spec.rank)

    async def line(self, tenant: str, model: str) -> ModelLine:
        """Raises Problem: the tenant has no such model, or it has ended."""
        line = self._lines.get(model)
        if line is not None and line.row.tenant == tenant:
            return line
        row = None if line is not None else await self._log.model(model)
        if row is None or row.tenant != tenant:
            raise Problem(404, f"model_id: there is no model {model[:200]!r} of yours: create one")
        raise Problem(410, f"model_id: {model} has ended with its session: create it again from saved weights")

    async def submit(self, line: ModelLine, seq: int, body: bytes) -> str:
        """Store an encoded operation of a model; returns the id of the request."""
        if line.broken:
            raise Problem(422, line.broken)
        await line.submit(seq, body)
        return request_id(line.row.id, seq)

    async def model_row(self, tenant: str, model: str) -> ModelRow:
        """A model's row, also after its end. Raises Problem: the tenant has no such model."""
        row = await self._log.model(model)
        if row is None or row.tenant != tenant:
            raise Problem(404, f"there is no model {model[:200]!r} of yours")
        return row

    async def find_weights(self, tenant: str, path: str, kind: Kind) -> tuple[WeightsRow, ModelRow]:
        """The saved weights at a path, and the model that was saved.

        Raises:
            OperationRefused: the tenant has no such weights, or they are of the other kind.
        """
        wanted = read_path(path)
        if wanted.kind != kind:
            how = {"weights": "save_state", "sampler_weights": "save_weights_for_sampler"}[kind]
            raise OperationRefused(f"path: {path} has {wanted.kind}, expected {kind}: save with {how}")
        row = await self._log.model(wanted.run)
        weights = await self._log.weights(wanted.run, wanted.kind, wanted.name)
        late = weights is not None and weights.expires_at is not None and weights.expires_at <= time_of_day_s()
        if row is None or row.tenant != tenant or weights is None or late:
            raise OperationRefused(f"path: there are no weights of yours at {path}: save them, or look at the name")
        return weights, row

    async def delete_weights(self, tenant: str, path: str) -> None:
        """Forget saved weights; their files go soon. Raises OperationRefused: the tenant has none at this path."""
        wanted = read_path(path)
        await self.find_weights(tenant, path, wanted.kind)
        await self._log.delete_weights(wanted.run, wanted.kind, wanted.name)

    # ------------------------------------------------------------ sampling

    async def create_sampler(
        self, tenant: str, session: str, number: int, *, path: str | None, base_model: str | None
    ) -> str:
        """Make a sampling session from saved weights, or from a base model; returns its id. Raises Problem."""
        await self.sessions.require(tenant, session)
        if self._desk.count(tenant) >= self.limits.tinker_samplers:
            raise Problem(403, f"{self.limits.tinker_samplers} sampling sessions of yours are alive: end a session")
        name = f"{session}:sample:{number}"
        if self._desk.knows(name):
            return name
        directory = None
        if path is not None:
            try:
                weights, source = await self.find_weights(tenant, path, "sampler_weights")
            except OperationRefused as refused:
                raise Problem(404, str(refused)) from refused
            directory, base_model = weights.directory, source.spec.base_model
        if base_model is None or base_model not in self.served:
            known = ", ".join(sorted(self.served))
            raise Problem(400, f"base_model: {base_model!r} is not served here: choose one of {known}, or a model_path")
        row = SamplerRow(name, tenant, session, base_model, path, None, directory)
        await self._log.add_sampler(row)
        await self.sessions.require(tenant, session)  # it may have ended meanwhile
        self._desk.add(row)
        return name

    def sampler(self, tenant: str, sampler: str) -> SamplerRow:
        return self._desk.row(tenant, sampler)

    async def sample(self, row: SamplerRow, seq: int, body: bytes) -> str:
        """Store an encoded request for samples; returns its id."""
        await self._desk.submit(row, seq, body)
        return request_id(row.id, seq)

    async def cancel(self, tenant: str, request: str) -> None:
        """End a sample that is not answered yet. Raises Problem: the tenant has no such sampling session."""
        sampler, seq = read_request_id(request)
        await self._desk.cancel(self._desk.row(tenant, sampler), seq)

    # ------------------------------------------------------------ answers

    async def retrieve(self, tenant: str, request: str) -> op.Answer | Pending:
        """The answer to a request, once there is one, or Pending after a while.

        Raises:
            Problem: the tenant has no such request, or its answer is not kept any more.
        """
        name, seq = read_request_id(request)
        if self._desk.owner(name) == tenant:
            answer = await self._futures.poll(name, seq, lambda: self._desk.waits(name, seq))
            if answer is not None:
                return answer
            if self._desk.knows(name) and self._desk.waits(name, seq):
                return Pending()
            raise Problem(410, f"request_id: the answer to {request} is not kept any more: ask anew")
        line = await self.line(tenant, name)
        if not line.broken:
            answer = await self._futures.poll(name, seq, lambda: not line.broken and line.holds(seq))
            if answer is not None:
                return answer
        if line.broken:
            return op.Failed(line.broken, of_user=False)
        await self.line(tenant, name)
        if seq < line.next:
            raise Problem(410, f"request_id: the answer to {request} is not kept any more")
        if not line.holds(seq):
            raise Problem(404, f"request_id: {request} was never asked")
        held = self.tenants.why_held(tenant, name)
        return Pending(held, paused=True) if held else Pending(line.gap())

    def asked_at_s(self, model: str) -> float:
        """Time of day at which a model was last asked something, as far as this life knows."""
        line = self._lines.get(model)
        return self._opened_at_s if line is None else line.asked_at_s

    def gaps(self) -> dict[str, str]:
        """Models whose operations wait for one that has not come, each with a sentence."""
        return {name: gap for name, line in self._lines.items() if (gap := line.gap())}

    def rows(self) -> list[dict[str, Any]]:
        """A row for people for each model that is alive."""
        return [
            {
                "tenant": line.row.tenant, "model": line.row.id, "base_model": line.row.spec.base_model,
                "rank": line.row.spec.rank, "operations": line.next, "waiting": line.waiting, "awake": line.is_awake,
                "why": line.broken or self.tenants.why_held(line.row.tenant, line.row.id) or line.gap(),
            }
            for line in self._lines.values()
        ]  # fmt: skip

    async def uses(self) -> dict[str, dict[str, float]]:
        """What each tenant has used, and uses now, by names that ``accounts.py`` has."""
        lines, named = self._lines.values(), await self._log.directories()
        now = [
            *((session.tenant, "sessions", 1) for session in self.sessions.alive()),
            *((line.row.tenant, "models", 1) for line in lines),
            *((line.row.tenant, "models_awake", int(line.is_awake)) for line in lines),
            *((line.row.tenant, "waiting_operations", line.waiting) for line in lines),
            *((row.tenant, "samplers", 1) for row in self._desk.rows()),
            *((tenant, "waiting_samples", count) for tenant, count in self._desk.waiting.items()),
            *((tenant, "disk_bytes", self._directories.size([name])) for name, tenant in named.items()),
        ]
        return uses(await self._log.spent(alive=False), now)

    async def spent(self) -> list[Spent]:
        """What live models have used, and samples of base models."""
        return await self._log.spent(alive=True)

    # ------------------------------------------------------------ what goes on by itself

    def _start(self, line: ModelLine) -> None:
        if line.row.id in self._tasks:
            return  # it was made while the service opened
        self._tasks[line.row.id] = asyncio.create_task(self._live(line), name=f"tinker {line.row.id}")

    async def _live(self, line: ModelLine) -> None:
        try:
            await line.run()
        except LogFailed as failure:
            self._fail(failure)
        except LogUnreadable as damaged:
            line.broken = f"this model cannot go on: {damaged}"
        except Exception as error:
            self._logger.exception("a model's line ended", model=line.row.id)
            line.broken = f"this model cannot go on, for a failure of the server: {type(error).__name__}: {error}"
        self._futures.ended(line.row.id)

    def _fail(self, failure: LogFailed) -> None:
        self._logger.error("the operation log cannot be written", error=str(failure))
        self.failed.set()

    async def _until_ended(self, tasks: list[asyncio.Task[None]]) -> None:
        """Wait for cancelled tasks; one that hangs is left behind."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.limits.stop_timeout_s):
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _look_after(self) -> None:
        while True:
            await asyncio.sleep(self.limits.tinker_look_s)
            try:
                await self._look()
            except LogFailed as failure:
                self._fail(failure)
                return

    async def _look(self) -> None:
        for session in self.sessions.silent():
            await self._end(session, "silent")
        for model in list(self._lines):
            for sampler in self._desk.superfluous(model):
                await self._end_sampler(sampler)
        await self._log.expire_weights(time_of_day_s())
        await self._directories.remove_unnamed(await self._log.directories())

    async def _end_sampler(self, sampler: str) -> None:
        self._desk.end(sampler)
        await self._log.end_sampler(sampler)
        self._futures.ended(sampler)
