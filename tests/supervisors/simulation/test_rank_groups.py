"""Rank groups in simulation: whole trainers and workers of several ranks, harmed as planned and by seed."""

from __future__ import annotations

from typing import Any

import pytest

from supervisors.simulation.runner import Outcome, simulate
from tests.supervisors.simulation.scenarios import rank_groups, scenario

JOB: dict[str, Any] = {"name": "a", "steps": 4, "ranks": 3, "tensor_parallel": 2}


def run(**faults: Any) -> tuple[Outcome, list[str]]:
    said: list[str] = []
    plan = [{"target": {"name": name}, "after_step": 1, **fault} for name, fault in faults.items()]
    return simulate(scenario(jobs=[JOB], faults={"plan": plan}), 1, said.append), said


def started(said: list[str], child: str) -> int:
    return sum("child started" in line and f"child={child} " in line for line in said)


def test_a_trainer_and_workers_of_several_ranks_come_to_what_they_come_to_alone() -> None:
    outcome, said = run()
    assert outcome.violations == []
    for name in ("trainer", "trainer.rank1", "trainer.rank2", "rollout-0", "rollout-0.rank1", "rollout-1.rank1"):
        assert started(said, name) == 1
    alone = simulate(scenario(jobs=[JOB | {"ranks": 1, "tensor_parallel": 1}]), 1)
    assert outcome.learned == alone.learned


@pytest.mark.parametrize("name", ["trainer", "trainer.rank1", "trainer.rank2", "rollout-1", "rollout-1.rank1"])
@pytest.mark.parametrize("kind", ["kill", "hang"])
def test_the_end_of_a_rank_restarts_its_group_once_and_no_other_process(name: str, kind: str) -> None:
    whole, _ = run()
    outcome, said = run(**{name: {"kind": kind}})
    assert outcome.violations == [] and len(outcome.faults) == 1
    assert outcome.learned == whole.learned
    group = name.partition(".")[0]
    for other in ("trainer", "trainer.rank1", "trainer.rank2", "rollout-0", "rollout-1", "rollout-1.rank1", "weights"):
        assert started(said, other) == 1 + (other.partition(".")[0] == group), other
    assert sum("child restarting" in line for line in said) == 1


def test_a_rank_that_is_cut_off_for_a_moment_or_slow_costs_time_alone() -> None:
    outcome, said = run(**{
        "trainer.rank1": {"kind": "partition", "heal_after_s": 1.0},
        "rollout-0.rank1": {"kind": "slow", "factor": 4.0, "heal_after_s": 5.0},
    })  # fmt: skip
    assert outcome.violations == [] and len(outcome.faults) == 2
    assert not any("child restarting" in line for line in said)


@pytest.mark.slow
def test_no_fixed_seed_breaks_a_promise_of_rank_groups() -> None:
    struck = 0
    for seed in range(8):
        outcome = simulate(rank_groups(), seed)
        assert outcome.violations == [], f"seed {seed}: {outcome.violations}\n{outcome.report}"
        struck += sum("rank" in fault for fault in outcome.faults)
    assert struck >= 8


@pytest.mark.long
def test_many_seeds_break_no_promise_of_rank_groups() -> None:
    for seed in range(8, 60):
        outcome = simulate(rank_groups(), seed)
        assert outcome.violations == [], f"seed {seed}: {outcome.violations}\n{outcome.report}"
