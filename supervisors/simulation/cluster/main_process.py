"""The processes that the world starts: one on each machine, which starts all others there.

    MachineMain  as ``headrace run`` (one job) and ``headrace head`` (several): the first process of the head's machine
    NodeMain     as ``headrace node``

They do what ``trees.py`` does, without the control socket and the terminal.
"""

from __future__ import annotations

import asyncio
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final

from configs.schema import JobConfig
from supervisors.head.head_messages import HeadOrder, HeadReady, JobOrder
from supervisors.head.machine_process import PEER, MachineProcess, failed_summary
from supervisors.machine.membership.node import NodeProcess
from supervisors.providers.function_machines import FunctionMachines
from supervisors.providers.simulated import SimulatedProvider
from supervisors.simulation.cluster.context import Body, SimulationContext
from supervisors.simulation.cluster.machine import SimulatedMachine
from supervisors.tree.errors import HeadGaveUp, HeadLost
from transport.errors import LinkTimeout

HEAD_ENDPOINT = "memory://head"
_LOOK_S: Final = 0.05
"""Seconds between two jobs that are handed to a head."""


class MainProcess(ABC):
    """Runs one life of a machine's first process. ``on_end`` is called with its exit code, however it ends."""

    def __init__(
        self, world: SimulationContext, machine: SimulatedMachine, name: str, on_end: Callable[[MainProcess, int], None]
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
        """Do the process's work."""

    def terminate(self) -> None:
        """End as after SIGTERM."""
        if self.interrupted is not None:
            self.interrupted.set()

    def kill(self) -> None:
        """End as after SIGKILL; the processes it has started die with it."""
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
        """End the process and its machine, which has lost power."""
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
    """Stands in for ``on_end`` once the end has been told."""


class MachineMain(MainProcess):
    """Keeps a head alive until its jobs are over. ``jobs``: the jobs that are not over yet."""

    def __init__(
        self,
        world: SimulationContext,
        machine: SimulatedMachine,
        jobs: list[JobConfig],
        on_end: Callable[[MainProcess, int], None],
        *,
        resume: bool,
        functions: SimulatedProvider | None,
    ) -> None:
        """``functions``: provider of the job's function machines, which end with this one; None: the job has none."""
        self._jobs = jobs
        self._resume = resume
        self._provider = functions
        self._functions = functions and FunctionMachines(
            functions, world.scenario.limits.stop_timeout_s, lambda said: world.trace.note("function", said=said)
        )
        super().__init__(world, machine, PEER, on_end)

    async def main(self, interrupted: asyncio.Event) -> None:
        world = self.world
        process = MachineProcess(
            listen=HEAD_ENDPOINT,
            limits=world.scenario.limits,
            on_progress=self._hear,
            on_ready=self._head_ready,
            machine=self.machine,
        )
        try:
            await process.start()
            if len(self._jobs) > 1:
                await process.lead(self._order(None), interrupted)
                return
            job = self._jobs[0]
            try:
                summary = (await process.lead(self._order(job), interrupted))[job.name]
            except HeadGaveUp as error:
                summary = failed_summary(job.name, process.keeper, str(error))
            world.run_over(job.name, summary)
        finally:
            if self._provider is not None:
                await self._provider.close()
            await process.stop()

    def _end(self, code: int) -> None:
        super()._end(code)
        if self._provider is not None:
            for node in list(self._provider.running):
                self._provider.kill(node)

    def _hear(self, progress: Mapping[str, Any]) -> None:
        """Pass the wanted functions on to the provider; the world hears of other progress from the head itself."""
        if self._functions is not None and (functions := progress.get("functions")) is not None:
            self._functions.follow(str(functions))

    def _order(self, job: JobConfig | None) -> HeadOrder:
        """An order to run ``job``, or, if None, to serve the jobs that are submitted."""
        root, services = self.world.root, self.world.scenario.services
        directory = str(root / job.name if job is not None else root)
        return HeadOrder(
            run_root=str(root),
            directory=directory,
            log=str(root / "head.log"),
            services="" if services is None else services.model_dump_json(),
            jobs=(JobOrder(job.model_dump_json(), directory),) if job is not None else None,
            resume=job is not None and self._resume,
        )

    def _head_ready(self, head: HeadReady) -> None:
        """Submit the jobs if there are several; the head's later lives find them in their register."""
        if len(self._jobs) > 1:
            self.world.in_background(self._submit(), "submit")

    async def _submit(self) -> None:
        """Submit those jobs that neither this life of the head nor a former one has already."""
        for job in self._jobs:
            process = self.machine.head
            if process is None or process.head is None or not process.body.alive:
                return  # its next life calls ``_head_ready`` again
            head = process.head
            known = [*head.jobs, *(run_dir.name for run_dir in head.register.read())]
            if job.name not in known and not self.world.record(job.name).summary:
                process.body.life.run(head.launch, job, self.world.root / job.name)
            await asyncio.sleep(_LOOK_S)


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
