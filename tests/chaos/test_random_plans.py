"""Short runs, each with a random plan: all finish, nothing is lost, nothing twice, whatever was hit and when.

``HEADRACE_CHAOS_RUNS`` says how many (``make chaos``: 100), ``HEADRACE_CHAOS_FIRST`` with which seed they begin.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from random_plans import STEPS, has_ranks, random_job, random_plan
from small_job import SMALL_JOB, simulated_job

from configs.fault_plan import FaultPlan
from supervisors.testing.run_under_test import HeadraceRun

FIRST = int(os.environ.get("HEADRACE_CHAOS_FIRST", "0"))
RUNS = int(os.environ.get("HEADRACE_CHAOS_RUNS", "10"))


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", range(FIRST, FIRST + RUNS))
def test_a_run_with_a_random_plan_finishes_and_keeps_every_promise(
    headrace_run: Callable[..., HeadraceRun], small_model: Path, tmp_path: Path, seed: int
) -> None:
    """Two of four on simulated engines and trainer; of the others also what is computed may be hit."""
    sections = {
        "steps": STEPS,
        "seed": seed,
        "checkpoint": {"every": 7, "keep": 1000},
        **random_job(seed, tmp_path / "machines.csv"),
    }
    real = SMALL_JOB | {"model": {"source": "hf", "path": str(small_model)}}
    job = real | sections if seed % 4 >= 2 or has_ranks(seed) else simulated_job(small_model, **sections)
    faults = random_plan(seed)
    run = headrace_run(job, faults=faults, seed=seed)
    summary = run.finish(timeout_s=380)
    assert (summary["prompts_lost"], summary["samples_trained_twice"]) == (0, 0)
    told = summary["faults"]
    assert told["failed"] == 0, run.events("fault_failed")
    assert told["injected"] + told["skipped"] == len(faults)


def test_random_jobs_have_every_mode_with_and_without_a_seeding_window(tmp_path: Path) -> None:
    drawn = [random_job(seed, tmp_path / "machines.csv") for seed in range(40)]
    kinds = {(job["sync"]["mode"], job.get("cluster", {}).get("place_rollout", "")) for job in drawn}
    assert kinds == {(mode, place) for mode in ("sync", "async") for place in ("", "local", "elastic")}
    assert drawn[:4] == [random_job(seed, tmp_path / "machines.csv") for seed in range(4)]


def test_random_plans_fit_the_vocabulary_and_repeat() -> None:
    kinds: set[str] = set()
    for seed in range(200):
        plan = FaultPlan.model_validate({"faults": random_plan(seed)})
        assert 2 <= len(plan.faults) <= 4
        kinds |= {fault.kind for fault in plan.faults}
        hits = [fault for fault in plan.faults if fault.target.role == "rank"]
        assert bool(hits) is has_ranks(seed)
        assert random_plan(seed) == random_plan(seed)
    assert kinds == {"kill", "hang", "partition", "drop", "corrupt", "disk_full", "preempt"}
