"""The node agent, one per host: holds the role processes of its machine and tells their owners how they ended.

    SpawnProcess ─▶ exec ─▶ ProcessReady ─▶ SpawnReply            (or the failure, with the last log lines)
    pidfd ─▶ exit ─▶ ProcessExited to the owner
    every health_check_s: run state + link + beacons ─▶ failure detector ─▶ hung: SIGKILL ─▶ exit

Invariants
- Every process that became ready ends in exactly one ProcessExited to its owner; one that did not, in exactly one
  SpawnReply with a failure.
- A process has one owner, the actor that asked for it. When the owner is gone and nobody adopts the process within
  ``orphan_grace_s``, it is stopped. A process adopted after that is still stopped, and its new owner is told that it
  was preempted, since that owner did not ask for its end.
- A busy process is left alone; a hung one is killed (``failure_detector``).
- No process outlives this one (``parent_death``), and none outlives this actor.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import msgspec

from actors.core.actor import Actor, concurrent, handles
from actors.core.look import Look, Sight
from actors.core.watch import Down, Gone
from actors.host.bounded_file import trim
from actors.weights.segments import keep_run_id
from configs.names import NAME_CHARACTERS_MAX, name_problem
from configs.run_files import LOGS
from supervisors.machine.membership.failure_detector import DetectorLimits, FailureDetector, Health
from supervisors.machine.processes.held_sockets import listening_of
from supervisors.machine.processes.leftover_files import LeftoverFiles
from supervisors.machine.processes.managed_process import Managed, NodeOptions, ParkedProcesses, beside
from supervisors.machine.processes.process import Launch, ProcessExit
from supervisors.machine.processes.process_log import last_lines
from supervisors.machine.processes.process_spec import ProcessSpec
from supervisors.tree.messages import (
    AdoptProcesses,
    ListProcesses,
    ProcessBeacon,
    ProcessExited,
    ProcessFailure,
    ProcessList,
    ProcessReady,
    ProcessStarted,
    SpawnProcess,
    SpawnReply,
    StopProcess,
    StopReply,
)
from supervisors.tree.restart_budget import ExitCause
from transport.address import ActorAddress

__all__ = ["NodeAgent", "NodeOptions"]


class NodeAgent(Actor):
    """Starts, watches and stops the role processes of one machine."""

    def __init__(self, node: str, options: NodeOptions) -> None:
        self._node = node
        self._options = options
        self._managed: dict[str, Managed] = {}
        self._starts = 0
        self._orphaned_s: dict[ActorAddress, float] = {}
        self._watched: set[ActorAddress] = set()
        self._leftovers = LeftoverFiles()
        self._fewer = asyncio.Event()
        self._parked = ParkedProcesses()

    async def on_start(self) -> None:
        self._parked.most = self.ctx.limits.parked_processes_max
        self.ctx.start_task(self._judge(), "judge")
        self.ctx.start_task(self._trim_logs(), "trim-logs")
        self.ctx.start_task(self._keep_clear(), "keep-clear")

    async def on_stop(self) -> None:
        """Stop every process, all at once, each with most of our own stop deadline; then kill.

        To their owners this is a preemption: the machine goes away in good order.
        """
        deadline_s = 0.8 * self.ctx.limits.stop_timeout_s
        try:
            async with asyncio.TaskGroup() as group:
                for managed in self._managed.values():
                    group.create_task(managed.process.stop(deadline_s, ExitCause.PREEMPTED))
            for managed in list(self._managed.values()):
                self._ended(managed, await managed.process.gone())
            await self._leftovers.clear_away(self.ctx, 0.0)
        finally:
            for managed in self._managed.values():
                managed.process.kill()
            await self._parked.end()

    async def wait_empty(self, timeout_s: float) -> bool:
        """Wait until no process runs here; False: some still do after ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._managed:
                    self._fewer.clear()
                    await self._fewer.wait()
        except TimeoutError:
            return False
        return True

    # spawn

    @handles(SpawnProcess)
    @concurrent
    async def spawn(self, message: SpawnProcess) -> SpawnReply:
        owner = self.ctx.sender
        if owner is None:
            return _failed(ExitCause.CRASHED, "a process needs an owner: ask from within an actor")
        for name in (message.args.name, message.name):  # a file and a peer are named by them
            if problem := name_problem(name, longest=3 * NAME_CHARACTERS_MAX):
                return _failed(ExitCause.CRASHED, f"the name of a process {problem}")
        if problem := self._options.machine.devices.lacks(message.devices):
            return _failed(ExitCause.CRASHED, f"{message.name} is to have {problem}")
        if not await self._make_room(message.name, owner):
            other = self._managed[message.name].owner
            return _failed(ExitCause.CRASHED, f"{message.name} runs here already for {other}")
        try:
            managed = self._launch(message, owner)
        except OSError as error:
            return _failed(ExitCause.CRASHED, f"{message.name} could not be started: {error}")
        try:
            async with asyncio.timeout(message.ready_timeout_s):
                report = await asyncio.shield(managed.ready)
        except TimeoutError:
            managed.verdict = managed.verdict or f"not ready after {message.ready_timeout_s:g} s"
            report = None
        except asyncio.CancelledError:
            managed.process.kill()
            raise
        if report is None:
            managed.process.kill(ExitCause.CRASHED)
            await managed.process.gone()
            return SpawnReply(failure=self._failure(managed))
        return SpawnReply(started=self._started(managed, report))

    async def _make_room(self, name: str, owner: ActorAddress) -> bool:
        """Kill a process of that name if its owner asks again, having lost track of it, or is gone; False: it stays."""
        old = self._managed.get(name)
        if old is None:
            return True
        if old.owner != owner and old.owner not in self._orphaned_s and not old.orphan:
            return False
        old.verdict = "replaced by a new start"
        old.process.kill(ExitCause.STOPPED)
        self._ended(old, await old.process.gone())
        return True

    def _launch(self, order: SpawnProcess, owner: ActorAddress) -> Managed:
        limits = self.ctx.limits
        args = msgspec.structs.replace(order.args, node=self._node)
        if args.run_id:
            keep_run_id(Path(args.run_dir), args.run_id)  # its shared memory has the same name on every machine
        self._starts += 1
        spec = ProcessSpec(
            name=order.name,
            peer=f"{self._node}.{order.name}",
            args=args,
            agent=self.ctx.self_address,
            cluster=self._options.cluster,
            listen=self._listen(order.name),
            limits=order.limits or limits.model_dump_json(),
            seed=self._options.seed,
            keys=self._options.keys,
            neighbours=self._options.neighbours,
        )
        log_path, now_s = Path(args.run_dir) / LOGS / f"{args.name}.log", self.ctx.now()
        launch = Launch(self._options.command, log_path, spec.encode(), {}, order.may_stay, order.devices)
        managed = Managed(
            order=order,
            owner=owner,
            process=self._parked.serve(args.role, launch)
            or self._options.machine.launch(launch, listening_of(order.name, args)),
            detector=FailureDetector(
                DetectorLimits(
                    ready_s=order.ready_timeout_s,
                    link_grace_s=limits.link_grace_s,
                    stopped_grace_s=limits.stopped_grace_s,
                    beacon_budget_s=order.beacon_budget_s,
                ),
                now_s,
            ),
            log_path=log_path,
            started_s=now_s,
            ready=asyncio.get_running_loop().create_future(),
        )
        self._managed[order.name] = managed
        self._watch(owner)
        self.ctx.start_task(self._follow(managed), f"follow-{order.name}-{managed.process.pid}")
        return managed

    def _listen(self, name: str) -> str:
        """Endpoint beside the agent's: in the same directory for ipc, on the same host for tcp."""
        template = self._options.listen or beside(self.ctx.self_address.endpoint)
        return template.replace("{name}", f"{name[-24:]}.{self._starts}")

    def _started(self, managed: Managed, report: ProcessReady) -> ProcessStarted:
        return ProcessStarted(
            name=managed.order.name,
            node=self._node,
            pid=managed.process.pid,
            incarnation=report.incarnation,
            addresses=report.addresses,
            seconds=self.ctx.now() - managed.started_s,
        )

    def _failure(self, managed: Managed) -> ProcessFailure:
        end = managed.end or managed.process.exited.result()
        return ProcessFailure(
            cause=end.cause if end.cause is not ExitCause.COMPLETED else ExitCause.CRASHED,
            detail=managed.verdict or f"it ended before it was ready ({end})",
            reason=end.reason,
            exit_code=end.code,
            log_tail=last_lines(managed.log_path, self.ctx.limits.exit_log_lines),
            log_path=str(managed.log_path),
        )

    @handles(ProcessReady)
    async def ready(self, message: ProcessReady) -> None:
        managed = self._of(message.name, message.pid)
        if managed is None or managed.ready.done():
            return
        managed.detector.saw_ready(self.ctx.now())
        managed.report = message
        self._leftovers.ready(managed.order.args.run_dir, managed.order.name)
        managed.contact = self.ctx.sender
        if managed.contact is not None:
            self.ctx.watch(managed.contact)
        managed.ready.set_result(message)

    # exits

    async def _follow(self, managed: Managed) -> None:
        """Wait for the end of one process; the failure detector is the deadline."""
        self._ended(managed, await asyncio.shield(managed.process.exited))

    def _ended(self, managed: Managed, end: ProcessExit) -> None:
        """Forget a process that has ended, and tell its owner. Once per process."""
        if managed.end is not None:
            return
        managed.end = end
        managed.detector.saw_exit()
        name = managed.order.name
        if self._managed.get(name) is managed:
            del self._managed[name]
            self._fewer.set()
        if managed.contact is not None:
            self.ctx.unwatch(managed.contact)
        if not managed.ready.done():
            managed.ready.set_result(None)
        if managed.process.stays:
            self._parked.add(managed.order.args.role, managed.order.devices, managed.process)
        run_dir = managed.order.args.run_dir
        if managed.report is None:
            self._leftovers.failed(run_dir, name, self.ctx.now())
            return
        holders = (address.name for address in managed.report.addresses.values())
        self._leftovers.ended(run_dir, name, holders, end.pid, self.ctx.now())
        detail = f"{managed.verdict}; {end}" if managed.verdict else str(end)
        log = self.ctx.log.info if end.cause in (ExitCause.STOPPED, ExitCause.COMPLETED) else self.ctx.log.warning
        log("process ended", process=name, pid=end.pid, cause=str(end.cause), detail=detail)
        self.ctx.ref(managed.owner).tell(
            ProcessExited(
                name=name,
                node=self._node,
                pid=end.pid,
                incarnation=managed.report.incarnation,
                cause=end.cause,
                exit_code=end.code,
                detail=detail,
                reason=end.reason,
                log_tail=last_lines(managed.log_path, self.ctx.limits.exit_log_lines),
            )
        )

    @handles(StopProcess)
    @concurrent
    async def stop(self, message: StopProcess) -> StopReply:
        managed = self._managed.get(message.name)
        if managed is None:
            return StopReply()
        end = await managed.process.stop(message.deadline_s, message.cause)
        self._options.machine.let_go(message.name)
        return StopReply(exit_code=end.code)

    @handles(Look)
    async def look(self, message: Look) -> Sight:
        return self.ctx.look(message)

    # health

    @handles(ProcessBeacon)
    async def beacon(self, message: ProcessBeacon) -> None:
        managed = self._of(message.name, message.pid)
        if managed is None:
            return
        managed.detector.saw_beacon(self.ctx.now())
        managed.loop_lag_s = message.loop_lag_s
        if managed.link_lost and managed.contact is not None:
            managed.link_lost = False
            self.ctx.watch(managed.contact)

    async def _judge(self) -> None:
        while True:
            await self.ctx.sleep(self.ctx.limits.health_check_s)
            now_s = self.ctx.now()
            for managed in self._managed.values():
                stopped = self._options.machine.is_stopped(managed.process.pid)
                managed.detector.saw_run_state(now_s, stopped=stopped)
                if managed.detector.health(now_s) is Health.HUNG and not managed.verdict:
                    managed.verdict = f"hung: {managed.detector.why(now_s)}"
                    self.ctx.log.warning("killing a hung process", process=managed.order.name, why=managed.verdict)
                    managed.process.kill()
            self._stop_orphans(now_s)

    async def _keep_clear(self) -> None:
        grace_s = self.ctx.limits.orphan_grace_s
        while True:
            await self.ctx.sleep(self.ctx.limits.health_check_s)
            starting = {(m.order.args.run_dir, m.order.name) for m in self._managed.values()}
            await self._leftovers.clear_away(self.ctx, grace_s, starting)

    @handles(Down)
    async def down(self, message: Down) -> None:
        now_s = self.ctx.now()
        for managed in self._managed.values():
            if managed.contact == message.address and message.reason is Gone.UNREACHABLE:
                managed.link_lost = True
                managed.detector.saw_link_down(now_s)
        if message.address in self._watched:
            self._watched.discard(message.address)
            self._orphaned_s[message.address] = now_s

    # owners

    @handles(AdoptProcesses)
    async def adopt(self, message: AdoptProcesses) -> ProcessList:
        owner = self.ctx.sender
        if owner is not None:
            self._watch(owner)
            for name in message.names:
                if (managed := self._managed.get(name)) is not None:
                    managed.owner, managed.orphan = owner, False
        return self._list()

    @handles(ListProcesses)
    async def list(self, message: ListProcesses) -> ProcessList:
        if (asker := self.ctx.sender) is not None:
            self._is_back(asker)
        return self._list()

    def _is_back(self, asker: ActorAddress) -> None:
        """Watch an owner again that was only cut off, and now asks what is left of its processes."""
        for owner in list(self._orphaned_s):
            if (owner.name, owner.peer) == (asker.name, asker.peer):
                self._watch(owner)

    def _list(self) -> ProcessList:
        now_s = self.ctx.now()
        return ProcessList(node=self._node, processes=[managed.info(now_s) for managed in self._managed.values()])

    def _watch(self, owner: ActorAddress) -> None:
        self._orphaned_s.pop(owner, None)
        if owner not in self._watched:
            self._watched.add(owner)
            self.ctx.watch(owner)

    def _stop_orphans(self, now_s: float) -> None:
        for owner, since_s in list(self._orphaned_s.items()):
            if now_s - since_s < self.ctx.limits.orphan_grace_s:
                continue
            del self._orphaned_s[owner]
            for managed in self._managed.values():
                if managed.owner == owner:
                    managed.orphan = True
                    managed.verdict = f"its owner {owner} has been gone for {now_s - since_s:.0f} s"
                    self.ctx.start_task(self._stop_orphan(managed), f"orphan-{managed.order.name}")

    async def _stop_orphan(self, managed: Managed) -> None:
        """Stop it as preempted: an owner that adopts it meanwhile replaces it once it is gone, at no cost."""
        await managed.process.stop(self.ctx.limits.stop_timeout_s, ExitCause.PREEMPTED)

    async def _trim_logs(self) -> None:
        while True:
            await self.ctx.sleep(self.ctx.limits.log_trim_s)
            for managed in list(self._managed.values()):
                with contextlib.suppress(OSError):
                    await self.ctx.run_blocking(trim, managed.log_path, self.ctx.limits.process_log_max_bytes)

    def _of(self, name: str, pid: int) -> Managed | None:
        managed = self._managed.get(name)
        return managed if managed is not None and managed.process.pid == pid else None


def _failed(cause: ExitCause, detail: str) -> SpawnReply:
    return SpawnReply(failure=ProcessFailure(cause=cause, detail=detail))
