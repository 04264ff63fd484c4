"""The process of ``headrace run`` and ``headrace head``: hosts this machine's node agent, and keeps a head alive.

    start ─▶ transport ─▶ agent · faults · keeper
    lead  ─▶ exec head ─▶ HeadReady ─▶ HeadProgress … ─▶ HeadEnded ─▶ exit 0 ─▶ what it said is the result
                 ▲                            └─ ended without HeadEnded, or hung: SIGKILL
                 └── backoff, within the restart budget ──┘
    stop  ─▶ head ─▶ agent (its processes in order) ─▶ transport

Invariants
- Role processes are children of this process: they outlive the head, and end with this one (``parent_death``).
- The head has one life at a time; what an earlier one still says is ignored.
- Every life listens at the same endpoints. The next one finds its work in the run directory, and its processes at the
  node agents.
- An interruption outlives the head: a life that comes after it is told at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog

from actors.core.actor import Actor, handles
from actors.core.context import named_rng
from actors.core.system import ActorSystem
from actors.host.bounded_file import trim
from actors.protocol.who_may_send import guard_for
from configs.limits import Limits
from supervisors.faults.node_faults import NAME as NODE_FAULTS
from supervisors.faults.node_faults import NodeFaults
from supervisors.faults.process_faults import faults_of
from supervisors.head.head_keys import load_head_keys
from supervisors.head.head_messages import (
    Former,
    FormerJob,
    HeadBeacon,
    HeadEnded,
    HeadHeard,
    HeadOrder,
    HeadProgress,
    HeadReady,
)
from supervisors.jobs.job_news import OnProgress
from supervisors.machine.machine import CLUSTER, LOCAL, Machine, slowed_by
from supervisors.machine.membership.failure_detector import DetectorLimits, FailureDetector, Health
from supervisors.machine.node_agent import NodeAgent, NodeOptions
from supervisors.machine.processes.process import EXIT_START_FAILED, Child, Launch, ProcessExit, head_command
from supervisors.machine.processes.process_log import last_lines
from supervisors.machine.runtime_directory import remove_runtime_directory
from supervisors.tree.errors import HeadGaveUp
from supervisors.tree.judgement import Judge
from supervisors.tree.restart_budget import Backoff, BackoffPolicy, ExitCause, RestartBudget
from transport.zmq.own_keys import directory_or_own

log = structlog.get_logger("headrace.machine")

OnReady = Callable[[HeadReady], None]
"""Callback that is told the endpoints of each life."""

PEER: Final = "machine"
"""Peer name of this process; the head's is ``head``."""
_PORTS: Final = 3
"""Number of lanes of an endpoint, each with a port."""


