"""The actor in every role process that speaks for it to the node agent: ready once, then a beacon every second.

It also tells the metrics actor of overdue asks, of how late the process's loop is, and at an orderly end of the number
of asks; it lets operators look into its process (``actors/core/look.py``); and it commits the faults that only the
process itself can commit (``process_faults.py``).
"""

from __future__ import annotations

import os

from actors.core.actor import Actor, handles
from actors.core.errors import AskError
from actors.core.leader import Leader
from actors.core.look import Look, Sight
from actors.core.message import Done
from actors.core.patience import Patience
from actors.core.watch import Down
from actors.metrics.ask_watch import AskWatch
from actors.protocol.metrics import Event, ProcessHealth
from supervisors.faults.fault_messages import ApplyFault, FaultApplied
from supervisors.faults.process_faults import ProcessFaults
from supervisors.machine.processes.process_spec import ProcessSpec
from supervisors.tree.messages import ProcessBeacon, ProcessReady
from transport.address import ActorAddress


class ProcessReporter(Actor):
    """Tells the node agent that its process is ready, then sends beacons: they prove that the event loop turns, and say
    how late it is. The reporter is spawned last, when the role's actors are up.
    """

    def __init__(
        self, spec: ProcessSpec, addresses: dict[str, ActorAddress], faults: ProcessFaults, pid: int | None = None
    ) -> None:
        self._spec = spec
        self._faults = faults
        self._pid = os.getpid() if pid is None else pid
        self._addresses = addresses

    async def on_start(self) -> None:
        self._asks = AskWatch(self.ctx)
        self._metrics = Leader(self.ctx, self._spec.args.metrics)
        self._patience = Patience(self.ctx.limits, self.ctx.rng("patience"))
        self._health_told_s = self.ctx.now()
        self.ctx.watch(self._metrics.address)
        report = ProcessReady(
            name=self._spec.name,
            pid=self._pid,
            incarnation=self.ctx.self_address.peer.incarnation,
            addresses=self._addresses,
        )
        self.ctx.start_task(self._report(report), "report")
        self.ctx.start_task(self._beacons(), "beacons")

    async def _report(self, report: ProcessReady) -> None:
        """Repeat ``report`` until the agent has heard it: a link may break under way. The agent has the deadline."""
        agent, patience = self.ctx.ref(self._spec.agent), Patience(self.ctx.limits, self.ctx.rng("patience"))
        while True:
            try:
                await agent.ask(report, Done)
            except AskError as error:
                self.ctx.log.warning("the agent has not heard that this process is ready", error=str(error))
                await patience.again()
            else:
                return

    async def _beacons(self) -> None:
        agent = self.ctx.ref(self._spec.agent)
        interval_s = self.ctx.limits.beacon_interval_s
        while True:
            due_s = self.ctx.now() + interval_s
            await self.ctx.sleep(interval_s)
            lag_s = max(0.0, self.ctx.now() - due_s)
            agent.tell(ProcessBeacon(name=self._spec.name, pid=self._pid, loop_lag_s=lag_s))
            for overdue in self._asks.overdue():
                self._tell_metrics("ask_overdue", overdue)
            self._tell_health()

    def _tell_health(self) -> None:
        """Tell how late the loop is, now and then; under virtual time no lag is measured, and nothing is told."""
        now = self.ctx.now()
        if now - self._health_told_s < self.ctx.limits.health_interval_s:
            return
        self._health_told_s = now
        sight = self.ctx.look(Look(longer_than_s=self.ctx.limits.stall_report_s))
        if sight.loop_lag is not None:
            job = self._spec.args.name_of_job
            self.ctx.ref(self._metrics.address).tell(ProcessHealth.of(job, sight))

    @handles(Down)
    async def metrics_down(self, message: Down) -> None:
        """Find the metrics actor again: it, or the head, was restarted. The process ends when its main actor does."""
        self.ctx.start_task(self._find_metrics(), "find metrics")

    async def _find_metrics(self) -> None:
        """Watch the actor's next life; pauses grow until one is found, also if the head answers without the actor."""
        before = self._metrics.address
        while True:
            await self._patience.again()
            try:
                found = await self._metrics.find()
            except AskError:
                continue
            if found != before:
                self._patience.begin_anew()
            self.ctx.watch(found)
            return

    @handles(Look)
    async def look(self, message: Look) -> Sight:
        return self.ctx.look(message)

    @handles(ApplyFault)
    async def apply_fault(self, message: ApplyFault) -> FaultApplied:
        self.ctx.log.warning("a fault is injected", order=str(message.order))
        self._faults.apply(message.order)
        return FaultApplied()

    async def on_stop(self) -> None:
        self._tell_metrics("asks_counted", self._asks.counted())

    def _tell_metrics(self, name: str, fields: dict[str, float | int | str]) -> None:
        job = self._spec.args.name_of_job
        self.ctx.ref(self._metrics.address).tell(Event(job=job, name=name, fields=fields))
