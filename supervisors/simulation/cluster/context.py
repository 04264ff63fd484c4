"""Holds what all simulated processes share, and what one of them consists of.

SimulationContext ◀─ World          adds the machines, and starts and restarts their processes (world.py)
Body              ◀─ SimulatedChild  a role process or a head, owned by whoever launched it (machine.py)
                  ◀─ MainProcess     a machine's first process, owned by the world (main_process.py)

Invariants
- Every random draw comes from the seed, each purpose from a stream of its own name.
- Background tasks belong to no process: they go on when processes are killed or halted.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from actors.core.system import ActorSystem
from actors.weights.segments import SIMULATED_HOST, Host
from configs.scenario import Scenario, SimulatedJob, job_config
from configs.schema import JobConfig
from supervisors.simulation.records.job_record import JobRecord
from supervisors.simulation.records.published import EXACT_MODES, PublishedWeights
from supervisors.simulation.records.rank_watch import RankWatch
from supervisors.simulation.records.service_watch import ServiceWatch
from supervisors.simulation.records.trace import Trace
from transport.memory_transport import MemoryTransport
from transport.sim.loop import SimulatedLoop
from transport.sim.network import SimNetwork, Weather
from transport.sim.process import SimProcess
from transport.transport import Frame, Lane

DATA_FILE: Final = "prompts.jsonl"
"""Name of a data file that nobody reads, since prompts are drawn; a job file has to name one."""
END_TOKEN: Final = 1
"""The token that ends a response, or a turn."""
_LOOK_S: Final = 0.05


class SimulationContext:
    """Holds what all processes of one run of ``scenario`` under ``seed`` share: time, network, randomness and records.

    Files of the run lie in ``root``; the caller removes it.
    """

    def __init__(
        self, scenario: Scenario, seed: int, root: Path, loop: SimulatedLoop, show: Callable[[str], None] | None = None
    ) -> None:
        self.scenario = scenario
        self.seed = seed
        self.root = root
        self.loop = loop
        self.trace = Trace(str(root), show)
        self.trace.loop = loop
        net = scenario.network
        weather = Weather(net.latency_s, net.jitter_s, net.bandwidth_bytes_s, net.loss, net.duplicate)
        self.network = SimNetwork(seed, weather, scenario.limits)
        self.network.heard = self.trace.message
        self.bodies: dict[SimProcess, Body] = {}
        self.findings: list[str] = []
        """Sentences that each say what is wrong with this run, in the order in which they were found."""
        self._simulated: dict[str, SimulatedJob] = {}
        self.jobs = self._drawn_jobs()
        self.services = ServiceWatch(scenario.costs.moved_byte_s, len(self.jobs))
        self.ranks = RankWatch(self.finding)
        if scenario.services is not None:
            self.network.heard = self._heard
        self.committed: dict[str, int] = {}
        self._records = {job.name: JobRecord(job.name) for job in self.jobs}
        self._published = {
            job.name: PublishedWeights(
                lambda sentence, name=job.name: self.finding(f"{name}: {sentence}"),
                repeats_exactly=job.sync.mode in EXACT_MODES,
            )
            for job in self.jobs
        }
        self._changes = 0
        self._pids = 0
        self._tasks: list[asyncio.Task[None]] = []

    def _heard(self, source: str, target: str, lane: Lane, frames: list[Frame]) -> None:
        self.trace.message(source, target, lane, frames)
        self.services.heard(frames)

    # ------------------------------------------------------------ what is drawn

    def rng(self, name: str) -> random.Random:
        """A random stream of its own for ``name``."""
        return random.Random(f"{self.seed}/{name}")

    def _drawn_jobs(self) -> list[JobConfig]:
        rng, scenario = self.rng("jobs"), self.scenario
        count = rng.choice(scenario.jobs_at_once) if scenario.jobs_at_once else len(scenario.jobs)
        chosen = sorted(rng.sample(range(len(scenario.jobs)), count))
        paths = {"model_path": str(self.root / "model"), "data_path": str(self.root / DATA_FILE)}
        variants = self.rng("variants")
        for i in chosen:
            job = scenario.jobs[i]
            self._simulated[job.name] = job.varied(variants.choice(scenario.variants)) if scenario.variants else job
        return [job_config(job, scenario, seed=rng.getrandbits(32), **paths) for job in self._simulated.values()]

    def new_pid(self) -> int:
        self._pids += 1
        return self._pids

    def published(self, job: str) -> PublishedWeights:
        return self._published[job]

    def finding(self, sentence: str) -> None:
        """Note once that something is wrong."""
        if sentence not in self.findings and not self.trace.closed:
            self.findings.append(sentence)
            self.trace.note("finding", sentence=sentence)

    def simulated_job(self, name: str) -> SimulatedJob:
        return self._simulated[name]

    # ------------------------------------------------------------ what is known of the jobs

    def record(self, job: str) -> JobRecord:
        return self._records[job]

    def progress_of(self, job: str) -> Callable[[Mapping[str, Any]], None]:
        """A listener that notes the progress of ``job``."""

        def listen(progress: Mapping[str, Any]) -> None:
            if (state := progress.get("state")) is not None:
                self._changes += 1
                self.trace.note("job", job=job, state=str(state))
            if "step" in progress:
                self.committed[job] = max(self.committed.get(job, 0), int(progress["step"]))

        return listen

    @property
    def movement(self) -> int:
        """A number that grows with everything that advances a job."""
        return self.trace.ledger_events + self._changes

    def job_over(self, job: str, summary: dict[str, Any]) -> None:
        """Hear from a head that a job has ended."""
        self.trace.note("job_over", job=job, state=summary["state"], error=summary.get("error", ""))
        if len(self.jobs) > 1:
            self.run_over(job, summary)

    def run_over(self, job: str, summary: dict[str, Any]) -> None:
        """Note that a job has ended. An interrupted one is not over: its operator will resume it."""
        if summary["state"] != "interrupted":
            self._records[job].summary = summary
        if len(self.jobs) > 1 and self.all_over:
            self.jobs_are_over()

    @property
    def all_over(self) -> bool:
        """Whether every job has ended for good."""
        return all(record.summary for record in self._records.values())

    def jobs_are_over(self) -> None:
        """Called when all of several jobs have ended; ``World`` then ends the head that served them."""

    # ------------------------------------------------------------ background tasks

    def in_background(self, coroutine: Any, name: str) -> asyncio.Task[None]:
        """Start a task that belongs to no process; if it fails, that is a finding."""
        task = SimProcess.of_nobody(coroutine, name)
        task.add_done_callback(self._background_over)
        self._tasks.append(task)
        return task

    def _background_over(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.escaped("the world", task.get_name(), error)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Poll until ``condition`` holds; for the world's own tasks, which end with the run."""
        while not condition():  # noqa: ASYNC110  the watched code sets no event
            await asyncio.sleep(_LOOK_S)

    def escaped(self, process: str, event: str, error: BaseException | None) -> None:
        """Note an exception that nobody caught."""
        self.finding(f"{process}: {event}: {error!r}")


