"""A simulated role process: the inside of ``child.py`` on a virtual-time loop, and signals from outside.

launch ─ start_s ─▶ transport ─▶ child.host ─▶ exit code
         SIGTERM: dies           SIGTERM: stops in order          SIGKILL, SIGSTOP, SIGCONT: as ever
"""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

from actors.core.system import ActorSystem
from supervisors.child import host
from supervisors.process import EXIT_START_FAILED, Child
from supervisors.process_spec import ProcessSpec
from supervisors.simulation.body import Body
from supervisors.simulation.roles import build_simulated_role

if TYPE_CHECKING:
    from supervisors.simulation.machine import SimulatedMachine


class SimulatedChild(Child):
    """See the module's docstring. Made by ``SimulatedMachine.launch``."""

    def __init__(self, machine: SimulatedMachine, pid: int, spec: ProcessSpec, start_s: float) -> None:
        super().__init__(pid, machine.world.loop)
        self.spec = spec
        self.machine = machine
        self.body = Body(spec.peer, machine.host, machine.world)
        self._start_s = start_s
        self._terminated: asyncio.Event | None = None
        self._termination_pending = False
        self.body.life.start(self._main(), f"process {spec.peer}")

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

    @property
    def ready(self) -> bool:
        """Its actors have been started, or are about to be."""
        return self._terminated is not None

    async def _main(self) -> None:
        spec, world = self.spec, self.machine.world
        await asyncio.sleep(self._start_s)
        limits = spec.parsed_limits()
        transport = self.machine.transport(
            spec.peer, listen=spec.listen, cluster=spec.cluster, limits=limits, keys=None, role=self.role
        )
        self.body.system = system = ActorSystem(transport, limits=limits, seed=world.seed)
        self._terminated = asyncio.Event()
        code = EXIT_START_FAILED
        try:
            code = await host(
                spec, system, lambda args: build_simulated_role(args, world, self.body), self._terminated, pid=self.pid
            )
        except Exception as error:  # noqa: BLE001  as in run_child: the process fails, whatever the reason
            world.trace.say("process_failed", process=spec.peer, error=repr(error))
        self._exit(code)

    # signals

    def send_signal(self, number: int) -> None:
        if not self.running:
            return
        if number == signal.SIGSTOP:
            self.body.halt()
        elif number == signal.SIGCONT:
            self.body.go_on()
            if self._termination_pending:
                self._terminate()
        elif number == signal.SIGTERM and self.body.halted:
            self._termination_pending = True
        elif number == signal.SIGTERM:
            self._terminate()
        else:
            self._exit(-number)

    def _terminate(self) -> None:
        if self._terminated is None:
            self._exit(-signal.SIGTERM)  # no handler is installed yet
        else:
            self._terminated.set()

    def _signal_group(self, number: int) -> None:
        self.send_signal(number)

    def lose_power(self) -> None:
        """Its machine is off."""
        self._exit(-signal.SIGKILL, silent=True)

    def _exit(self, code: int, *, silent: bool = False) -> None:
        if self.running:
            self.machine.world.trace.note("exit", process=self.spec.peer, pid=self.pid, code=code)
            self.body.end(silent=silent)
            self.machine.forget(self)
            self._ended(code)
