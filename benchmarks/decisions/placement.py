"""What a decision about all jobs takes: 200 jobs, 50 services with three places each.

    filled    all jobs wait and have a profile: as many are placed as have room
    full      150 are placed and 50 wait: nobody has room, and each is told why
    cold      none has a profile: 50 run alone, 150 wait
    tight     full, and every service refuses for the predicted slowdown alone, the dearest of all reasons

Each for every policy, as the head would ask; milliseconds, the median and the worst of several draws.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Final, get_args

from actors.policies.sharing.job_profile import UNKNOWN, JobProfile
from actors.policies.sharing.placement import decide
from actors.policies.sharing.placement_view import JobView, PlacementPolicy, PlacementRules, PlacementView, ServiceView
from benchmarks._command import Result, command_line, show
from benchmarks._jobs import hardware

GOALS: Final = {"worst_ms": 50.0}
PLACES: Final = 3
GB: Final = 1_000_000_000


def main(arguments: Sequence[str]) -> int:
    parser = command_line("placement", __doc__)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--services", type=int, default=50)
    parser.add_argument("--draws", type=int, default=5)
    options = parser.parse_args(arguments)
    figures: dict[str, dict[str, float]] = {}
    for policy in get_args(PlacementPolicy):
        rules = PlacementRules(policy, quotas={})
        draws = [measure(rules, options.jobs, options.services, Random(seed)) for seed in range(options.draws)]
        figures |= {
            f"{policy}.{case}": {
                "median_ms": round(statistics.median(draw[case] for draw in draws), 2),
                "worst_ms": round(max(draw[case] for draw in draws), 2),
            }
            for case in draws[0]
        }
    worst = max(one["worst_ms"] for one in figures.values())
    result: Result = {"benchmark": "placement", "hardware": hardware(), "goals": GOALS, "worst_ms": worst}
    show(result | {"decisions": figures}, options, lambda _: _print_table(figures, worst))
    return 0


def _print_table(figures: dict[str, dict[str, float]], worst: float) -> None:
    for name, one in figures.items():
        print(f"{name:24} {one['median_ms']:8.2f} ms, at worst {one['worst_ms']:8.2f} ms")
    print(f"{'worst of all':24} {worst:8.2f} ms   goal {GOALS['worst_ms']:g}")


def measure(rules: PlacementRules, jobs: int, services: int, rng: Random) -> dict[str, float]:
    """Milliseconds of one decision in each case."""
    there = [ServiceView(f"train-{i}", 80 * GB, 200 * GB, PLACES) for i in range(services)]
    waiting = [_job(i, rng) for i in range(jobs)]
    placed = [replace(one, on=f"train-{i % services}") for i, one in enumerate(waiting[: PLACES * services])]
    full = [*placed, *waiting[len(placed) :]]
    cold = [replace(one, profile=UNKNOWN) for one in waiting]
    regular = [_regular(one, 0.25) for one in full[: 2 * services]]
    tight = [*regular, *(_regular(one, 0.25, period_s=61.0) for one in waiting[2 * services :])]
    cases = {"filled": waiting, "full": full, "cold": cold, "tight": tight}
    return {name: _milliseconds(rules, PlacementView(there, some)) for name, some in cases.items()}


def _milliseconds(rules: PlacementRules, view: PlacementView) -> float:
    began_s = time.process_time()
    decide(rules, view)
    return (time.process_time() - began_s) * 1000


def _job(number: int, rng: Random) -> JobView:
    period_s, duty = rng.uniform(30.0, 600.0), rng.uniform(0.05, 0.4)
    busy_s = period_s * duty
    profile = JobProfile(9, period_s, busy_s, 1.2 * busy_s, rng.uniform(0.0, 0.3) * period_s, 1.0, rng.uniform(0, 1e4))
    return JobView(
        f"job-{number}",
        rng.randrange(5 * GB, 70 * GB),
        project=f"project-{number % 8}",
        priority=rng.randrange(3),
        submitted=float(number),
        profile=profile,
        remaining_s=rng.uniform(1e3, 1e6),
    )


def _regular(job: JobView, duty: float, *, period_s: float = 60.0) -> JobView:
    """A small job without jitter, whose phase counts."""
    busy_s = duty * period_s
    profile = replace(
        job.profile, period_s=period_s, busy_s=busy_s, busy_p90_s=2.5 * busy_s, jitter_s=0.0, burst_at_s=job.submitted
    )
    return replace(job, profile=profile, state_bytes=GB)
