"""Runs many seeds of one scenario, one after the other or in several processes, and tallies the failures.

run_seeds ─▶ simulate, seed by seed ─▶ Tally          processes > 1: ``headrace simulate`` on a part of the seeds each
"""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.scenario import Scenario, load_scenario
from supervisors.providers.replay import planned
from supervisors.simulation.runner import Outcome, simulate
from transport.errors import HeadraceError

SEEDS_MAX = 1_000_000
_LINE_MAX_BYTES = 64 << 20


class SimulationFailed(HeadraceError):
    """A process that ran a part of the seeds ended without a result; its messages went to stderr."""


@dataclass
class Tally:
    """Counts the results of many seeds."""

    seeds: int = 0
    violations: int = 0
    failing: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    seconds: float = 0.0

    def add(self, outcome: Outcome, replay: str) -> None:
        """Count one more seed."""
        self.seeds += 1
        self.violations += len(outcome.violations)
        if outcome.violations:
            self.failing.append({"seed": outcome.seed, "violation": outcome.violations[0], "replay": replay})

    def join(self, other: dict[str, Any]) -> None:
        """Add the tally of another process."""
        self.seeds += int(other["seeds"])
        self.violations += int(other["violations"])
        self.failing = sorted([*self.failing, *other["failing"]], key=lambda failed: failed["seed"])

    def as_map(self) -> dict[str, Any]:
        """The object with which ``simulate --seeds --json`` ends."""
        return {
            "seeds": self.seeds,
            "violations": self.violations,
            "failing": self.failing,
            "seconds": round(self.seconds, 3),
        }


def replay_command(scenario: Path, seed: int) -> str:
    """The command that replays one seed."""
    return f"headrace simulate {shlex.quote(str(scenario))} --seed {seed}"


def load_whole(path: Path) -> Scenario:
    """The scenario at ``path``, after a check of the trace that it names.

    Raises:
        ConfigError: the scenario file, or the trace that it names, cannot be read or is malformed.
    """
    scenario = load_scenario(path)
    if scenario.spot.trace is not None:
        planned(scenario.spot)
    return scenario


def run_seeds(path: Path, seeds: range, on_outcome: Callable[[Outcome], None]) -> Tally:
    """Run ``seeds`` in this process; ``on_outcome`` is told each outcome.

    Raises:
        ConfigError: as ``load_whole``.
    """
    scenario, tally, began_s = load_whole(path), Tally(), time.perf_counter()
    for seed in seeds:
        outcome = simulate(scenario, seed)
        tally.add(outcome, replay_command(path, seed))
        on_outcome(outcome)
    tally.seconds = time.perf_counter() - began_s
    return tally


async def run_seeds_in_processes(path: Path, seeds: range, processes: int) -> Tally:
    """Share ``seeds`` among processes, which inherit stderr.

    Raises:
        ConfigError: as ``load_whole``.
        SimulationFailed: a process gave no result.
    """
    load_whole(path)  # reports a bad file once, not once for each process
    tally, began_s = Tally(), time.perf_counter()
    share = -(-len(seeds) // processes)
    parts = [seeds[start : start + share] for start in range(0, len(seeds), share)]
    for result in await asyncio.gather(*(_run_part(path, part) for part in parts)):
        tally.join(result)
    tally.seconds = time.perf_counter() - began_s
    return tally


async def _run_part(path: Path, part: range) -> dict[str, Any]:
    command = [sys.executable, "-P", "-m", "main", "simulate", str(path), "--seeds", f"{part[0]}..{part[-1]}", "--json"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, limit=_LINE_MAX_BYTES)
    try:
        out, _ = await process.communicate()  # as long as the seeds take; Ctrl-C ends it
    finally:
        if process.returncode is None:
            process.kill()
    lines = out.splitlines()
    if not lines or process.returncode not in (0, 1):
        raise SimulationFailed(f"{shlex.join(command)} ended with exit code {process.returncode} and no result")
    return json.loads(lines[-1])