class HeadKeeper(Actor):
    """Hears the present life of the head, and keeps what a next one has to know."""

    def __init__(self, on_progress: OnProgress, on_ready: OnReady) -> None:
        self._on_progress = on_progress
        self._on_ready = on_ready
        self.life = 0
        self.detector: FailureDetector
        self.ready: HeadReady | None = None
        self.summary: dict[str, Any] | None = None
        """Summary that the head has sent at its end."""
        self.jobs: dict[str, FormerJob] = {}
        self.steps = 0
        """Number of steps that all jobs have made, in all lives of the head."""
        self.restarts = 0
        """Restarts of the head."""
        self.nodes: tuple[str, ...] = ()
        """Nodes of the head, as it said last; kept while it is being started again."""
        self.became_ready = asyncio.Event()

    def expect(self, life: int) -> FailureDetector:
        """Listen to ``life``, which is about to be started; returns its failure detector."""
        limits = self.ctx.limits
        self.life, self.ready = life, None
        self.became_ready.clear()
        silences = DetectorLimits(limits.ready_timeout_s, limits.link_grace_s, limits.stopped_grace_s,
                                  limits.beacon_budget_s)  # fmt: skip
        self.detector = FailureDetector(silences, self.ctx.now())
        return self.detector

    @handles(HeadReady)
    async def head_ready(self, news: HeadReady) -> None:
        if news.life != self.life:
            return
        self.detector.saw_ready(self.ctx.now())
        self.ready = news
        self.became_ready.set()
        self._on_ready(news)

    @handles(HeadBeacon)
    async def head_beacon(self, news: HeadBeacon) -> None:
        if news.life == self.life:
            self.detector.saw_beacon(self.ctx.now())
            if news.nodes != self.nodes:
                self.nodes = news.nodes
                self._on_progress({"joined_nodes": ",".join(news.nodes)})

    @handles(HeadProgress)
    async def head_progress(self, news: HeadProgress) -> None:
        if news.life != self.life:
            return
        if (job := news.fields.get("of_job")) is not None:
            self._note(str(job), news.fields)
        self._on_progress(news.fields)

    def _note(self, job: str, fields: Mapping[str, Any]) -> None:
        """Keep what a next life of the head has to know. A job that is starting gets a new record."""
        if job not in self.jobs or fields.get("state") == "starting":
            self.jobs[job] = FormerJob(restarts=self.restarts)
        known = self.jobs[job]
        if isinstance(step := fields.get("step"), int):
            self.steps += step > known.step
            known.step = step
        known.restarts = _int(fields, "restarts", known.restarts)
        known.workers = _int(fields, "workers", known.workers)
        if isinstance(book := fields.get("functions"), str):
            known.functions = book
        known.begun = known.begun or fields.get("core") == "ready"

    @handles(HeadEnded)
    async def head_ended(self, news: HeadEnded) -> HeadHeard:
        if news.life == self.life:
            self.summary = dict(news.summary)
        return HeadHeard()


