"""``scheduling.seeding``, the whole system in virtual time: the trainer's machine generates, then it trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from actors.fleet.modes.seeding_estimate import SeedingEstimate
from actors.fleet.scope import JobScope
from actors.rollout.engine import StepOutput
from actors.trainer.backend import LossSpec, MicroBatch, MicroBatchStats
from configs.scenario import Scenario
from supervisors.pool.node_workers import NodeWorkers
from supervisors.simulation.cluster.roles import PacedBackend, PacedEngine
from supervisors.simulation.runner import Outcome, simulate
from tests.supervisors.simulation.scenarios import scenario

COSTS = {"engine_step_s": 0.2, "micro_batch_s": 0.3, "train_step_s": 0.5, "load_s": 0.1}


@dataclass
class Seen:
    windows: list[dict[str, Any]] = field(default_factory=list)
    ran_dry: int = 0
    generating: int = 0
    training: int = 0
    both: int = 0
    """How often the trainer's machine began one while it did the other."""

    @contextmanager
    def now(self, what: str) -> Iterator[None]:
        setattr(self, what, getattr(self, what) + 1)
        self.both += bool(self.generating and self.training)
        try:
            yield
        finally:
            setattr(self, what, getattr(self, what) - 1)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    noted, record, step, accumulate = Seen(), JobScope.record, PacedEngine.step, PacedBackend.accumulate

    def noting_record(self: JobScope, name: str, **fields: Any) -> None:
        if name == "seeding_window":
            noted.windows.append(fields)
        noted.ran_dry += name == "trainer_ran_dry"
        record(self, name, **fields)

    async def noting_step(self: PacedEngine) -> StepOutput:
        if not self._life.name.startswith("head."):
            return await step(self)
        with noted.now("generating"):
            return await step(self)

    async def noting_accumulate(self: PacedBackend, batch: MicroBatch, loss: LossSpec) -> MicroBatchStats:
        with noted.now("training"):
            return await accumulate(self, batch, loss)

    monkeypatch.setattr(JobScope, "record", noting_record)
    monkeypatch.setattr(PacedEngine, "step", noting_step)
    monkeypatch.setattr(PacedBackend, "accumulate", noting_accumulate)
    return noted


def seeded(*, nodes: int, **changes: Any) -> Scenario:
    job = {
        "name": "a", "steps": 4, "mode": "minibatch", "window_prompts": 2, "workers": 2, "place_rollout": "elastic",
        "seeding": True, "seeding_first_s": 1.5, "prompts_per_step": 12, "group_size": 2, "max_running": 16,
        "max_tokens": 32, "mean_tokens": 8.0, "checkpoint_every": 2,
    }  # fmt: skip
    costs = changes.pop("costs", COSTS)
    return scenario(jobs=[job | changes.pop("job", {})], costs=costs, nodes=nodes, slots=1, **changes)


def run(planned: Scenario, seed: int = 3) -> Outcome:
    outcome = simulate(planned, seed)
    assert outcome.violations == [], "\n".join([*outcome.violations, outcome.report])
    return outcome


def test_another_machine_goes_on_and_the_trainers_machine_never_does_both(seen: Seen) -> None:
    """The same samples and weights come out as without seeding, where both sides work at once."""
    seeding = run(seeded(nodes=1))
    assert [window["step"] for window in seen.windows] == [0, 1, 2, 3]
    assert sum(window["handed_over"] for window in seen.windows) > 8
    assert seen.both == 0
    plain = run(seeded(nodes=1, job={"seeding": False}))
    assert seen.both > 0, "else this test could not fail"
    assert seeding.learned == plain.learned


KNOWN: dict[str, Any] = {
    "seeding_end": "estimated", "length_ranking": "history", "prompts": 24, "by_prompt": 0.8, "steps": 6,
    "prompts_per_step": 12, "mode": "dynamic", "max_tokens": 64, "mean_tokens": 16.0,
}  # fmt: skip
"""Two steps are a term, so from the third on lengths are expected."""


def test_with_lengths_expected_a_window_ends_once_the_trainer_would_not_wait_and_the_same_comes_out(seen: Seen) -> None:
    costs = COSTS | {"train_token_s": 0.002, "micro_batch_s": 0.05}
    estimated = run(seeded(nodes=1, job=KNOWN, costs=costs))
    assert [window["why"] for window in seen.windows[:2]] == ["time", "time"], "nothing is known in the first term"
    ends = [window["why"] for window in seen.windows[2:]]
    assert "time" not in ends and ends.count("estimate") >= 2, ends
    assert seen.both == 0
    plain = run(seeded(nodes=1, job=KNOWN | {"seeding": False}, costs=costs))
    assert estimated.learned == plain.learned


