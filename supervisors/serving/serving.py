"""Runs the processes that serve models to programs of other people: the model server, and samplers for each model.

    serving file ─▶ Serving ─▶ a supervisor, serving: metrics.serving          actor
                                                      places.serving           actor, tells them where the others are
                                                      sampler-0-0 …, models    processes on the head's machine
    training services ◀─ the model server asks them for a place for each model of a client

Invariants
- Each process is started again alone; the others find it by asking ``places.serving``.
- A head that was started again adopts the processes, and is told nothing else: clients see a pause at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from actors.core.actor import Actor, concurrent, handles
from actors.core.senders import MODELS
from actors.protocol.serving import FindProcess, Listens, ProcessFound, QueryServing, ServingState
from actors.roles import ServingArgs
from configs.limits import Limits
from configs.names import SERVING, sampler_name
from configs.services import ServiceConfig
from configs.serving import ServingConfig
from supervisors.jobs.group_adoption import GroupAdoption
from supervisors.machine.machine import Machine
from supervisors.machine.membership.nodes import Nodes
from supervisors.sharing.services import Services
from supervisors.tree.child_record import ChildInfo, SupervisionEvent
from supervisors.tree.children import ChildSpec, Running, actor_child, start_process
from supervisors.tree.errors import ServiceGone, ServiceNotReady
from supervisors.tree.strategies import Strategy
from supervisors.tree.supervisor import Supervisor
from transport.address import ActorAddress

if TYPE_CHECKING:
    from actors.core.context import Context
    from actors.core.system import ActorSystem

_PLACES = f"places.{SERVING}"
Say = Callable[[str], None]


class ServingPlaces(Actor):
    """Tells the model server where the processes are that it asks. ``find``: waits until one is ready."""

    def __init__(self, find: Callable[[str], Awaitable[ActorAddress]], say: Say) -> None:
        self._find, self._say = find, say
        self._url = ""

    @handles(FindProcess)
    @concurrent
    async def find(self, message: FindProcess) -> ProcessFound:
        return ProcessFound(address=await self._find(message.name))

    @handles(Listens)
    async def listens(self, message: Listens) -> None:
        if message.url != self._url:
            self._url = message.url
            self._say(f"address       TINKER_BASE_URL={message.url}")


class Serving:
    """Holds the processes of one serving file. ``begin`` it, and ``stop`` it."""

    def __init__(
        self, nodes: Nodes, machine: Machine, services: Services, config: ServingConfig, service: ServiceConfig, *,
        limits: Limits, say: Say,
    ) -> None:  # fmt: skip
        """``service``: of who trains, one of ``services``; ``say``: called with a line for people."""
        self._nodes, self._machine, self._services = nodes, machine, services
        self._config, self._service, self._limits, self._say = config, service, limits, say
        self._changed = asyncio.Event()
        self._failure = ""
        self._supervisor: Supervisor
        self._system: ActorSystem

    async def begin(self, system: ActorSystem, *, adopting: bool) -> None:
        """Start the processes, or adopt those of a former life of the head; return before they are ready."""
        self._system = system
        directory = Path(self._config.directory).expanduser().resolve()
        directory.mkdir(parents=True, exist_ok=True)
        server = ServingArgs(
            role=MODELS,
            name=MODELS,
            node="",
            run_dir=str(directory),
            metrics=system.address(f"metrics.{SERVING}"),
            serving=self._config.model_dump_json(),
            service=self._service.model_dump_json(),
            head=system.address(_PLACES),
        )
        samplers = [
            msgspec.structs.replace(server, role="sampler", name=sampler_name(index, number), model=model.name)
            for index, model in enumerate(self._config.models)
            for number in range(self._config.samplers)
        ]
        adoption = GroupAdoption(self._nodes, _process, self._limits.stop_timeout_s) if adopting else None
        children = [
            actor_child(
                f"metrics.{SERVING}", lambda: self._machine.service_metrics(SERVING, directory),
                node="head", role="metrics",
            ),
            actor_child(_PLACES, lambda: ServingPlaces(self._address, self._say), node="head", role="places"),
            *(self._child(args, adoption) for args in (*samplers, server)),
        ]  # fmt: skip
        self._supervisor = Supervisor(
            SERVING, Strategy.ONE_FOR_ONE, children, on_event=self._hear, limits=self._limits
        )  # fmt: skip
        await system.spawn(SERVING, self._supervisor)

    def _child(self, args: ServingArgs, adoption: GroupAdoption | None) -> ChildSpec:
        limits, process = self._limits, _process(args.name)
        devices = int(args.role == "sampler" and self._config.device != "cpu")

        async def start(context: Context) -> Running:
            if adoption is not None:
                running = await adoption.find(context, args.name, args.name, [[args.name]])
                if running is not None:
                    return running
            node = await self._nodes.choose(process, "local", limits.ready_timeout_s, devices=devices, group=[])
            return await start_process(
                context, node.agent, args, job=SERVING, ready_s=limits.ready_timeout_s,
                devices=self._nodes.devices_of(process),
            )  # fmt: skip

        return ChildSpec(
            args.name, start, role=args.role, shutdown_s=limits.stop_timeout_s, ready_s=limits.ready_timeout_s
        )

    def service_news(self, service: str, news: str) -> None:
        """Pass on what has become of a training service, if it trains these models."""
        if service == self._service.name:
            self._say(news)

    def _hear(self, event: SupervisionEvent) -> None:
        if event.kind == "gave_up":
            self._failure = event.detail
            self._say(f"models are not served any more: {event.detail}")
        elif event.kind in ("restarting", "start_failed"):
            why = f": {event.reason}" if event.reason else ""
            self._say(f"{event.child} ended ({event.cause}{why}); starting it again")
        self._changed.set()

    async def _address(self, name: str) -> ActorAddress:
        """The present address of a training service or a sampler; waits until it is ready.

        Raises:
            ServiceGone: there is none of that name any more.
            ServiceNotReady: it is not ready within ``limits.ready_timeout_s``.
        """
        if name == self._service.name:
            return await self._services.address(name)
        try:
            async with asyncio.timeout(self._limits.ready_timeout_s):
                while (running := self._supervisor.running(name)) is None:
                    if self._failure:
                        raise ServiceGone(self._failure)
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError as error:
            raise ServiceNotReady(f"{name} is not ready within {self._limits.ready_timeout_s:g} s") from error
        return running.address

    def children(self) -> list[ChildInfo]:
        """Its processes and actors, for ``ctl tree``."""
        return self._supervisor.snapshot()

    async def state(self) -> ServingState:
        """Raises AskError: the model server is not ready, or does not answer."""
        running = self._supervisor.running(MODELS)
        address = running.address if running is not None else self._system.address(MODELS)
        return await self._system.ref(address).ask(QueryServing(), ServingState)

    async def stop(self) -> None:
        """Stop all of it. Idempotent."""
        if SERVING in self._system.actors():
            await self._system.stop_actor(SERVING)


def _process(actor: str) -> str:
    """Name of an actor's process at its node agent."""
    return f"{SERVING}.{actor}"
