"""The head is killed while workers generate: what they make meanwhile is used, exactly where it belongs."""

from __future__ import annotations

from typing import Any

import pytest

from configs.scenario import Scenario
from supervisors.simulation import runner
from supervisors.simulation.cluster.world import World
from supervisors.simulation.runner import simulate
from tests.supervisors.simulation.scenarios import scenario


@pytest.fixture
def worlds(monkeypatch: pytest.MonkeyPatch) -> list[World]:
    """The worlds of all simulations of the test."""
    made: list[World] = []

    class Kept(World):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

    monkeypatch.setattr(runner, "World", Kept)
    return made


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_workers_go_on_while_the_head_is_away_and_their_tokens_are_used(worlds: list[World], mode: str) -> None:
    """Killed three times in mid-step; long responses, so that nobody runs out of work meanwhile."""
    job = {"name": "a", "steps": 3, "mode": mode, "max_tokens": 400, "mean_tokens": 400}
    kills = [{"kind": "kill", "target": {"role": "head"}, "at_s": at_s} for at_s in (2.0, 6.0, 9.0)]
    outcome = simulate(scenario(jobs=[job], faults={"plan": kills}), 5)
    assert outcome.violations == [], outcome.violations
    assert len(outcome.faults) == 3
    [world] = worlds
    went_on = [row for row in world.record("a").events if row["event"] == "worker_went_on"]
    taken_up = [row for row in world.record("a").events if row["event"] == "samples_taken_up"]
    alone, used = (sum(row[key] for row in went_on) for key in ("generated_alone", "tokens"))
    assert sum(row["samples"] for row in taken_up) == sum(row["samples"] for row in went_on) > 0
    assert used >= alone > 30, "what the journal had lost comes on top"
    print(f"{mode}: {alone} tokens generated without a head, {used} told to the next ones and used")


def test_with_the_same_seed_the_same_is_learned_with_and_without_deaths_of_the_head() -> None:
    job = {"name": "a", "steps": 3, "max_tokens": 200, "mean_tokens": 200}
    kills = [{"kind": "kill", "target": {"role": "head"}, "at_s": at_s} for at_s in (2.0, 5.0)]
    calm = simulate(scenario(jobs=[job]), 5)
    assert simulate(scenario(jobs=[job], faults={"plan": kills}), 5).learned == calm.learned


def heads() -> Scenario:
    """Two jobs with long responses, and a head that is seldom left in peace."""
    jobs = [
        {"name": "strict", "steps": 3, "max_tokens": 60, "mean_tokens": 50},
        {"name": "ahead", "mode": "async", "steps": 4, "max_running": 4, "prompts_per_step": 3, "max_tokens": 60,
         "mean_tokens": 50, "in_flight": "keep"},
    ]  # fmt: skip
    faults = {
        "faults": [3, 8],
        "kinds": ["kill", "kill", "hang", "partition", "drop", "delay", "duplicate"],
        "roles": ["head", "head", "head", "rollout", "trainer"],
    }
    return scenario(jobs=jobs, jobs_at_once=[1, 2], nodes=2, faults={"random": faults})


@pytest.mark.parametrize("seed", [10, *range(1, 8)])
def test_a_head_that_is_seldom_left_in_peace_loses_nothing(seed: int) -> None:
    """Seed 10: a link of head and node agent broke for a moment, and 30 s later the agent ended what it ran."""
    outcome = simulate(heads(), seed)
    assert outcome.violations == [], [*outcome.faults, *outcome.violations]


def test_a_node_that_comes_back_late_does_not_keep_what_runs_elsewhere_by_now(worlds: list[World]) -> None:
    """Cut off when the head is killed, for longer than the next one waits for nodes: its worker is one too many."""
    job = {"name": "a", "steps": 60, "workers": 1, "place_rollout": "remote"}
    faults = [
        {"kind": "partition", "target": {"link": ["head", "node-1"]}, "at_s": 3.0, "heal_after_s": 18.0},
        {"kind": "kill", "target": {"role": "head"}, "at_s": 3.0},
    ]
    said: list[str] = []
    outcome = simulate(scenario(jobs=[job], nodes=2, faults={"plan": faults}), 5, said.append)
    assert outcome.violations == [], outcome.violations
    told = [row for row in worlds[0].record("a").events if row["event"] == "worker_registered"]
    assert [row["node"] for row in told] == ["node-1", "node-2"]
    [joined_s] = [float(line.split()[0]) for line in said if "node joined" in line and "node-1" in line][1:]
    [ended_s] = [float(line.split()[0]) for line in said if " exit " in line and "node-1.a.rollout-0" in line]
    assert 0 < ended_s - joined_s < 1.0


def test_a_head_that_is_killed_goes_on_with_all_of_its_jobs(worlds: list[World]) -> None:
    """Its locks on their directories went with it."""
    jobs = [{"name": name, "steps": 3} for name in ("a", "b")]
    kill = {"kind": "kill", "target": {"role": "head"}, "at_s": 3.0}
    outcome = simulate(scenario(jobs=jobs, faults={"plan": [kill]}), 1)
    assert (len(outcome.faults), outcome.violations) == (1, []), outcome.report
    assert set(worlds[0].committed.values()) == {3}
