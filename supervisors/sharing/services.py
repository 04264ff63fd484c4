"""Runs the training services of a head: each a process of its own, or a rank group, kept alive beside the jobs.

    services file, ctl service add ─▶ Services ─▶ a supervisor service.<NAME> each: metrics.service.<NAME>  actor
                                                                                    <NAME>.rank1 …          process
                                                                                    <NAME>                  process
    a trainer's start ─ address ─▶ the service as it runs now            the head's next life adopts the processes

Invariants
- Each service has its own supervisor, so that one that is given up takes no other with it. Jobs that have a place there
  fail with that reason at their next use of the service.
- A change of the set of services is in the register before it is carried out.
- A process of a service is called ``service.<NAME>`` at the node agent of the head's machine, and runs there, as its
  ranks do. They start and end together; the first of them is told the others, once they are ready.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
import structlog

from actors.core.errors import NotSent
from actors.core.message import Message
from actors.ranks.followers import SHARED as SHARED_FOLLOWER
from actors.roles import ServiceArgs, service_process
from actors.train_service.residency import remove_parked
from configs.limits import Limits
from configs.names import SHARED, rank_name, rank_of
from configs.services import ServiceConfig
from supervisors.jobs.device_needs import devices_wanted_by_service
from supervisors.jobs.group_adoption import GroupAdoption
from supervisors.machine.machine import Machine
from supervisors.machine.membership.nodes import Nodes
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
"""Name of the directory that holds the services' directories, beside the run directories."""
R = TypeVar("R", bound=Message)
OnNews = Callable[[str, str], None]
"""Callback that is told a service's name and a message for people about it."""
OnReady = Callable[[str], None]
"""Callback that is told the name of a service whose process was started or adopted."""


