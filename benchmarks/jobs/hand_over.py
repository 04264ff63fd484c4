"""What ends a seeding window: its learned length, or the estimate that the trainer would not have to wait.

    modes × other workers × pace of the trainer ─┬─ scheduling.seeding_end: learned
                                                 └─ scheduling.seeding_end: estimated

    ratio = virtual seconds of the whole job by the learned length / by the estimate

The whole system in virtual time: the real scheduler, workers and trainer over simulated engines and a simulated
optimizer, so every figure is the same in each run and on each machine.
"""

from __future__ import annotations

import argparse
import math
import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from typing import Final, NamedTuple

from benchmarks._command import Result, add_check_option, command_line, show_and_check
from benchmarks._jobs import BenchmarkFailed, hardware
from benchmarks._processes import ROOT
from configs.scenario import Scenario, load_scenario
from supervisors.simulation.runner import simulate

SCENARIO: Final = ROOT / "benchmarks" / "jobs" / "hand_over.yaml"
MODES: Final = ("dynamic", "async")
REMOTE: Final = (1, 2, 3)
TRAIN_TOKEN_S: Final = (0.001, 0.002)
"""Training of a step takes a third, and two thirds, of what all engines take to generate it."""
GOAL_RATIO: Final = 1.0
"""Geometric mean of each mode: the estimate must not cost more than it gives."""


class Case(NamedTuple):
    mode: str
    remote: int
    train_token_s: float
    end: str


def scenario_of(case: Case, steps: int) -> Scenario:
    """The scenario file, as the case wants it."""
    plain = load_scenario(SCENARIO)
    job = {"mode": case.mode, "seeding_end": case.end, "steps": steps}
    values = plain.model_dump() | {"nodes": case.remote}
    values["jobs"] = [plain.jobs[0].model_dump() | job]
    values["costs"] = plain.costs.model_dump() | {"train_token_s": case.train_token_s}
    return Scenario.model_validate(values)


def virtual_seconds(case: Case, steps: int, seed: int) -> float:
    """Raises BenchmarkFailed if anything was lost, trained twice, or otherwise not as promised."""
    outcome = simulate(scenario_of(case, steps), seed)
    if outcome.violations:
        raise BenchmarkFailed(f"{case}: {outcome.violations[0]}")
    return outcome.virtual_seconds


def measure(options: argparse.Namespace) -> Result:
    """All cases, as many at once as there are cores."""
    pairs = list(product(MODES, REMOTE, TRAIN_TOKEN_S))
    cases = [Case(*pair, end) for pair in pairs for end in ("learned", "estimated")]
    with ProcessPoolExecutor() as pool:
        n = len(cases)
        seconds = list(pool.map(virtual_seconds, cases, [options.steps] * n, [options.seed] * n))
    found = [
        {
            "mode": mode, "remote": remote, "train_token_s": train_token_s,
            "learned_s": learned, "estimated_s": estimated, "ratio": round(learned / estimated, 3),
        }
        for (mode, remote, train_token_s), learned, estimated in zip(pairs, seconds[::2], seconds[1::2], strict=True)
    ]  # fmt: skip
    return {"benchmark": "hand_over", "hardware": hardware(), "steps": options.steps, "cases": found, **judged(found)}


def judged(found: list[Result]) -> Result:
    """The mean ratio of each mode, and goals that were not met, in sentences."""
    ratios: dict[str, float] = {}
    for mode in MODES:
        logs = [math.log(one["ratio"]) for one in found if one["mode"] == mode]
        ratios[f"{mode}_ratio"] = round(math.exp(sum(logs) / len(logs)), 3)
    missed = [f"{name}: {ratio}, the goal is {GOAL_RATIO}" for name, ratio in ratios.items() if ratio < GOAL_RATIO]
    return ratios | {"missed": missed}


def parse(args: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = command_line("hand_over", __doc__)
    parser.add_argument("--steps", type=int, default=18)
    parser.add_argument("--seed", type=int, default=1)
    add_check_option(parser)
    return parser.parse_args(args)


def main(args: list[str]) -> int:
    """Measure and print; with ``--check`` hold the means against their goal."""
    options = parse(args)
    return show_and_check(measure(options), options, _print_table)


def _print_table(result: Result) -> None:
    print(f"{'mode':<10} {'others':>6} {'train, s/token':>15} {'learned, s':>11} {'estimated, s':>13} {'ratio':>6}")
    for one in result["cases"]:
        row = f"{one['mode']:<10} {one['remote']:>6} {one['train_token_s']:>15} {one['learned_s']:>11.1f}"
        print(f"{row} {one['estimated_s']:>13.1f} {one['ratio']:>6.3f}")
    print(", ".join(f"{mode}: {result[f'{mode}_ratio']:.3f}" for mode in MODES))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