class Body:
    """Holds one life of one process on ``host``: what runs, its link, its actors, and what signals do to it."""

    def __init__(self, name: str, host: Host, world: SimulationContext) -> None:
        self.name = name
        self.life = SimProcess(name)
        self.life.set(SIMULATED_HOST, host)
        self.transport: MemoryTransport | None = None
        self.system: ActorSystem | None = None
        self._world = world
        world.bodies[self.life] = self

    @property
    def alive(self) -> bool:
        return self.life.alive

    @property
    def halted(self) -> bool:
        return self.life.halted

    @property
    def peer_name(self) -> str:
        """The process's name on the network; empty before it listens."""
        return "" if self.transport is None else self.transport.peer.name

    def halt(self, *, heartbeats: bool = False) -> None:
        """Halt as SIGSTOP does. With ``heartbeats`` only Python code stands still, as while something holds the GIL."""
        self.life.halt()
        if self.transport is not None:
            self._world.network.halt(self.peer_name, heartbeats=heartbeats)

    def go_on(self) -> None:
        """Go on, as SIGCONT does."""
        if self.life.halted:
            self.life.go_on(self._world.loop)
            if self.transport is not None:
                self._world.network.go_on(self.peer_name)

    def end(self, *, silent: bool = False) -> None:
        """End the process and its link. ``silent``: its machine has lost power. Idempotent."""
        if not self.life.alive:
            return
        self._world.bodies.pop(self.life)
        self._world.loop.kill(self.life)
        if self.transport is not None:
            self.transport.abort(silent=silent)
            self._world.network.go_on(self.peer_name)
