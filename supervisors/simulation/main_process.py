"""The processes that the world itself starts: one on each machine, which starts all others there.

    MachineMain  as ``headrace run`` (one job) and ``headrace head`` (several): the first process of the head's machine
    NodeMain     as ``headrace node``

They do what ``trees.py`` does, less the control socket and the terminal.
"""

from __future__ import annotations

import asyncio
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from configs.schema import JobConfig
from supervisors.head.head_messages import HeadOrder, HeadReady
from supervisors.head.machine_process import PEER, MachineProcess, failed_summary
from supervisors.machine.node import NodeProcess
from supervisors.simulation.ground import Body, Ground
from supervisors.simulation.machine import SimulatedMachine
from supervisors.tree.errors import HeadGaveUp, HeadLost
from transport.errors import LinkTimeout

HEAD_ENDPOINT = "memory://head"


class MainProcess(ABC):
    """This is one life of a machine's first process. ``on_end`` is called with its exit code, whatever ended it."""

    def __init__(
        self, world: Ground, machine: SimulatedMachine, name: str, on_end: Callable[[MainProcess, int], None]
    ) -> None:
        self.world = world
        self.machine = machine
        self.name = name
        self.body = Body(name, machine.host, world)
        self.interrupted: asyncio.Event | None = None
        self._on_end = on_end
        world.trace.note("start", process=name, pid=0)
        self.body.life.start(self._run(), f"process {name}")

    def __str__(self) -> str:
        return self.name

    async def _run(self) -> None:
        self.interrupted = asyncio.Event()
        try:
            await self.main(self.interrupted)
        except (HeadLost, LinkTimeout) as error:
            self.world.trace.say("process_failed", process=self.name, error=str(error))
            self._end(1)
        except Exception as error:  # noqa: BLE001  it becomes a finding of the run
            self.world.escaped(self.name, f"the process {self.name} failed", error)
            self._end(1)
        else:
            self._end(0)

    @abstractmethod
    def main(self, interrupted: asyncio.Event) -> Coroutine[Any, Any, None]:
        """What the process does."""

    def terminate(self) -> None:
        """SIGTERM."""
        if self.interrupted is not None:
            self.interrupted.set()

    def kill(self) -> None:
        """SIGKILL; what it has started shares its fate."""
        self._end(-signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        """As ``SimulatedChild.send_signal``."""
        if number == signal.SIGSTOP:
            self.body.halt()
        elif number == signal.SIGCONT:
            self.body.go_on()
        elif number == signal.SIGTERM:
            self.terminate()
        elif number == signal.SIGKILL:
            self.kill()

    def lose_power(self) -> None:
        """The machine is off."""
        if self.body.alive:
            self.body.end(silent=True)
            self.machine.lose_power()
            self._end(-signal.SIGKILL)

    def _end(self, code: int) -> None:
        if self._on_end is _nobody:
            return
        on_end, self._on_end = self._on_end, _nobody
        self.world.trace.note("exit", process=self.name, pid=0, code=code)
        self.body.end()
        self.machine.kill_children()
        on_end(self, code)


def _nobody(_: MainProcess, __: int) -> None:
    """Has heard of the end already."""


class MachineMain(MainProcess):
    """Keeps a head alive until its jobs are over. ``jobs``: those that are not over yet."""

    def __init__(
        self,
        world: Ground,
        machine: SimulatedMachine,
        jobs: list[JobConfig],
        on_end: Callable[[MainProcess, int], None],
        *,
        resume: bool,
    ) -> None:
        self._jobs = jobs
        self._resume = resume
        self._functions = world.function_machines() if jobs[0].provider.kind == "functions" else None
        super().__init__(world, machine, PEER, on_end)

    async def main(self, interrupted: asyncio.Event) -> None:
        world = self.world
        process = MachineProcess(
            listen=HEAD_ENDPOINT,
            limits=world.scenario.limits,
            on_progress=self._functions.hear if self._functions is not None else _unheard,
            on_ready=self._head_ready,
            machine=self.machine,
        )
        try:
            await process.start()
            if len(self._jobs) > 1:
                await process.lead(self._order(), interrupted)
                return
            job = self._jobs[0]
            try:
                summary = await process.lead(self._order(job), interrupted)
            except HeadGaveUp as error:
                summary = dict(failed_summary(job.name, process.keeper, str(error)))
            world.run_over(job.name, summary)
        finally:
            if self._functions is not None:
                await self._functions.close()
            await process.stop()

    def _end(self, code: int) -> None:
        super()._end(code)
        if self._functions is not None:
            self._functions.end()

    def _order(self, job: JobConfig | None = None) -> HeadOrder:
        root = self.world.root
        services = self.world.scenario.services
        order = HeadOrder(
            run_root=str(root),
            log=str(root / "head.log"),
            services="" if services is None else services.model_dump_json(),
        )
        if job is None:
            return order
        return msgspec.structs.replace(
            order, job=job.model_dump_json(), run_dir=str(root / job.name), resume=self._resume
        )

    def _head_ready(self, head: HeadReady) -> None:
        """The operator of a head that serves hands it his jobs; later lives find them in their register."""
        if len(self._jobs) > 1:
            self.world.submit(self._jobs)


def _unheard(_: object) -> None:
    """The world hears of progress from the head itself."""


class NodeMain(MainProcess):
    """Lends its machine to the head until the head is lost or it is told to leave."""

    async def main(self, interrupted: asyncio.Event) -> None:
        node = NodeProcess(
            join=HEAD_ENDPOINT,
            name=self.name,
            slots=self.machine.slots,
            keys=None,
            kind=self.machine.kind,
            notice_s=self.machine.notice_s,
            limits=self.world.scenario.limits,
            machine=self.machine,
        )
        try:
            await node.start()
            self.body.system = node.system
            await node.wait(interrupted)
        finally:
            await node.stop()