class MachineProcess:
    """Keeps a head alive: ``start`` it, ``lead`` a head to the end of its work, ``stop`` it in any case."""

    def __init__(
        self,
        *,
        listen: str | None,
        limits: Limits,
        on_progress: OnProgress,
        on_ready: OnReady,
        keys: Path | None = None,
        machine: Machine = LOCAL,
    ) -> None:
        self._machine = machine
        self._limits = limits
        self._on_progress = on_progress
        self._keys_directory = directory_or_own(keys, listen or "", "nodes")
        self._keys = load_head_keys(self._keys_directory, None).nodes
        self._runtime = machine.runtime_directory()
        self._listen = fixed_listen(listen) if listen is not None else f"ipc://{self._runtime}/head"
        self.keeper = HeadKeeper(on_progress, on_ready)
        self._head: Child | None = None
        self._system: ActorSystem | None = None

    async def start(self) -> None:
        """Listen, and start the node agent."""
        local = self._listen.startswith("ipc://")
        transport = self._machine.transport(
            PEER, listen=self._own_endpoint(), cluster=CLUSTER, limits=self._limits, keys=self._keys, role="machine"
        )
        self._system = system = ActorSystem(transport, limits=self._limits, guard=guard_for(transport.peer))
        await system.start()
        options = NodeOptions(
            listen=f"ipc://{self._runtime}/{{name}}" if local else "",
            keys=str(self._keys_directory or ""),
            machine=self._machine,
        )
        await system.spawn("keeper", self.keeper)
        await system.spawn("agent", NodeAgent("head", options))
        await system.spawn(NODE_FAULTS, NodeFaults(faults_of(transport), slowed_by(self._machine)))

    @property
    def endpoint(self) -> str:
        """Endpoint where every life of the head listens, and nodes join."""
        if self._keys is None or not self._listen.startswith("tcp://"):
            return self._listen
        return f"{self._listen}?key={self._keys.public_hex}"

    @property
    def peer(self) -> str:
        """Name and incarnation of this process, by which its heads know what is theirs; empty before ``start``."""
        return str(self._system.peer) if self._system is not None else ""

    @property
    def private(self) -> Path:
        """Directory that this user alone can enter, for as long as this process lives."""
        return self._runtime

    def _own_endpoint(self) -> str:
        """Endpoint of this process, beside the head's."""
        scheme = self._listen.partition("://")[0]
        if scheme == "tcp":
            return f"{self._listen.rpartition(':')[0]}:*"
        return f"ipc://{self._runtime}/{PEER}" if scheme == "ipc" else f"{scheme}://{PEER}"

    # ------------------------------------------------------------ the head's lives

    async def lead(self, order: HeadOrder, interrupted: asyncio.Event) -> dict[str, Any]:
        """Start the head and start it again until it has said that its work is done; returns what it said.

        Args:
            order: order of the first life; its addresses, and the orders of later lives, are filled in here.

        Raises:
            HeadGaveUp: it could not start, or its restart budget is spent.
        """
        limits, system = self._limits, self._system
        assert system is not None, "started"
        budget = RestartBudget(restarts_max=limits.restart_max, window_s=limits.restart_window_s)
        backoff = Backoff(BackoffPolicy(limits.backoff_first_s, limits.backoff_max_s, quiet_s=limits.restart_window_s))
        crash_loop = Judge(limits).crash_loop()
        rng, loop = named_rng(0, "head backoff"), asyncio.get_running_loop()
        failed_starts = 0
        order = msgspec.structs.replace(
            order,
            listen=self._listen,
            agent=system.address("agent"),
            keeper=system.address("keeper"),
            limits=limits.model_dump_json(),
            devices=self._machine.devices.ids,
        )
        while True:
            began_s, steps = loop.time(), self.keeper.steps
            end = await self._one_life(order, interrupted)
            if self.keeper.summary is not None:
                return self.keeper.summary
            failed_starts = 0 if self.keeper.ready is not None else failed_starts + 1
            cause = ExitCause.CRASHED if end.cause in (ExitCause.COMPLETED, ExitCause.PREEMPTED) else end.cause
            within = budget.spend(cause, loop.time())
            lived_s = loop.time() - began_s
            if self.keeper.steps > steps:
                crash_loop.progressed()
            no_loop = crash_loop.ended(cause, lived_s=lived_s)
            self._check(order, end, failed_starts, within=within, no_loop=no_loop)
            delay_s = backoff.after(cause, lived_s=lived_s, rng=rng)
            log.warning("the head ended; starting it again", life=order.life, end=str(end), delay_s=delay_s)
            self._on_progress({"message": f"the head ended ({end}); starting it again"})
            await asyncio.sleep(delay_s)
            order = self._next(order, end)

    async def _one_life(self, order: HeadOrder, interrupted: asyncio.Event) -> ProcessExit:
        """Start one head and see it to its end."""
        detector = self.keeper.expect(order.life)
        out = _output(order)
        self._head = head = self._machine.launch(Launch(head_command(), out, order.encode()))
        helpers = [
            asyncio.create_task(self._watch_over(head, detector), name="watch over the head"),
            asyncio.create_task(self._forward(head, interrupted), name="forward the interruption"),
            asyncio.create_task(self._trim(out), name="trim the head's output"),
        ]
        try:
            return await asyncio.shield(head.exited)
        finally:
            for helper in helpers:
                helper.cancel()

    async def _watch_over(self, head: Child, detector: FailureDetector) -> None:
        """Kill the head when it hangs, or when its work is done and it does not end."""
        loop, done_s = asyncio.get_running_loop(), None
        while True:
            await asyncio.sleep(self._limits.health_check_s)
            now_s = loop.time()
            detector.saw_run_state(now_s, stopped=self._machine.is_stopped(head.pid))
            if detector.health(now_s) is Health.HUNG:
                log.warning("the head hangs and is killed", pid=head.pid, why=detector.why(now_s))
                self._on_progress({"message": f"the head hangs ({detector.why(now_s)}) and is killed"})
                head.kill(ExitCause.KILLED)
                return
            if self.keeper.summary is not None:
                done_s = done_s or now_s
                if now_s - done_s > 2 * self._limits.stop_timeout_s:
                    head.kill(ExitCause.STOPPED)

    async def _trim(self, out: Path) -> None:
        """Keep the head's output file within bounds, as a node agent does for its processes."""
        while True:
            await asyncio.sleep(self._limits.log_trim_s)
            with contextlib.suppress(OSError):
                trim(out, self._limits.process_log_max_bytes)

    async def _forward(self, head: Child, interrupted: asyncio.Event) -> None:
        await interrupted.wait()
        await self.keeper.became_ready.wait()
        head.send_signal(signal.SIGINT)

    def _check(self, order: HeadOrder, end: ProcessExit, failed_starts: int, *, within: bool, no_loop: bool) -> None:
        """Raises:
        HeadGaveUp: another life would not help.
        """
        lines = last_lines(_output(order), self._limits.exit_log_lines)
        last = "" if end.reason is not None else lines[-1] if lines else ""
        if end.reason is not None and end.reason.permanent:
            raise HeadGaveUp(f"{end.reason} (the head could only meet the same error again)")
        if order.life == 1 and end.code == EXIT_START_FAILED and not self.keeper.ready:
            raise HeadGaveUp(str(end.reason or "") or last or f"the head could not start ({end})")
        if failed_starts >= self._limits.start_attempts_max:
            raise HeadGaveUp(f"{failed_starts} starts of the head in a row failed; last: {end}{_tail(last)}")
        if not within:
            limits = self._limits
            budget = f"{limits.restart_max} restarts in {limits.restart_window_s:g} s are used up"
            raise HeadGaveUp(f"the head ended too often: {budget}; last: {end}{_tail(last)}")
        if not no_loop:
            raise HeadGaveUp(f"the head ended again and again without a step in between; last: {end}{_tail(last)}")

    def _next(self, order: HeadOrder, end: ProcessExit) -> HeadOrder:
        keeper = self.keeper
        keeper.restarts += 1
        for known in keeper.jobs.values():
            known.restarts += 1
        former = Former(ended=str(end), restarts=keeper.restarts, jobs=keeper.jobs)
        return msgspec.structs.replace(order, life=order.life + 1, former=former)

    # ------------------------------------------------------------ the end

    async def stop(self) -> None:
        """End the head, then this machine's role processes in good order. Idempotent."""
        try:
            if self._head is not None and self._head.running:
                await self._head.stop(self._limits.stop_timeout_s)
        finally:
            if self._head is not None:
                self._head.kill()
            if self._system is not None:
                await self._system.stop()
            remove_runtime_directory(self._runtime)


