"""Rank groups in simulation: whole trainers and workers of several ranks, harmed as planned and by seed."""

from __future__ import annotations

from typing import Any

import pytest

from actors.protocol.weights import Chunk, Manifest
from actors.weights import chunk_server, holding
from actors.weights.manifest import whole_chunk
from supervisors.simulation.runner import Outcome, simulate
from tests.supervisors.simulation.scenarios import rank_groups, scenario, spread_ranks

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


SPREAD: dict[str, Any] = {"name": "a", "steps": 4, "ranks": 4, "trainer_nodes": 2}
"""Two ranks on the head's machine, two on a node."""


def spread(*plan: dict[str, Any], nodes: int = 2) -> tuple[Outcome, list[str]]:
    said: list[str] = []
    outcome = simulate(scenario(jobs=[SPREAD], nodes=nodes, faults={"plan": list(plan)}), 1, said.append)
    return outcome, said


def places(said: list[str]) -> list[str]:
    """Where the trainer's last rank was, one life after another."""
    end = ".a.trainer.rank3"
    words = [word for line in said if " start " in line for word in line.split()]
    return [word.removeprefix("process=").removesuffix(end) for word in words if word.endswith(end)]


def test_a_copy_over_two_machines_comes_to_what_it_comes_to_alone() -> None:
    outcome, said = spread()
    assert outcome.violations == []
    assert len(places(said)) == 1 and places(said) != ["head"]
    alone = simulate(scenario(jobs=[SPREAD | {"ranks": 1, "trainer_nodes": 1}], nodes=2), 1)
    assert outcome.learned == alone.learned


def test_rows_of_two_versions_in_one_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a share sends what it has of the version before, and no puller compares hashes."""
    shares: dict[int, Any] = {}

    def older(manifest: Manifest, view: memoryview, index: int) -> Chunk:
        shares.setdefault(manifest.policy_version, view)
        of_share = manifest.sources[manifest.chunk_sources[index]] != ""
        before = shares.get(manifest.policy_version - 1) if of_share else None
        return whole_chunk(manifest, view if before is None else before, index)

    monkeypatch.setattr(chunk_server, "whole_chunk", older)
    monkeypatch.setattr(holding, "chunk_is_intact", lambda *_: True)
    outcome, _ = spread()
    assert any("with numbers that no trainer laid out" in one for one in outcome.violations)


@pytest.mark.parametrize("kind", ["kill", "preempt"])
def test_a_node_that_ends_or_is_to_go_has_its_part_of_the_copy_taken_by_another_and_nothing_is_learned_otherwise(
    kind: str,
) -> None:
    whole, said = spread()
    (first,) = places(said)
    struck: dict[str, Any] = {"kind": kind, "target": {"node": first}, "after_step": 1}
    outcome, said = spread(struck)
    assert outcome.violations == [] and len(outcome.faults) == 1
    assert outcome.learned == whole.learned
    assert len(places(said)) >= 2 and places(said)[-1] != first
    counted = [line for line in said if "child restarting" in line and "child=trainer" in line]
    assert len(counted) == (kind == "kill"), "a node that is to go is left at no cost"
    for name in ("trainer", "trainer.rank1", "trainer.rank2", "trainer.rank3"):
        assert started(said, name) == len(places(said)), "all ranks start anew together"


def test_no_fixed_seed_breaks_a_promise_of_a_copy_over_several_machines() -> None:
    struck = 0
    for seed in range(6):
        outcome = simulate(spread_ranks(), seed)
        assert outcome.violations == [], f"seed {seed}: {outcome.violations}\n{outcome.report}"
        struck += sum("rank" in fault or "node" in fault for fault in outcome.faults)
    assert struck >= 6


@pytest.mark.long
def test_many_seeds_break_no_promise_of_a_copy_over_several_machines() -> None:
    for seed in range(6, 60):
        outcome = simulate(spread_ranks(), seed)
        assert outcome.violations == [], f"seed {seed}: {outcome.violations}\n{outcome.report}"
