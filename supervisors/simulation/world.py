"""A cluster on one virtual-time loop: machines, their processes, the network between them, and who looks after all.

    World.run ─▶ machines ─▶ head process (Head, JobRun, supervisors, scheduler, ledger, job)   ┐ each a process of its
                         └─▶ node processes (NodeAgent, Membership) ─▶ role processes           ┘ own on the same loop
              ─▶ nemesis: faults as planned         ─▶ watchman: over? too late? does nothing move any more?

Invariants
- Everything that is drawn comes from the seed, each thing from a stream of its own name.
- The world's own tasks belong to no process: nothing that is killed or halted takes them along.
- A run ends: when its jobs are over, when nothing moves for ``stall_s``, or ``finish_within_s`` after the last fault.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from actors.weights.segments import simulated_id
from configs.scenario import Scenario, SimulatedJob, job_config
from configs.schema import JobConfig
from supervisors.simulation.children import SimulatedHead, SimulatedRole
from supervisors.simulation.chunks import Tampering
from supervisors.simulation.ground import END_TOKEN, Body, FunctionMachinesThere
from supervisors.simulation.machine import SimulatedMachine
from supervisors.simulation.main_process import MachineMain, MainProcess, NodeMain
from supervisors.simulation.published import EXACT_MODES, PublishedWeights
from supervisors.simulation.rank_watch import RankWatch
from supervisors.simulation.records import JobRecord
from supervisors.simulation.service_watch import ServiceWatch
from supervisors.simulation.trace import Trace
from transport.sim.loop import SimulatedLoop
from transport.sim.network import SimNetwork, Weather
from transport.sim.process import SimProcess
from transport.transport import Frame, Lane

DATA_FILE: Final = "prompts.jsonl"
"""Name of a file that nobody reads, since prompts are drawn; a job file has to name one."""
_PARTS: Final = 3
"""Number of a job's supervisors: core, services, rollout."""
_LOOK_S: Final = 0.05


