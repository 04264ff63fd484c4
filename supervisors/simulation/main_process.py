"""The processes that the world itself starts: the head, and a node agent's process on each further machine.

They run what ``headrace run``, ``head --resume`` and ``headrace node`` run, less the control socket and the terminal.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from configs.schema import JobConfig
from supervisors.errors import HeadLost
from supervisors.head import Head
from supervisors.node import NodeProcess
from supervisors.simulation.body import Body
from supervisors.simulation.machine import SimulatedMachine
from transport.errors import LinkTimeout

if TYPE_CHECKING:
    from supervisors.simulation.world import World

HEAD_ENDPOINT = "memory://head"


class MainProcess:
    """One life of a machine's main process. ``on_end`` is called with its exit code, whatever ended it."""

    def __init__(self, world: World, machine: SimulatedMachine, on_end: Callable[[MainProcess, int], None]) -> None:
        self.world = world
        self.machine = machine
        self.name = machine.name
        self.body = Body(machine.name, machine.host, world)
        self.interrupted: asyncio.Event | None = None
        self._on_end = on_end
        world.trace.note("start", process=self.name, pid=0)
        self.body.life.start(self._run(), f"process {self.name}")

    async def _run(self) -> None:
        self.interrupted = asyncio.Event()
        try:
            await self.main()
        except (HeadLost, LinkTimeout) as error:
            self.world.trace.say("process_failed", process=self.name, error=str(error))
            self._end(1)
        except Exception as error:  # noqa: BLE001  it becomes a finding of the run
            self.world.escaped(self.name, f"the process of {self.name} failed", error)
            self._end(1)
        else:
            self._end(0)

    def main(self) -> Coroutine[Any, Any, None]:
        """What the process does."""
        raise NotImplementedError

    def terminate(self) -> None:
        """SIGTERM."""
        if self.interrupted is not None:
            self.interrupted.set()

    def kill(self) -> None:
        """SIGKILL; the role processes share its fate."""
        self._end(-signal.SIGKILL)

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


class HeadProcess(MainProcess):
    """Runs all jobs to their ends."""

    def __init__(
        self,
        world: World,
        machine: SimulatedMachine,
        jobs: list[JobConfig],
        on_end: Callable[[MainProcess, int], None],
        *,
        resume: bool,
    ) -> None:
        self.head: Head | None = None
        self._jobs = jobs
        self._resume = resume
        super().__init__(world, machine, on_end)

    async def main(self) -> None:
        world = self.world
        head = Head(run_root=world.root, listen=HEAD_ENDPOINT, limits=world.scenario.limits, machine=self.machine)
        try:
            await head.start()
            self.head, self.body.system = head, head.system
            async with asyncio.TaskGroup() as group:
                for job in self._jobs:
                    group.create_task(self._run_job(head, job), name=f"run {job.name}")
        finally:
            await head.stop()

    async def _run_job(self, head: Head, job: JobConfig) -> None:
        assert self.interrupted is not None
        world, run_dir = self.world, self.world.root / job.name
        progress = world.progress_of(job.name)
        summary = await head.run(job, run_dir, self.interrupted, resume=self._resume, on_progress=progress)
        if summary["state"] != "interrupted":  # then its operator resumes it
            world.record(job.name).summary = summary
        world.trace.note("job_over", job=job.name, state=summary["state"], error=summary.get("error", ""))


class NodeMain(MainProcess):
    """Lends its machine to the head until the head is lost or it is told to leave."""

    node: NodeProcess | None = None

    async def main(self) -> None:
        assert self.interrupted is not None
        world = self.world
        node = self.node = NodeProcess(
            join=HEAD_ENDPOINT,
            name=self.name,
            slots=self.machine.slots,
            keys=None,
            limits=world.scenario.limits,
            machine=self.machine,
        )
        try:
            await node.start()
            self.body.system = node.system
            await node.wait(self.interrupted)
        finally:
            await node.stop()
