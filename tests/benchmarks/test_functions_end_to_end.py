"""``headrace bench functions`` on real processes, as short as it can be; and what it makes of rows."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.jobs import functions

FIXED: dict[str, Any] = {"seconds": 10.0, "trainer_idle_fraction": 0.9, "tokens_generated": 500}
PLANNED = FIXED | {
    "seconds": 10.2, "plan_workers": 2, "billed_worker_s": 14.0, "compute_worker_s": 12.0, "functions_started": 1,
    "functions_cold_s": 2.0, "plan_cut_samples": 3, "plan_wake_s": 0.1, "plan_forecast_s": 5.0, "plan_generation_s": 10,
}  # fmt: skip


def test_bills_are_compared_a_step_and_the_break_even_is_what_each_start_of_a_plan_may_cost() -> None:
    fixed = functions.figures("fixed", [FIXED, FIXED])
    assert (fixed["billed_worker_s"], fixed["compute_worker_s"], fixed["step_s"]) == (30.0, 27.0, 10.0)
    ours = functions.figures("lambda", [PLANNED, PLANNED])
    assert functions.compared(fixed, ours, "lambda") == {
        "cost_cut_lambda": round(1 - 14 / 30, 3), "step_ratio_lambda": 1.02,
        "compute_cut_lambda": round(1 - 12 / 27, 3), "break_even_lambda": (30.0 - 12.0) / 2,
    }  # fmt: skip


def test_the_goal_is_met_by_one_rule_that_cuts_enough_at_steps_that_are_not_much_longer() -> None:
    kept: dict[str, Any] = {"lost": 0, "twice": 0, "violations": 0, "cost_cut_pareto": 0.5, "step_ratio_pareto": 1.2}
    assert functions.missed(kept | {"cost_cut_lambda": 0.36, "step_ratio_lambda": 1.05}) == []
    assert len(functions.missed(kept | {"cost_cut_lambda": 0.34, "step_ratio_lambda": 1.0, "lost": 1})) == 2


@pytest.mark.long
@pytest.mark.timeout(600)
def test_bench_functions_ends_with_what_is_cut_and_nothing_lost(capfd: pytest.CaptureFixture[str]) -> None:
    short = ["--prompts", "4", "--skip", "1", "--set", "steps=3", "--set", "rollout.max_tokens=64"]
    assert functions.main([*short, "--set", "trainer.backend=simulated", "--json"]) == 0
    told = json.loads(capfd.readouterr().out.strip().splitlines()[-1])
    assert (told["lost"], told["twice"], told["violations"]) == (0, 0, 0)
    keys = {f"{name}_{arm}" for name in ("cost_cut", "step_ratio") for arm in ("lambda", "pareto")}
    assert keys | {"planning_p99_ms", "break_even_cold_start_s"} <= told.keys()
    assert len({run["tokens"] for run in told["runs"]}) == 1, "the same responses in all runs"
