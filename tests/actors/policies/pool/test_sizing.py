"""How many remote workers a seeding job is to have: what the trainer has use for, and with prices what is worth it."""

from __future__ import annotations

from typing import Any

import pytest

from actors.policies.pool.pool_size import PoolRules
from actors.policies.pool.sizing import ByStages, ByTarget, Prices, SizeView
from actors.policies.seeding.worth_having import STEPS


def row(step: int, target: int, **changes: Any) -> dict[str, Any]:
    """Two engines beside a trainer that takes 10 s; 100 engine seconds of generation."""
    measured = {"seconds": 20.0, "trainer_idle_fraction": 0.5, "seeding_engine_s": 100.0}
    return {"step": step, "seeding_target": target} | measured | changes


def prices(reserved: float, worker: float) -> Prices:
    return Prices(reserved, worker, reserved)


def aims(*rows: dict[str, Any], prices: tuple[Prices | None, ...] | Prices | None = None) -> list[int]:
    """Remote workers that are told, two staying. ``prices``: of all steps, or of each."""
    target, told = ByTarget(2), list[int]()
    for number, one in enumerate(rows):
        of_step = prices if prices is None or isinstance(prices, Prices) else prices[number]
        wanted = target.decide(one, SizeView(2, 0, of_step))
        if wanted is not None:
            assert wanted.event == "capacity_target"
            assert wanted.fields == {"step": one["step"], "remote_workers": wanted.workers - 2}
            told.append(wanted.workers - 2)
    return told


def steps(target: int, **changes: Any) -> list[dict[str, Any]]:
    return [row(step, target, **changes) for step in range(STEPS)]


def test_without_prices_it_is_the_greatest_target_of_the_last_steps() -> None:
    assert aims(*steps(7)) == [7]
    assert aims(row(0, 7), row(1, 9), row(2, 5), row(3, 5)) == [9]
    assert aims(row(0, 7), row(1, 5)) == [], "too few to know"
    assert aims({"message": "hello"}, *steps(7)) == [7]


def test_machines_that_cost_more_than_the_time_they_save_are_not_kept() -> None:
    """(100 + 2 · 10) / (2 + n) seconds a step: at n = 10 training is the slower stage."""
    assert aims(*steps(10), prices=prices(10.0, 0.1)) == [10]
    assert aims(*steps(10), prices=prices(1.0, 10.0)) == [0]
    assert aims(*steps(4), prices=prices(10.0, 0.1)) == [4], "prices only lower it"


def test_a_step_of_which_nothing_was_measured_says_nothing_of_prices() -> None:
    dear = prices(1.0, 10.0)
    assert aims(*steps(6, seeding_engine_s=0.0), prices=dear) == [6]
    assert aims(*steps(6, trainer_idle_fraction=1.0), prices=dear) == [6]


def test_the_price_of_machines_that_have_gone_is_remembered() -> None:
    assert aims(*steps(10), prices=(prices(1.0, 10.0), None, None)) == [0]


def stages(*idle: float, workers: int = 2, wanted: int = 2, prices: Prices | None = None) -> list[dict[str, float]]:
    """Events of steps of 10 s in which the trainer trained for 2 s, and workers idled for parts of the time."""
    by_stages, told = ByStages(PoolRules(1, 4), wanted), list[dict[str, float]]()
    for step, part in enumerate(idle):
        row = {"step": step, "seconds": 10.0, "rollout_idle_fraction": part, "trainer_idle_fraction": 0.8}
        if (resize := by_stages.decide(row, SizeView(0, workers, prices))) is not None:
            assert resize.event == "pool_resized"
            assert resize.workers == resize.fields["wanted"]
            told.append(resize.fields)
    return told


def test_what_the_job_says_beside_rows_of_steps_changes_no_size() -> None:
    assert ByStages(PoolRules(1, 4), 2).decide({"message": "hello"}, SizeView(0, 2)) is None


def test_slow_generation_asks_for_a_worker_more_and_says_what_was_measured() -> None:
    assert stages(*4 * [0.0]) == [{"workers": 2, "wanted": 3, "step": 3, "gen_s": 10.0, "train_s": pytest.approx(2.0)}]
    assert stages(*4 * [0.8]) == [], "both stages take two seconds"


def test_a_number_outside_the_bounds_is_brought_inside_at_once() -> None:
    assert [fields["wanted"] for fields in stages(0.0, wanted=9)] == [4]
