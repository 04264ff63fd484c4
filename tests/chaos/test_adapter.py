"""A run that trains an adapter, and is harmed: the adapter is the same, and it is all that the run has stored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from small_job import SMALL_JOB
from test_same_weights import files, samples

from supervisors.testing.run_under_test import HeadraceRun


@pytest.mark.long
@pytest.mark.timeout(400)
def test_an_adapter_is_the_same_bit_for_bit_if_trainer_and_worker_are_killed_on_the_way(
    headrace_run: Callable[..., HeadraceRun], small_model: Path
) -> None:
    """Sync mode, with the model itself as the reference; the trainer is killed after its second checkpoint."""
    job = SMALL_JOB | {
        "steps": 8,
        "model": {"source": "hf", "path": str(small_model), "adapter": {"rank": 4, "alpha": 8.0}},
        "algorithm": SMALL_JOB["algorithm"] | {"kl_coefficient": 0.05},
        "rollout": {"workers": 2, "max_tokens": 24, "threads": 1, "max_running": 16,
                    "engine_options": {"tokens_per_step": 1}},
        "trainer": {"lr": 1e-2, "threads": 1},
        "checkpoint": {"every": 2},
    }  # fmt: skip
    kills = [
        {"kind": "kill", "target": {"role": role}, "after_step": step, "at_s": 0.02}
        for role, step in (("rollout", 2), ("trainer", 5))
    ]
    alone = headrace_run(job, name="alone")
    alone_summary = alone.finish()
    harmed = headrace_run(job, name="harmed", faults=kills)
    harmed_summary = harmed.finish()

    assert harmed_summary["faults"]["injected"] == len(kills)
    assert harmed_summary["prompts_lost"] == harmed_summary["samples_trained_twice"] == 0
    assert samples(harmed) == samples(alone)
    hashes = files(alone_summary)
    assert {"adapter_model.safetensors", "adapter_config.json", "trainer/weights.safetensors"} <= set(hashes)
    assert "model.safetensors" not in hashes
    assert files(harmed_summary) == hashes
    assert max(row["kl"] for row in alone.rows()) > 0
    assert max(row["engine_mismatch"] or 0.0 for row in harmed.rows()) < 1e-3
    assert alone.rows()[-1]["pull_bytes"] < (small_model / "model.safetensors").stat().st_size
