"""Simulated processes that something has launched: role processes and heads, and what signals do to them.

launch ─ start_s ─▶ the inside: child.host, head_process.lead ─▶ exit code
         SIGTERM: dies        SIGTERM, SIGINT: stops in order          SIGKILL, SIGSTOP, SIGCONT: as ever
"""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

from actors.core.reason import Reason, reason_of
from actors.core.system import ActorSystem
from actors.protocol.who_may_send import guard_for
from configs.fault_plan import FaultPlan
from configs.limits import Limits
from supervisors.head.head import Head
from supervisors.head.head_messages import HeadOrder
from supervisors.head.head_process import lead
from supervisors.jobs.job_run import JobRun
from supervisors.machine.child import host
from supervisors.machine.process import EXIT_CRASHED, EXIT_START_FAILED, Child
from supervisors.machine.process_spec import ProcessSpec
from supervisors.simulation.ground import Body, Place
from supervisors.simulation.roles import build_simulated_role
from transport.errors import HeadraceError


class SimulatedChild(Child):
    """A simulated child is made by ``SimulatedMachine.launch``. What the process does is its ``main``."""

    OBEYS: tuple[int, ...] = (signal.SIGTERM,)
    """Signals that end it in good order; before it is ready for them they kill it, but for SIGINT."""

    def __init__(self, machine: Place, pid: int, name: str, start_s: float) -> None:
        super().__init__(pid, machine.world.loop)
        self.machine = machine
        self.body = Body(name, machine.host, machine.world)
        self.terminated: asyncio.Event | None = None
        """Set by a signal that it obeys; None before its code has been loaded."""
        self._pending: list[int] = []
        self._note: Reason | None = None
        self.body.life.start(self._run(start_s), f"process {name}")

    @property
    def name(self) -> str:
        """The name of its peer."""
        return self.body.name

    def __str__(self) -> str:
        return self.name

    @property
    def role(self) -> str:
        """As a fault plan names it."""
        raise NotImplementedError

    async def _run(self, start_s: float) -> None:
        await asyncio.sleep(start_s)
        self.terminated = asyncio.Event()
        code = EXIT_START_FAILED
        try:
            code = await self.main(self.terminated)
        except Exception as error:  # noqa: BLE001  as in run_child: the process fails, whatever the reason
            self.leave_note(error)
            self.machine.world.trace.say("process_failed", process=self.name, error=repr(error))
        self._exit(code)

    def leave_note(self, error: BaseException) -> None:
        """The process ends by ``error``, and says so."""
        self._note = reason_of(error)

    def _last_words(self) -> Reason | None:
        return self._note

    async def main(self, terminated: asyncio.Event) -> int:
        """What the process does; returns its exit code."""
        raise NotImplementedError

    # signals

    def send_signal(self, number: int) -> None:
        if not self.running:
            return
        if number == signal.SIGSTOP:
            self.body.halt()
        elif number == signal.SIGCONT:
            self.body.go_on()
            pending, self._pending = self._pending, []
            for waiting in pending:
                self.send_signal(waiting)
        elif number == signal.SIGKILL:
            self._exit(-number)
        elif self.body.halted:
            self._pending.append(number)
        elif number in self.OBEYS and self.terminated is not None:
            self.terminated.set()
        elif number != signal.SIGINT:  # ignored by role processes, and by a head that is not ready
            self._exit(-number)

    def _signal_group(self, number: int) -> None:
        self.send_signal(number)

    def lose_power(self) -> None:
        """Its machine is off."""
        self._exit(-signal.SIGKILL, silent=True)

    def _exit(self, code: int, *, silent: bool = False) -> None:
        if self.running:
            self.machine.world.trace.note("exit", process=self.name, pid=self.pid, code=code)
            self.body.end(silent=silent)
            self.machine.forget(self.pid)
            self._ended(code)


class SimulatedRole(SimulatedChild):
    """This child is a role process, owned by a node agent."""

    def __init__(self, machine: Place, pid: int, spec: ProcessSpec, start_s: float) -> None:
        self.spec = spec
        super().__init__(machine, pid, spec.peer, start_s)

    @property
    def role(self) -> str:
        return self.spec.args.role

    @property
    def actor(self) -> str:
        """The main actor's name, such as ``rollout-0``."""
        return self.spec.args.name

    @property
    def job(self) -> str:
        return self.spec.name.removesuffix(f".{self.actor}")

    async def main(self, terminated: asyncio.Event) -> int:
        spec, world = self.spec, self.machine.world
        limits = spec.parsed_limits()
        transport = self.machine.transport(
            spec.peer, listen=spec.listen, cluster=spec.cluster, limits=limits, keys=None, role=self.role
        )
        guard = guard_for(transport.peer)
        self.body.system = system = ActorSystem(transport, limits=limits, seed=world.seed, guard=guard)
        return await host(
            spec,
            system,
            lambda args: build_simulated_role(args, world, self.body),
            terminated,
            self.leave_note,
            pid=self.pid,
        )


class SimulatedHead(SimulatedChild):
    """This child is a head, owned by a machine process; ``head`` is there once it has started."""

    OBEYS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self, machine: Place, pid: int, order: HeadOrder, start_s: float) -> None:
        self.order = order
        self.head: Head | None = None
        super().__init__(machine, pid, "head", start_s)

    @property
    def role(self) -> str:
        return "head"

    async def main(self, terminated: asyncio.Event) -> int:
        order, world = self.order, self.machine.world
        head = _WatchedHead(self)
        try:
            try:
                await head.start()
            except (HeadraceError, OSError) as error:
                world.trace.say("head_failed", error=repr(error))
                return EXIT_START_FAILED
            self.head, self.body.system = head, head.system
            return await lead(head, order, "memory://control", terminated)
        except Exception as error:  # noqa: BLE001  it becomes a finding of the run
            if self.body.alive:
                world.escaped("head", "the head failed", error)
            return EXIT_CRASHED
        finally:
            await head.stop()


class _WatchedHead(Head):
    """Tells the world of its jobs."""

    def __init__(self, process: SimulatedHead) -> None:
        order = process.order
        super().__init__(
            run_root=Path(order.run_root),
            listen=order.listen,
            limits=Limits.model_validate_json(order.limits),
            machine=process.machine,
            agent=order.agent,
        )
        self._world = process.machine.world
        self._body = process.body

    def _unforeseen(self, run: JobRun, error: Exception) -> None:
        if self._body.alive:
            self._world.escaped("head", f"the run of {run.job.name} failed", error)
        super()._unforeseen(run, error)

    async def _follow(self, run: JobRun, interrupted: asyncio.Event, faults: FaultPlan | None = None) -> dict[str, Any]:
        run.subscribe(self._world.progress_of(run.job.name))
        summary = await super()._follow(run, interrupted, faults)
        self._world.job_over(run.job.name, summary)
        return summary