def test_when_other_machines_are_lost_after_the_window_a_dry_trainer_generates_again_and_is_done_sooner(
    seen: Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of three, a moment after the third step was handed over to them."""
    trace = tmp_path / "two_go.csv"
    events = [*(f"0.0,n{i},up,spot" for i in range(3)), *(f"63.5,n{i},kill,spot" for i in (1, 2))]
    trace.write_text("at_s,node,event,kind\n" + "\n".join(events))
    job = KNOWN | {
        "mode": "async", "policy": "rlboost", "relief": True, "prompts": 48, "prompts_per_step": 24, "group_size": 4,
        "mean_tokens": 30.0, "max_tokens": 96, "max_running": 8, "steps": 4,
    }  # fmt: skip
    costs = COSTS | {"train_token_s": 0.001, "micro_batch_s": 0.05}
    planned = seeded(nodes=0, spot={"trace": str(trace)}, job=job, costs=costs)
    returning = run(planned)
    windows = [(window["step"], window["why"]) for window in seen.windows]
    assert seen.ran_dry == 1 and windows.count((2, "estimate")) == 2
    assert seen.both == 0
    monkeypatch.setattr(SeedingEstimate, "ran_dry", lambda *_: False)
    waiting = run(planned)
    assert seen.ran_dry == 1
    assert returning.virtual_seconds < waiting.virtual_seconds


def test_without_other_machines_it_is_plain_colocation(seen: Seen) -> None:
    run(seeded(nodes=0))
    assert [window["why"] for window in seen.windows] == ["generated"] * 4
    assert seen.both == 0


@pytest.mark.parametrize("nodes", [0, 1])
def test_with_overlapping_steps_it_is_done_sooner_and_the_trainers_machine_never_does_both(
    seen: Seen, nodes: int
) -> None:
    """Long tails, whose places the next step fills."""
    job = {"mode": "dynamic", "steps": 6, "max_tokens": 64, "mean_tokens": 12.0, "max_running": 6}
    apart = run(seeded(nodes=nodes, job=job))
    overlapping = run(seeded(nodes=nodes, job=job | {"mode": "async"}))
    assert seen.both == 0
    assert overlapping.virtual_seconds < 0.9 * apart.virtual_seconds


@pytest.mark.parametrize("job", [{"mode": "minibatch"}, {"mode": "async"}, KNOWN | {"mode": "async", "prompts": 12}])
@pytest.mark.parametrize("role", ["rollout", "trainer", "head"])
@pytest.mark.parametrize("at_s", [1.0, 4.0, 7.0])
def test_a_kill_in_a_window_or_after_it_loses_nothing(role: str, at_s: float, job: dict[str, Any]) -> None:
    kill = {"kind": "kill", "target": {"role": role}, "at_s": at_s}
    assert len(run(seeded(nodes=1, job=job, faults={"plan": [kill]}), 5).faults) == 1


def test_a_machine_that_leaves_after_the_window_opens_it_again(seen: Seen, tmp_path: Path) -> None:
    trace = tmp_path / "leaves.csv"
    trace.write_text("at_s,node,event,kind\n0.0,n,up,spot\n24.0,n,kill,spot\n")
    run(seeded(nodes=0, spot={"trace": str(trace)}, job={"max_tokens": 64, "mean_tokens": 60.0, "steps": 3}))
    steps = [window["step"] for window in seen.windows]
    assert len(steps) > len(set(steps)), "a step with two windows"
    assert seen.windows[-1]["why"] == "generated"


def test_machines_beyond_the_capacity_target_get_no_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three machines are offered and taken; one of them generates everything while the trainer trains."""
    aims: list[int] = []
    aim = NodeWorkers.aim

    def noting(self: NodeWorkers, remote: int) -> None:
        aims.append(remote)
        aim(self, remote)

    monkeypatch.setattr(NodeWorkers, "aim", noting)
    trace = tmp_path / "three.csv"
    trace.write_text("at_s,node,event,kind\n" + "\n".join(f"0.{i},n{i},up,spot" for i in range(3)))
    slow = COSTS | {"engine_step_s": 0.02, "train_step_s": 4.0}
    planned = seeded(nodes=0, spot={"trace": str(trace)}, job={"steps": 12, "seeding_first_s": 0.2})
    run(planned.model_copy(update={"costs": scenario(costs=slow).costs}))
    assert aims[-1] == 1
    assert aims == sorted(aims, reverse=True)
