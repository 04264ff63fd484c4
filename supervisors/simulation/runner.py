"""Runs one seed of a scenario, from an empty directory to a verdict.

simulate(scenario, seed) ─▶ World on a SimulatedLoop, guarded, without logs ─▶ checks ─▶ Outcome
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import gc
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Generator, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import structlog

from actors.weights.segments import segment_directory
from configs.scenario import FaultsConfig, RandomFaults, Scenario
from supervisors.jobs.role_processes import ranks_of
from supervisors.simulation.cluster.world import World, replay_in
from supervisors.simulation.faults.nemesis import Nemesis
from supervisors.simulation.faults.operator import Operator
from supervisors.simulation.faults.plan import EPISODE_MOMENTS, RANK_MOMENTS, SERVICE_MOMENTS, DrawnFault, drawn_faults
from supervisors.simulation.records.published import EXACT_MODES
from supervisors.simulation.verdicts.verdict import judge, learned
from supervisors.simulation.verdicts.watchman import Watchman
from transport.sim.guards import guarded
from transport.sim.loop import SimulatedLoop, SimulationDeadlock

Show = Callable[[str], None]
_PREFIX: Final = "headrace-sim-"
_SETTLED_S: Final = 60.0
"""Age in seconds from which a directory is surely locked if it is in use."""


@dataclass(frozen=True)
class Outcome:
    """Holds the result of one seed."""

    seed: int
    hash: str
    violations: list[str]
    virtual_seconds: float
    seconds: float
    events: int
    faults: list[str]
    """Descriptions of the faults that struck, in order."""
    report: str = ""
    """Report on who waited for whom; empty: the run was not given up."""
    learned: dict[str, str] = field(default_factory=dict[str, str])
    """Job → hash of its newest weights and its samples. In sync mode no fault changes it."""


def simulate(scenario: Scenario, seed: int, show: Show | None = None) -> Outcome:
    """Run ``scenario`` under ``seed``. ``show`` is given a line for each event, with its virtual time."""
    began_s = time.perf_counter()
    outcome = _simulated(scenario, seed, show)
    if scenario.services is not None and not outcome.violations:
        outcome.violations.extend(_differences(outcome, _simulated(_without_services(scenario), seed, None), scenario))
    return dataclasses.replace(outcome, seconds=time.perf_counter() - began_s)


def _without_services(scenario: Scenario) -> Scenario:
    """The same jobs, each with a trainer of its own, without faults."""
    none = {"service": None}
    return scenario.model_copy(
        update={
            "jobs": [job.model_copy(update=none) for job in scenario.jobs],
            "variants": [variant.model_copy(update=none) for variant in scenario.variants],
            "services": None,
            "faults": FaultsConfig(),
        }
    )


def _differences(shared: Outcome, alone: Outcome, scenario: Scenario) -> list[str]:
    """Violations of the run without services, and jobs in ``EXACT_MODES`` whose results differ from it."""
    exact = [job.name for job in scenario.jobs if job.mode in EXACT_MODES and job.name in alone.learned]
    return [
        *(f"without services: {violation}" for violation in alone.violations),
        *(
            f"{job}: it shares a training service, and has come to other weights or samples than alone"
            for job in exact
            if shared.learned[job] != alone.learned[job]
        ),
    ]


def _simulated(scenario: Scenario, seed: int, show: Show | None) -> Outcome:
    began_s = time.perf_counter()
    loop = SimulatedLoop(seed)
    with directory() as root, _unmanaged_memory(), _logs_go_to(show, loop):
        world = World(scenario, seed, root, loop, show)
        report = _run(world, loop)
        violations = [*world.findings, *judge(world)]
        if report:
            violations.insert(0, report.partition("\n")[0])
        return Outcome(
            seed=seed,
            hash=world.trace.hash,
            violations=violations,
            virtual_seconds=round(loop.time(), 6),
            seconds=time.perf_counter() - began_s,
            events=world.trace.events,
            faults=world.struck,
            report=report,
            learned={job.name: learned(world, job) for job in world.jobs},
        )


@contextlib.contextmanager
def directory() -> Generator[Path]:
    """A locked directory in shared memory, removed at the end, as are those that killed simulations have left."""
    root = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=segment_directory()))
    lock = os.open(root, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # always free: others leave a directory this young alone
        settled_s = root.stat().st_mtime - _SETTLED_S
        for left in root.parent.glob(f"{_PREFIX}*"):
            if left != root:
                _remove_if_abandoned(left, settled_s)
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)
        os.close(lock)


def _remove_if_abandoned(left: Path, settled_s: float) -> None:
    """Remove ``left`` if it is unlocked and old: a process that has just made its own may not have locked it yet."""
    try:
        lock = os.open(left, os.O_RDONLY)
    except OSError:  # its owner removed it first, or is another user
        return
    try:
        if os.fstat(lock).st_mtime < settled_s:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left, ignore_errors=True)
    except BlockingIOError:  # it is in use
        return
    finally:
        os.close(lock)


def _run(world: World, loop: SimulatedLoop) -> str:
    """Run to the end; returns the report on who waited for whom if the run was given up, else an empty string."""
    scenario = world.scenario
    drawn: list[DrawnFault] = []
    if scenario.faults.random is not None:
        further = 2 * SERVICE_MOMENTS if scenario.services is not None else ()
        further += 2 * EPISODE_MOMENTS if any(job.turns_max for job in scenario.jobs) else ()
        ranks = any(ranks_of(job, role) > 1 for job in world.jobs for role in ("trainer", "rollout"))
        further += 2 * RANK_MOMENTS if ranks else ()
        drawn = drawn_faults(
            scenario.faults.random, world.rng("faults"), nodes=scenario.nodes, ranks=ranks, further=further
        )
    nemesis = Nemesis(world, scenario.faults.plan, drawn)
    operator = Operator(world, scenario.faults.random or RandomFaults())
    watchman = Watchman(world, lambda: nemesis.active or operator.active)
    loop.set_exception_handler(lambda _, context: _unhandled(world, context))
    main = loop.create_task(_main(world, nemesis, operator, watchman), name="world")
    try:
        with guarded() as breaches:
            loop.run_until_complete(main)
        report = watchman.report
        world.findings += [f"guard: {breach}" for breach in dict.fromkeys(breaches)]
    except SimulationDeadlock as deadlock:
        report = f"deadlock: {deadlock}"
    finally:
        _dismantle(world, loop)
    return report


async def _main(world: World, nemesis: Nemesis, operator: Operator, watchman: Watchman) -> None:
    world.start()
    if world.scenario.spot.trace is not None:
        world.in_background(replay_in(world), "replay of the spot trace")
    nemesis.start()
    operator.start()
    await watchman.watch()
    world.stop()


def _dismantle(world: World, loop: SimulatedLoop) -> None:
    """Stop all that runs, and free it silently."""
    loop.set_exception_handler(lambda _, __: None)
    world.stop()
    loop.dismantle()


def _unhandled(world: World, context: dict[str, Any]) -> None:
    error = context.get("exception")
    process = getattr(context.get("task") or context.get("future"), "process", None)
    name = process.name if process is not None else "the loop"
    task = context.get("task")
    what = f"task {task.get_name()}: " if isinstance(task, asyncio.Task) else ""
    world.escaped(name, what + str(context.get("message", "unhandled")), error)


@contextlib.contextmanager
def _unmanaged_memory() -> Generator[None]:
    """Run without garbage collection: its times depend on what ran before, and it may run code of dead objects."""
    enabled = gc.isenabled()
    gc.collect(0)  # frees the previous run, which is still in the youngest generation
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _logs_go_to(show: Show | None, loop: SimulatedLoop) -> Generator[None]:
    """Give the product's log lines to ``show``, with virtual time; drop them without it."""
    before = structlog.get_config() if structlog.is_configured() else None

    def write(_: Any, level: str, fields: MutableMapping[str, Any]) -> Any:
        if show is not None and not loop.is_closed():
            text = " ".join(f"{name}={value}" for name, value in fields.items() if name not in ("event", "exc_info"))
            show(f"{loop.time():10.4f}  {level:<8} {fields.get('event')}  {text}")
        raise structlog.DropEvent

    structlog.configure(
        processors=[write],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO if show is not None else logging.CRITICAL),
        cache_logger_on_first_use=False,
    )
    quiet = logging.getLogger("asyncio")
    level = quiet.level
    quiet.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        quiet.setLevel(level)
        structlog.reset_defaults()
        if before is not None:
            structlog.configure(**before)