class Service:
    """Holds one service: its configuration, its supervisor, and whether it was given up."""

    def __init__(self, config: ServiceConfig, directory: Path) -> None:
        self.config, self.directory = config, directory
        self.supervisor: Supervisor
        self.draining = False
        self.failure = ""
        """Reason for which the service was given up; empty: it was not."""
        self.changed = asyncio.Event()
        """Event that is set whenever the service's process starts or ends."""

    @property
    def ranks(self) -> list[str]:
        """Names of its main actors, its own first."""
        return [rank_name(self.config.name, rank) for rank in range(self.config.ranks)]

    @property
    def processes(self) -> list[str]:
        """Their processes' names at the node agent."""
        return [service_process(name) for name in self.ranks]

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
    """Runs the services' processes. ``open`` it; ``begin`` and ``end`` single services, or ``stop`` them all."""

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
        """``directory``: the parent of the services' ``DIRECTORY``."""
        self._nodes, self.machine = nodes, machine
        self._directory = directory / DIRECTORY
        self._limits, self._on_news, self._on_ready = limits, on_news, on_ready
        self._all: dict[str, Service] = {}
        self._adopting = False
        self._system: ActorSystem

    def open(self, system: ActorSystem, *, adopting: bool) -> None:
        """Prepare to begin services. ``adopting``: a former life of the head may have started their processes."""
        self._system, self._adopting = system, adopting

    @property
    def all(self) -> list[Service]:
        return list(self._all.values())

    def get(self, name: str) -> Service | None:
        return self._all.get(name)

    def children(self) -> list[tuple[str, list[ChildInfo]]]:
        """Each supervisor's name and children, for ``ctl tree``."""
        return [(service_process(name), service.supervisor.snapshot()) for name, service in self._all.items()]

    async def begin(self, config: ServiceConfig, *, draining: bool = False) -> None:
        """Start a service, or adopt it; return before it is ready."""
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
            *self._processes(service),
        ]
        service.supervisor = Supervisor(
            process, Strategy.ONE_FOR_ONE, children, on_event=lambda event: self._hear(service, event),
            limits=self._limits,
        )  # fmt: skip
        self._all[config.name] = service
        await self._system.spawn(process, service.supervisor)

    def _processes(self, service: Service) -> list[ChildSpec]:
        """The service's process, after the ranks that follow it."""
        config = service.config
        leader = ServiceArgs(
            role="train_service",
            name=config.name,
            node="",
            run_dir=str(service.directory),
            metrics=self._system.address(f"metrics.{service_process(config.name)}"),
            service=config.model_dump_json(),
            size=config.ranks,
        )
        followers = [
            msgspec.structs.replace(
                leader, role="rank", name=name, rank=rank, leader=config.name, kind=SHARED_FOLLOWER + config.backend
            )
            for rank, name in enumerate(service.ranks[1:], 1)
        ]
        adoption = GroupAdoption(self._nodes, service_process, self._limits.stop_timeout_s)
        return [self._process(service, args, adoption if self._adopting else None) for args in (*followers, leader)]

    def _process(self, service: Service, args: ServiceArgs, adoption: GroupAdoption | None) -> ChildSpec:
        limits, name, leads = self._limits, args.name, args.rank == 0 and args.size > 1
        process, group = service_process(name), service.processes if args.size > 1 else []

        async def start(context: Context) -> Running:
            if adoption is not None:
                running = await adoption.find(context, name, service.config.name, [service.ranks])
                if running is not None:
                    return running
            told = msgspec.structs.replace(args, followers=await self._followers(service)) if leads else args
            wanted = devices_wanted_by_service(service.config)
            node = await self._nodes.choose(process, "local", limits.ready_timeout_s, devices=wanted, group=group)
            return await start_process(
                context, node.agent, told, job=SHARED, ready_s=limits.ready_timeout_s,
                devices=self._nodes.devices_of(process),
            )  # fmt: skip

        ready_s = limits.ready_timeout_s * (2 if leads else 1)  # it waits for its followers
        return ChildSpec(
            name, start, role=args.role, shutdown_s=limits.stop_timeout_s, ready_s=ready_s,
            group=service.config.name if args.size > 1 else "",
        )  # fmt: skip

    async def _followers(self, service: Service) -> tuple[ActorAddress, ...]:
        """Addresses of the ranks that start beside the service; if one of them ends, the wait is cancelled."""
        async with asyncio.timeout(self._limits.ready_timeout_s):
            while True:
                running = [service.supervisor.running(name) for name in service.ranks[1:]]
                if all(running):
                    return tuple(one.address for one in running if one is not None)
                service.changed.clear()
                await service.changed.wait()

    def _hear(self, service: Service, event: SupervisionEvent) -> None:
        if event.child not in service.ranks:
            return
        name, rank = service.config.name, rank_of(event.child)
        what = f"rank {rank} of the service {name}" if rank else f"the service {name}"
        if event.kind == "gave_up":
            service.failure = event.detail
            self._on_news(name, f"{what} was given up: {event.detail}")
        elif event.kind in ("restarting", "start_failed"):
            why = f": {event.reason}" if event.reason else ""
            self._on_news(name, f"{what} ended ({event.cause}{why}); starting it again")
        service.changed.set()
        if event.kind in ("started", "adopted") and not rank:
            self._on_ready(name)

    async def address(self, name: str) -> ActorAddress:
        """The address of the service's present life; waits until it is ready.

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
            AskError: it is not ready, or does not answer.
        """
        service = self._all.get(name)
        running = service.running if service is not None else None
        if running is None:
            raise NotSent(f"the service {name} is not ready")
        return await self._system.ref(running.address).ask(question, reply)

    async def end(self, name: str) -> Service:
        """Stop a service for good."""
        service = self._all.pop(name)
        service.changed.set()
        supervisor = service_process(name)
        if supervisor in self._system.actors():
            await self._system.stop_actor(supervisor)
        for process in service.processes:
            self._nodes.release(process)
        return service

    async def stop(self) -> None:
        """Stop them all. Idempotent."""
        for name in list(self._all):
            await self.end(name)


def remove_stored(directory: Path) -> None:
    """Remove the jobs' state that the services below ``directory`` have stored; their logs stay."""
    for service in sorted((directory / DIRECTORY).glob("*")):
        remove_stored_of(service)


def remove_stored_of(directory: Path) -> None:
    """Remove what the service whose directory this is has stored. Blocks."""
    remove_parked(directory)