def _output(order: HeadOrder) -> Path:
    """File of the stdout and stderr of the head's process."""
    log_path = Path(order.log)
    return log_path.with_name(log_path.stem + "-output.log")


def _tail(last: str) -> str:
    return f" ({last})" if last else ""


def fixed_listen(listen: str) -> str:
    """``listen`` with a port that is free now instead of a wildcard: the next life has to find it again."""
    address, _, port = listen.rpartition(":")
    if not listen.startswith("tcp://") or port not in ("*", "0"):
        return listen
    host = address.removeprefix("tcp://").strip("[]").replace("*", "")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET  # as the transport does
    for _ in range(64):
        with contextlib.ExitStack() as held:
            first = held.enter_context(socket.socket(family))
            first.bind((host, 0))
            number = int(first.getsockname()[1])
            with contextlib.suppress(OSError, OverflowError):
                for other in range(1, _PORTS):
                    held.enter_context(socket.socket(family)).bind((host, number + other))
                return f"{address}:{number}"
    raise OSError(f"{listen}: no {_PORTS} free ports in a row were found; name a port")


def failed_summary(job: str, keeper: HeadKeeper, error: str) -> dict[str, Any]:
    """The summary of a run whose head could not be kept alive."""
    known = keeper.jobs.get(job, FormerJob(restarts=keeper.restarts))
    return {"job": job, "steps": known.step, "restarts": known.restarts, "state": "failed", "error": error}


def _int(fields: Mapping[str, Any], name: str, otherwise: int) -> int:
    return value if isinstance(value := fields.get(name), int) else otherwise
