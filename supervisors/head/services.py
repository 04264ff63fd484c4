"""The training services of a head: each a process of its own, kept alive beside the jobs.

    services file, ctl service add ─▶ Services ─▶ a supervisor service.<NAME> each: metrics.service.<NAME>  actor
                                                                                    <NAME>                  process
    a trainer's start ─ address ─▶ the service as it runs now            a next life of the head adopts the processes

Invariants
- A supervisor each: a service that is given up takes no other one with it. The jobs that have a place there learn it
  when they need it, and end with that reason.
- Which services there are is in the register before anything is done about it.
- A process of a service is called ``service.<NAME>`` at the node agent of the head's machine, and runs there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import structlog

from actors.core.errors import NotSent
from actors.core.message import Message
from actors.roles import ServiceArgs, service_process
from actors.train_service.residency import remove_parked
from configs.limits import Limits
from configs.names import SHARED
from configs.services import ServiceConfig
from supervisors.jobs.adoption import adopt
from supervisors.jobs.device_needs import devices_wanted_by_service
from supervisors.machine.machine import Machine
from supervisors.machine.nodes import Nodes
from supervisors.tree.child_record import ChildInfo, SupervisionEvent
from supervisors.tree.children import ChildSpec, Running, actor_child, start_process
from supervisors.tree.errors import ServiceGone, ServiceNotReady
from supervisors.tree.strategies import Strategy
from supervisors.tree.supervisor import Supervisor
from transport.address import ActorAddress

if TYPE_CHECKING:
    from actors.core.context import Context
    from actors.core.system import ActorSystem

log = structlog.get_logger("headrace.services")

DIRECTORY: Final = "services"
"""Directory of those of the services, beside the run directories."""
R = TypeVar("R", bound=Message)
OnNews = Callable[[str, str], None]
"""Callback that is told of a service, by name, what people should know."""
OnReady = Callable[[str], None]
"""Callback that is told the name of a service whose process is there: a new one, or one that was adopted."""


class Service:
    """One service: its configuration, who keeps it, and whether it was given up."""

    def __init__(self, config: ServiceConfig, directory: Path) -> None:
        self.config, self.directory = config, directory
        self.supervisor: Supervisor
        self.draining = False
        self.failure = ""
        """Reason for which it was given up; empty: it was not."""
        self.changed = asyncio.Event()
        """Set whenever its process starts or ends."""

    @property
    def running(self) -> Running | None:
        return self.supervisor.running(self.config.name)

    @property
    def state(self) -> str:
        if self.failure:
            return "failed"
        if self.running is None:
            return "starting"
        return "draining" if self.draining else "ready"


class Services:
    """The processes of the services. ``open`` first; ``begin`` and ``end`` one at a time, ``stop`` them all."""

    def __init__(
        self,
        nodes: Nodes,
        machine: Machine,
        directory: Path,
        *,
        limits: Limits,
        on_news: OnNews,
        on_ready: OnReady = lambda _: None,
    ) -> None:
        """``directory``: the one in which theirs are made."""
        self._nodes, self.machine = nodes, machine
        self._directory = directory / DIRECTORY
        self._limits, self._on_news, self._on_ready = limits, on_news, on_ready
        self._all: dict[str, Service] = {}
        self._adopting = False
        self._system: ActorSystem

    def open(self, system: ActorSystem, *, adopting: bool) -> None:
        """``adopting``: their processes may run already, begun by a former life of the head."""
        self._system, self._adopting = system, adopting

    @property
    def all(self) -> list[Service]:
        return list(self._all.values())

    def get(self, name: str) -> Service | None:
        return self._all.get(name)

    def children(self) -> list[tuple[str, list[ChildInfo]]]:
        """Each supervisor's name and what it has, for ``ctl tree``."""
        return [(service_process(name), service.supervisor.snapshot()) for name, service in self._all.items()]

    async def begin(self, config: ServiceConfig, *, draining: bool = False) -> None:
        """Start a service, or adopt it; returns before it is ready."""
        process = service_process(config.name)
        service = Service(config, self._directory / config.name)
        service.draining = draining
        service.directory.mkdir(parents=True, exist_ok=True)
        children = [
            actor_child(
                f"metrics.{process}",
                lambda: self.machine.service_metrics(process, service.directory),
                node="head",
                role="metrics",
            ),
            self._process(service),
        ]
        service.supervisor = Supervisor(
            process, Strategy.ONE_FOR_ONE, children, on_event=lambda event: self._hear(service, event),
            limits=self._limits,
        )  # fmt: skip
        self._all[config.name] = service
        await self._system.spawn(process, service.supervisor)

    def _process(self, service: Service) -> ChildSpec:
        name, limits = service.config.name, self._limits
        process = service_process(name)
        args = ServiceArgs(
            role="train_service",
            name=name,
            node="",
            run_dir=str(service.directory),
            metrics=self._system.address(f"metrics.{process}"),
            service=service.config.model_dump_json(),
        )
        looked_for = not self._adopting

        async def start(context: Context) -> Running:
            nonlocal looked_for
            if not looked_for:
                looked_for = True
                if (running := await adopt(context, self._nodes, process, name)) is not None:
                    return running
            wanted = devices_wanted_by_service(service.config)
            node = await self._nodes.choose(process, "local", limits.ready_timeout_s, devices=wanted)
            return await start_process(
                context, node.agent, args, job=SHARED, ready_s=limits.ready_timeout_s,
                devices=self._nodes.devices_of(process),
            )  # fmt: skip

        return ChildSpec(name, start, role=args.role, shutdown_s=limits.stop_timeout_s, ready_s=limits.ready_timeout_s)

    def _hear(self, service: Service, event: SupervisionEvent) -> None:
        if event.child != service.config.name:
            return
        name = service.config.name
        if event.kind == "gave_up":
            service.failure = event.detail
            self._on_news(name, f"the service {name} was given up: {event.detail}")
        elif event.kind in ("restarting", "start_failed"):
            why = f": {event.reason}" if event.reason else ""
            self._on_news(name, f"the service {name} ended ({event.cause}{why}); starting it again")
        service.changed.set()
        if event.kind in ("started", "adopted"):
            self._on_ready(name)

    async def address(self, name: str) -> ActorAddress:
        """Address of the service in its present life; waits until it is ready.

        Raises:
            ServiceGone: it was given up or removed.
            ServiceNotReady: it is not ready within ``limits.ready_timeout_s``.
        """
        try:
            async with asyncio.timeout(self._limits.ready_timeout_s):
                while True:
                    service = self._all.get(name)
                    if service is None:
                        raise ServiceGone(f"the service {name} was removed; add it again, then resume the job")
                    if service.failure:
                        raise ServiceGone(f"{service.failure}; mend that, then resume the job")
                    if (running := service.running) is not None:
                        return running.address
                    service.changed.clear()
                    await service.changed.wait()
        except TimeoutError as error:
            raise ServiceNotReady(
                f"the service {name} is not ready within {self._limits.ready_timeout_s:g} s; it is waited for"
            ) from error

    async def ask(self, name: str, question: Message, reply: type[R]) -> R:
        """Ask a service that is ready.

        Raises:
            AskError: it is not there just now, or does not answer.
        """
        service = self._all.get(name)
        running = service.running if service is not None else None
        if running is None:
            raise NotSent(f"the service {name} is not ready")
        return await self._system.ref(running.address).ask(question, reply)

    async def end(self, name: str) -> Service:
        """Stop a service for good; it is started no more."""
        service = self._all.pop(name)
        service.changed.set()
        process = service_process(name)
        if process in self._system.actors():
            await self._system.stop_actor(process)
        self._nodes.release(process)
        return service

    async def stop(self) -> None:
        """Stop them all. Idempotent."""
        for name in list(self._all):
            await self.end(name)


def remove_stored(directory: Path) -> None:
    """Remove what services whose directories are in ``directory`` have stored of jobs; their logs stay."""
    for service in sorted((directory / DIRECTORY).glob("*")):
        remove_stored_of(service)


def remove_stored_of(directory: Path) -> None:
    """Remove what the service of that directory has stored. Blocks."""
    remove_parked(directory)
