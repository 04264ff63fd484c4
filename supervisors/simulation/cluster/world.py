"""A cluster on one virtual-time loop: machines, their processes, the network between them, faults and checks.

    World.start ─▶ machines ─▶ head process (Head, JobRun, supervisors, scheduler, ledger, job)   ┐ each a process of
                           └─▶ node processes (NodeAgent, Membership) ─▶ role processes           ┘ its own on one loop
                ─▶ nemesis: faults as planned       ─▶ watchman: over? too late? no progress?

A run ends when its jobs are over, when no job advances for ``stall_s``, or ``finish_within_s`` after the last fault.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from actors.weights.segments import simulated_id
from configs.run_files import JOB_FILE
from configs.scenario import Scenario
from supervisors.providers.function_book import KIND as FUNCTION
from supervisors.providers.replay import Replay, planned
from supervisors.providers.simulated import SimulatedProvider, SwitchedOff
from supervisors.simulation.cluster.context import DATA_FILE, END_TOKEN, SimulationContext
from supervisors.simulation.cluster.machine import SimulatedHead, SimulatedMachine, SimulatedRole
from supervisors.simulation.cluster.main_process import MachineMain, MainProcess, NodeMain
from transport.sim.loop import SimulatedLoop

_PARTS: Final = 3
"""Number of a job's supervisors: core, services, rollout."""


class World(SimulationContext):
    """Runs the machines of one simulated run, from ``start`` to ``stop``."""

    def __init__(
        self, scenario: Scenario, seed: int, root: Path, loop: SimulatedLoop, show: Callable[[str], None] | None = None
    ) -> None:
        super().__init__(scenario, seed, root, loop, show)
        self.machines: dict[str, SimulatedMachine] = {}
        self.mains: dict[str, MainProcess] = {}
        """The living main process of each machine."""
        self.over = False
        self.struck: list[str] = []
        """Descriptions of the faults, in the order in which they struck."""

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
            (self.root / job.name / JOB_FILE).write_text(job.model_dump_json(), encoding="utf-8")  # JSON is YAML, too
        self._start_main("head")
        for name in names[1:]:
            self._start_main(name)

    def _start_main(self, name: str, *, resume: bool = False) -> None:
        machine = self.machines[name]
        if name != "head":
            self.mains[name] = NodeMain(self, machine, name, self._main_ended)
            return
        jobs = [job for job in self.jobs if not self._records[job.name].summary]
        functions = self.provider() if jobs[0].provider.kind == "functions" else None
        self.mains[name] = MachineMain(self, machine, jobs, self._main_ended, resume=resume, functions=functions)

    def _main_ended(self, process: MainProcess, code: int) -> None:
        name = process.machine.name
        self.mains.pop(name, None)
        if self.over:
            return
        if name == "head" and self.all_over:
            self.over = True
            return
        returns_s = self.scenario.head_returns_s if name == "head" else self.scenario.node_returns_s
        if returns_s is not None:
            self.in_background(self._bring_back(name, returns_s), f"bring back {name}")

    async def _bring_back(self, name: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        if not self.over:
            self._start_main(name, resume=True)

    def provider(self, windows: Mapping[str, float] | None = None) -> SimulatedProvider:
        """A provider of this world's machines. ``windows``: node → seconds that it stays up after its notice."""
        return SimulatedProvider(SpotGrid(self, windows), close_window_s=self.scenario.limits.stop_timeout_s)

    def jobs_are_over(self) -> None:
        """End the head that served, as its operator would."""
        if (main := self.mains.get("head")) is not None:
            main.terminate()

    def roles(self) -> list[SimulatedRole]:
        """All living role processes, machine by machine, in order of start."""
        children = [child for machine in self.machines.values() for child in machine.children.values()]
        return [child for child in children if isinstance(child, SimulatedRole)]

    @property
    def head(self) -> SimulatedHead | None:
        return self.machines["head"].head

    def segments(self, job: str) -> list[Path]:
        """Published versions of a job's weights in the head's memory, by name, without pullers' partial ones."""
        prefix = f"headrace-{simulated_id(self.root / job)}-v"
        memory = self.machines["head"].host.memory
        return sorted(path for path in memory.glob(f"{prefix}*") if path.name.removeprefix(prefix).isdecimal())

    def is_ready(self) -> bool:
        """Whether every job's processes are up, or the job is over."""
        head = self.head
        if head is None or head.head is None:
            return False
        runs = head.head.jobs
        return len(runs) == len(self.jobs) and all(
            run.state.over
            or (len(run.tree.supervisors) == _PARTS and all(c.state == "running" for c in run.tree.children()))
            for run in runs.values()
        )

    def stop(self) -> None:
        """Switch everything off at once, and close the trace."""
        self.over = self.trace.closed = True
        for body in list(self.bodies.values()):
            body.end()
        for task in self._tasks:
            task.cancel()


class SpotGrid:
    """Implements ``supervisors.providers.simulated.Grid``."""

    def __init__(self, world: World, windows: Mapping[str, float] | None = None) -> None:
        """``windows``: node → seconds that it stays up after its notice."""
        self._world = world
        self._windows = windows or {}
        self._told: dict[str, SwitchedOff] = {}
        self._rng = world.rng("spot grid")

    def switch_on(self, node: str, kind: str, on_end: SwitchedOff) -> None:
        """Boot a machine, which takes as long as a process takes to start."""
        self._told[node] = on_end
        low, high = self._world.scenario.costs.start_s
        self._world.in_background(self._boot(node, kind, self._rng.uniform(low, high)), f"boot {node}")

    async def _boot(self, node: str, kind: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        world = self._world
        if node in self._told and not world.over:
            window_s = self._windows.get(node, 0.0)
            slots = 1 if kind == FUNCTION else world.scenario.slots
            machine = world.machines.get(node)  # may exist: a resumed run numbers its functions anew
            if machine is None:
                machine = SimulatedMachine(world, node, world.root / node, slots, kind, window_s)
            world.machines[node] = machine
            world.mains[node] = NodeMain(world, machine, node, self._main_ended)

    def tell_to_go(self, node: str) -> None:
        main = self._world.mains.get(node)
        if main is None:
            self._gone(node)  # it was still booting
        else:
            main.terminate()

    def switch_off(self, node: str) -> None:
        main = self._world.mains.get(node)
        if main is None:
            self._gone(node)
        else:
            main.lose_power()

    def _main_ended(self, main: MainProcess, code: int) -> None:
        self._gone(main.machine.name)

    def _gone(self, node: str) -> None:
        self._world.mains.pop(node, None)
        told = self._told.pop(node, None)
        if told is not None:
            told(node)


async def replay_in(world: World) -> None:
    """Replay the scenario's trace, once all its jobs are ready."""
    spot = world.scenario.spot
    trace = planned(spot)
    provider = world.provider(trace.windows())
    await world.until(world.is_ready)
    replay = Replay(
        trace,
        provider,
        target=spot.nodes_max,
        on_event=lambda event: world.trace.note("spot", node=event.node, event=event.what, priced=event.kind),
    )
    await replay.run()