class World:
    """A world is one simulated run of ``scenario`` under ``seed``. Its files lie in ``root``; the caller removes it."""

    def __init__(
        self, scenario: Scenario, seed: int, root: Path, loop: SimulatedLoop, show: Callable[[str], None] | None = None,
        functions: Callable[[World], FunctionMachinesThere] | None = None,
    ) -> None:  # fmt: skip
        """``functions``: makes the machines of a job's functions; None: no job has such."""
        self.scenario = scenario
        self.seed = seed
        self.root = root
        self.loop = loop
        self._functions = functions
        self.trace = Trace(str(root), show)
        self.trace.loop = loop
        net = scenario.network
        weather = Weather(net.latency_s, net.jitter_s, net.bandwidth_bytes_s, net.loss, net.duplicate)
        self.network = SimNetwork(seed, weather, scenario.limits)
        self.network.heard = self.trace.message
        self.bodies: dict[SimProcess, Body] = {}
        self.findings: list[str] = []
        """Findings on what is wrong with this run, in the order in which they were made."""
        self._simulated: dict[str, SimulatedJob] = {}
        self.jobs = self._drawn_jobs()
        self.services = ServiceWatch(scenario.costs.moved_byte_s, len(self.jobs))
        self.ranks = RankWatch(self.finding)
        if scenario.services is not None:
            self.network.heard = self._heard
        self.machines: dict[str, SimulatedMachine] = {}
        self.mains: dict[str, MainProcess] = {}
        """The living main process of each machine."""
        self.over = False
        self.committed: dict[str, int] = {}
        self._records = {job.name: JobRecord(job.name) for job in self.jobs}
        self._published = {
            job.name: PublishedWeights(
                lambda sentence, name=job.name: self.finding(f"{name}: {sentence}"),
                repeats_exactly=job.sync.mode in EXACT_MODES,
            )
            for job in self.jobs
        }
        self._states: dict[str, str] = {}
        self._changes = 0
        self.struck: list[str] = []
        """Faults, in the order in which they struck."""
        self._tamperings: list[Tampering] = []
        self._pids = 0
        self._tasks: list[asyncio.Task[None]] = []

    # ------------------------------------------------------------ what is drawn

    def rng(self, name: str) -> random.Random:
        """A stream of its own for ``name``."""
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
        """What is known of the versions of a job's weights."""
        return self._published[job]

    def finding(self, sentence: str) -> None:
        """Something is wrong; said once."""
        if sentence not in self.findings and not self.trace.closed:
            self.findings.append(sentence)
            self.trace.note("finding", sentence=sentence)

    def simulated_job(self, name: str) -> SimulatedJob:
        return self._simulated[name]

    # ------------------------------------------------------------ machines

    def start(self) -> None:
        """Switch everything on."""
        (self.root / "model").mkdir(parents=True)
        (self.root / "model" / "config.json").write_text(json.dumps({"eos_token_id": END_TOKEN}))
        (self.root / "model" / "tokenizer.json").write_text("{}")
        names = ["head", *(f"node-{n}" for n in range(1, self.scenario.nodes + 1))]
        for name in names:
            self.machines[name] = SimulatedMachine(self, name, self.root / name, self.scenario.slots)
        (self.root / DATA_FILE).write_text('{"prompt": "1", "answer": "1"}\n')
        for job in self.jobs:
            (self.root / job.name).mkdir()
            (self.root / job.name / "job.yaml").write_text(job.model_dump_json(), encoding="utf-8")  # is YAML, too
        self._start_main("head")
        for name in names[1:]:
            self._start_main(name)

    def _start_main(self, name: str, *, resume: bool = False) -> None:
        machine = self.machines[name]
        if name != "head":
            self.mains[name] = NodeMain(self, machine, name, self._main_ended)
            return
        jobs = [job for job in self.jobs if not self._records[job.name].summary]
        self.mains[name] = MachineMain(self, machine, jobs, self._main_ended, resume=resume)

    def _main_ended(self, process: MainProcess, code: int) -> None:
        name = process.machine.name
        self.mains.pop(name, None)
        if self.over:
            return
        if name == "head" and self._all_over():
            self.over = True
            return
        returns_s = self.scenario.head_returns_s if name == "head" else self.scenario.node_returns_s
        if returns_s is not None:
            self.in_background(self._bring_back(name, returns_s), f"bring back {name}")

    async def _bring_back(self, name: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        if not self.over:
            self._start_main(name, resume=True)

    def _all_over(self) -> bool:
        return all(record.summary for record in self._records.values())

    def function_machines(self) -> FunctionMachinesThere:
        """For the functions of one life of the head's machine."""
        assert self._functions is not None, "whoever makes a world for jobs with functions hands it in"
        return self._functions(self)

    def submit(self, jobs: list[JobConfig]) -> None:
        """Hand jobs to a head that serves, unless it, or a life before it, has them already."""
        self.in_background(self._submit(jobs), "submit")

    async def _submit(self, jobs: list[JobConfig]) -> None:
        for job in jobs:
            head = self.head
            if head is None or head.head is None or not head.body.alive:
                return  # its next life says that it is ready, too
            known = [*head.head.jobs, *(run_dir.name for run_dir in head.head.register.read())]
            if job.name not in known and not self._records[job.name].summary:
                head.body.life.run(head.head.launch, job, self.root / job.name)
            await asyncio.sleep(_LOOK_S)

    def job_over(self, job: str, summary: dict[str, Any]) -> None:
        """A head says that a job has ended."""
        self.trace.note("job_over", job=job, state=summary["state"], error=summary.get("error", ""))
        if len(self.jobs) > 1:
            self.run_over(job, summary)

    def run_over(self, job: str, summary: dict[str, Any]) -> None:
        """An operator hears that a job has ended. One that was interrupted will be resumed."""
        if summary["state"] != "interrupted":
            self._records[job].summary = summary
        main = self.mains.get("head")
        if len(self.jobs) > 1 and main is not None and self._all_over():
            main.terminate()  # the operator ends the head that served

    def in_background(self, coroutine: Any, name: str) -> asyncio.Task[None]:
        """A task of the world's own, whoever calls; that it fails is a finding."""
        task = SimProcess.of_nobody(coroutine, name)
        task.add_done_callback(self._background_over)
        self._tasks.append(task)
        return task

    def _background_over(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.escaped("the world", task.get_name(), error)

    def roles(self) -> list[SimulatedRole]:
        """All living role processes, machine by machine, in order of start."""
        children = [child for machine in self.machines.values() for child in machine.children.values()]
        return [child for child in children if isinstance(child, SimulatedRole)]

    @property
    def head(self) -> SimulatedHead | None:
        """The living head process."""
        children = self.machines["head"].children.values()
        return next((child for child in children if isinstance(child, SimulatedHead)), None)

    def segments(self, job: str) -> list[Path]:
        """The published versions of a job's weights that lie in the head's memory, by name; no puller's part of one."""
        prefix = f"headrace-{simulated_id(self.root / job)}-v"
        memory = self.machines["head"].host.memory
        return sorted(path for path in memory.glob(f"{prefix}*") if path.name.removeprefix(prefix).isdecimal())

    def tamper(self, tampering: Tampering, *, stop: bool = False) -> None:
        """Let ``tampering`` see what is sent, or no longer."""
        if stop:
            self._tamperings.remove(tampering)
        else:
            self._tamperings.append(tampering)
        self.network.tamper = self._tampered if self._tamperings else None

    def _tampered(self, source: str, frames: list[Frame]) -> list[Frame]:
        for tampering in self._tamperings:
            frames = tampering(source, frames)
        return frames

    # ------------------------------------------------------------ what is known of the jobs

    def _heard(self, source: str, target: str, lane: Lane, frames: list[Frame]) -> None:
        self.trace.message(source, target, lane, frames)
        self.services.heard(frames)

    @property
    def movement(self) -> int:
        """Grows with everything that brings a job on."""
        return self.trace.ledger_events + self._changes

    def record(self, job: str) -> JobRecord:
        return self._records[job]

    def progress_of(self, job: str) -> Callable[[Mapping[str, Any]], None]:
        """A listener to the progress of ``job``."""

        def listen(progress: Mapping[str, Any]) -> None:
            if (state := progress.get("state")) is not None:
                self._states[job] = str(state)
                self._changes += 1
                self.trace.note("job", job=job, state=str(state))
            if "step" in progress:
                self.committed[job] = max(self.committed.get(job, 0), int(progress["step"]))

        return listen

    def is_ready(self) -> bool:
        """Every job's processes are up, or the job is over."""
        head = self.head
        if head is None or head.head is None:
            return False
        runs = head.head.jobs
        return len(runs) == len(self.jobs) and all(
            run.state.over
            or (len(run.tree.supervisors) == _PARTS and all(c.state == "running" for c in run.tree.children()))
            for run in runs.values()
        )

    async def until(self, condition: Callable[[], bool]) -> None:
        """Look again and again until ``condition`` holds; for the world's own tasks, which the run's end ends."""
        while not condition():  # noqa: ASYNC110  what it looks at belongs to code that knows nothing of being watched
            await asyncio.sleep(_LOOK_S)

    def escaped(self, process: str, event: str, error: BaseException | None) -> None:
        """An exception that nobody caught: a finding."""
        self.finding(f"{process}: {event}: {error!r}")

    # ------------------------------------------------------------ the end

    def stop(self) -> None:
        """Switch everything off at once, and close the record."""
        self.over = self.trace.closed = True
        for body in list(self.bodies.values()):
            body.end()
        for task in self._tasks:
            task.cancel()
