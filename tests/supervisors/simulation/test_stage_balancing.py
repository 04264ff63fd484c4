"""``scheduling.workers_max``, the whole system in virtual time: the pool follows the gap between the stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from configs.scenario import Scenario
from supervisors.pool.resizing import Resizing
from supervisors.simulation.runner import simulate
from tests.supervisors.simulation.scenarios import scenario


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """That were asked for, in order."""
    asked: list[int] = []
    resize = Resizing._resize

    def noting(self: Resizing, workers: int) -> None:
        asked.append(workers)
        resize(self, workers)

    monkeypatch.setattr(Resizing, "_resize", noting)
    return asked


def balanced(*, workers: int, engine_step_s: float, train_step_s: float, **changes: Any) -> Scenario:
    """Sixteen samples of about four tokens, two at a time at each worker: a step is 32 engine steps, shared by them."""
    job = {
        "name": "a", "steps": 16, "mode": "async", "prompts_per_step": 4, "group_size": 4, "max_running": 2,
        "max_tokens": 8, "mean_tokens": 4.0, "workers": workers, "workers_max": 4, "checkpoint_every": 0,
    }  # fmt: skip
    costs = {"engine_step_s": engine_step_s, "train_step_s": train_step_s, "micro_batch_s": 0.02, "load_s": 0.05}
    return scenario(jobs=[job | changes.pop("job", {})], costs=costs, **changes)


def run(planned: Scenario, seed: int = 2) -> None:
    outcome = simulate(planned, seed)
    assert outcome.violations == [], "\n".join([*outcome.violations, outcome.report])


def test_a_pool_that_is_behind_grows_one_by_one_to_its_bound(sizes: list[int]) -> None:
    run(balanced(workers=1, engine_step_s=0.3, train_step_s=0.1))
    assert sizes == [2, 3, 4]


def test_a_pool_that_waits_for_the_trainer_shrinks_to_its_bound(sizes: list[int]) -> None:
    run(balanced(workers=3, engine_step_s=0.02, train_step_s=2.0, job={"workers_min": 2}))
    assert sizes == [2]


def test_stages_that_are_in_balance_are_left_alone(sizes: list[int]) -> None:
    run(balanced(workers=2, engine_step_s=0.1, train_step_s=1.6, job={"steps": 24}))
    assert sizes == []


def test_machines_beyond_what_the_trainer_needs_get_no_workers(sizes: list[int], tmp_path: Path) -> None:
    """Three machines are offered and taken; their workers are drained again, and nothing is lost."""
    trace = tmp_path / "three.csv"
    trace.write_text("at_s,node,event,kind\n" + "\n".join(f"0.{i},n{i},up,spot" for i in range(3)))
    job = {"place_rollout": "elastic", "steps": 20}
    run(balanced(workers=1, engine_step_s=0.02, train_step_s=2.0, job=job, slots=1, spot={"trace": str(trace)}))
    assert sizes == [4, 3, 2, 1]
