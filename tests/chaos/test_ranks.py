"""A trainer of two ranks in a real run that is harmed: what it learns is the same, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from rank_runs import assert_alike, hit, job_of
from small_job import SMALL_JOB
from test_same_weights import files

from configs.schema import JobConfig
from supervisors.preparation.tiny_model import make_tiny_model
from supervisors.testing.run_under_test import HeadraceRun

RANKS = ("trainer", "trainer.rank1")


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_killed_rank_and_a_silent_leader_restart_their_group_and_nothing_is_learned_otherwise(
    headrace_run: Callable[..., HeadraceRun], small_model: Path
) -> None:
    """The checkpoint of step 3 and the replay of what came after it are in it; a version never changes on the way."""
    job = job_of(small_model, simulated=True)
    alone = headrace_run(job, name="alone")
    harmed = headrace_run(job, name="harmed", faults=[hit("kill", "trainer.rank1", 2), hit("hang", "trainer", 5)])
    assert_alike(harmed, alone, 2)
    ends = [(event["child"], event["cause"]) for event in harmed.events("child_restarting")]
    assert len(ends) == 2, f"one unit of budget for each recovery of the group: {ends}"
    for name in RANKS:
        assert len([e for e in harmed.events("child_started") if e["child"] == name]) == 3


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["kill", "hang"])
@pytest.mark.parametrize("name", RANKS)
def test_either_rank_may_end_or_fall_silent_at_any_time_of_a_step(
    headrace_run: Callable[..., HeadraceRun], small_model: Path, kind: str, name: str
) -> None:
    """While tokens are awaited, micro-batches are computed, a version is written, and a checkpoint."""
    job = job_of(small_model) | {"steps": 60}  # a step takes a tenth of a second: none is over before it is to be hit
    faults = [hit(kind, name, step, at_s) for step, at_s in ((3, 0.0), (14, 0.12), (25, 0.03), (36, 0.2), (47, 0.08))]
    alone = headrace_run(job, name="alone")
    alone.finish()
    assert_alike(headrace_run(job, name="harmed", faults=faults), alone, len(faults))


@pytest.mark.long
@pytest.mark.timeout(400)
def test_the_heads_next_life_adopts_both_ranks(headrace_run: Callable[..., HeadraceRun], small_model: Path) -> None:
    job = job_of(small_model)
    alone = headrace_run(job, name="alone")
    alone.finish()
    faults = [{"kind": "kill", "target": {"role": "head"}, "after_step": 3, "at_s": 0.1}]
    harmed = headrace_run(job, name="harmed", faults=faults)
    assert_alike(harmed, alone, 1)
    assert set(RANKS) <= {event["child"] for event in harmed.events("child_adopted")}
    assert len([event for event in harmed.events("child_started") if event["child"] in RANKS]) == 2


@pytest.mark.long
@pytest.mark.timeout(400)
def test_an_adapter_that_two_ranks_train_is_the_same_if_one_of_them_is_killed(
    headrace_run: Callable[..., HeadraceRun], small_model: Path
) -> None:
    """With the model itself as the reference, which is sharded beside the adapter."""
    job = job_of(small_model, lr=1e-2) | {
        "model": {"source": "hf", "path": str(small_model), "adapter": {"rank": 4, "alpha": 8.0}},
        "algorithm": SMALL_JOB["algorithm"] | {"kl_coefficient": 0.05},
    }
    alone = headrace_run(job, name="alone")
    harmed = headrace_run(job, name="harmed", faults=[hit("kill", "trainer.rank1", 2), hit("kill", "trainer", 5)])
    assert_alike(harmed, alone, 2, stored="adapter_model.safetensors")
    assert max(row["kl"] for row in alone.rows()) > 0
    assert max(row["engine_mismatch"] or 0.0 for row in harmed.rows()) < 1e-3
    assert alone.rows()[-1]["pull_bytes"] < (small_model / "model.safetensors").stat().st_size


@pytest.mark.long
@pytest.mark.timeout(400)
def test_policy_and_critic_that_two_ranks_train_are_the_same_if_each_rank_is_killed(
    headrace_run: Callable[..., HeadraceRun], small_model: Path
) -> None:
    """One is killed in the critic's warm-up, and one after it; there is a reference, and two passes a step."""
    job = job_of(small_model) | {
        "algorithm": {"name": "ppo", "group_size": 1, "prompts_per_step": 24, "kl_coefficient": 0.05, "epochs": 2},
        "critic": {"lr": 1e-3, "warmup_steps": 4},
        "checkpoint": {"every": 2},
    }
    alone = headrace_run(job, name="alone")
    harmed = headrace_run(job, name="harmed", faults=[hit("kill", "trainer", 3), hit("kill", "trainer.rank1", 6)])
    assert_alike(harmed, alone, 2)
    for column in ("value_loss", "explained_variance", "kl_per_token"):
        assert [row[column] for row in harmed.rows()] == [row[column] for row in alone.rows()]
    assert len([name for name in files(alone.finish()) if name.startswith("trainer/critic/shard-")]) == 2


@pytest.mark.long
@pytest.mark.timeout(400)
def test_experts_that_stay_at_two_ranks_learn_the_same_if_each_rank_is_killed(
    headrace_run: Callable[..., HeadraceRun], tmp_path: Path
) -> None:
    """With the experts that the engine chose, and the loss that balances them."""
    experts = {"model": {**SMALL_JOB["model"], "experts": 4}}
    model = tmp_path / "moe"
    make_tiny_model(JobConfig.model_validate(SMALL_JOB | experts), model)
    job = job_of(model, expert_parallel=True, router_replay=True) | {
        "algorithm": SMALL_JOB["algorithm"] | {"load_balancing": 0.01},
        "checkpoint": {"every": 3},
    }
    alone = headrace_run(job, name="alone")
    harmed = headrace_run(job, name="harmed", faults=[hit("kill", "trainer.rank1", 2), hit("kill", "trainer", 5)])
    assert_alike(harmed, alone, 2)
    assert [row["expert_imbalance"] for row in harmed.rows()] == [row["expert_imbalance"] for row in alone.rows()]
    assert max(row["engine_mismatch"] or 0.0 for row in harmed.rows()) < 1e-3


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_run_goes_on_with_another_number_of_ranks(
    headrace_run: Callable[..., HeadraceRun], small_model: Path
) -> None:
    """Two ranks, one, and two again; each part goes on at the step where the last one ended."""
    run = headrace_run(job_of(small_model) | {"steps": 3}, name="ranks")
    run.finish()
    for steps, ranks in ((5, 1), (8, 2)):
        run.resume(settings=(f"steps={steps}", f"trainer.ranks={ranks}"))
        summary = run.finish()
    assert [row["step"] for row in run.rows()] == list(range(8))
    assert summary["prompts_lost"] == summary["samples_trained_twice"] == 0
