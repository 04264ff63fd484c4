"""A critic in a real run that is harmed: what it learns, and what the policy learns from it, is the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from small_job import SMALL_JOB
from test_same_weights import files, samples

from supervisors.testing.run_under_test import HeadraceRun


@pytest.mark.long
@pytest.mark.timeout(400)
def test_policy_and_critic_are_the_same_bit_for_bit_if_trainer_and_workers_are_killed_on_the_way(
    headrace_run: Callable[..., HeadraceRun], small_model: Path
) -> None:
    """Sync mode, a reference, two passes a step: the trainer is killed in the critic's warm-up and after it."""
    job = SMALL_JOB | {
        "steps": 12,
        "model": {"source": "hf", "path": str(small_model)},
        "algorithm": {"name": "ppo", "group_size": 1, "prompts_per_step": 24, "kl_coefficient": 0.05, "epochs": 2},
        "critic": {"lr": 1e-3, "warmup_steps": 4},
        "rollout": {"workers": 2, "max_tokens": 48, "threads": 1, "max_running": 16,
                    "engine_options": {"tokens_per_step": 1}},
        "checkpoint": {"every": 3},
    }  # fmt: skip
    kills = [
        {"kind": "kill", "target": {"role": role}, "after_step": step, "at_s": 0.02}
        for role, step in (("trainer", 3), ("rollout", 6), ("trainer", 8))
    ]
    alone = headrace_run(job, name="alone")
    alone_summary = alone.finish()
    harmed = headrace_run(job, name="harmed", faults=kills)
    harmed_summary = harmed.finish()

    assert harmed_summary["faults"]["injected"] == len(kills)
    assert harmed_summary["restarts"] >= 2
    assert harmed_summary["prompts_lost"] == harmed_summary["samples_trained_twice"] == 0
    assert samples(harmed) == samples(alone)
    hashes = files(alone_summary)
    assert {"model.safetensors", "trainer/weights.safetensors", "trainer/critic.safetensors"} <= set(hashes)
    assert files(harmed_summary) == hashes
    for column in ("loss", "value_loss", "explained_variance", "kl_per_token"):
        assert [row[column] for row in harmed.rows()] == [row[column] for row in alone.rows()]
