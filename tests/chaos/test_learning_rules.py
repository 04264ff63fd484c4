"""Real runs of learning rules that are harmed: with several updates a step and prompts that are passed over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_job import SMALL_JOB
from test_same_weights import files, samples

from supervisors.testing.run_under_test import HeadraceRun

DAPO = {"name": "dapo", "minibatches": 3, "overlong": {"buffer_tokens": 16}, "entropy_coefficient": 0.001}
BASELINE = {"name": "reinforce_pp_baseline", "minibatches": 2, "epochs": 2, "kl_coefficient": 0.02}


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("algorithm", [DAPO, BASELINE], ids=["dapo", "reinforce_pp_baseline"])
def test_kept_groups_and_weights_are_the_same_bit_for_bit_if_trainer_and_workers_are_killed_on_the_way(
    headrace_run: Callable[..., HeadraceRun], small_model: Path, algorithm: dict[str, Any]
) -> None:
    job = SMALL_JOB | {
        "steps": 9,
        "model": {"source": "hf", "path": str(small_model)},
        "algorithm": {"group_size": 4, "prompts_per_step": 6} | algorithm,
        "rollout": {"workers": 2, "max_tokens": 48, "threads": 1, "max_running": 16,
                    "engine_options": {"tokens_per_step": 1}},
        "checkpoint": {"every": 3},
    }  # fmt: skip
    kills = [
        {"kind": "kill", "target": {"role": role}, "after_step": step, "at_s": 0.02}
        for role, step in (("trainer", 1), ("rollout", 3), ("trainer", 6))
    ]
    alone = headrace_run(job, name="alone")
    alone_summary = alone.finish()
    harmed = headrace_run(job, name="harmed", faults=kills)
    harmed_summary = harmed.finish()
    assert harmed_summary["faults"]["injected"] == len(kills)
    assert harmed_summary["prompts_lost"] == harmed_summary["samples_trained_twice"] == 0
    assert samples(harmed) == samples(alone)
    assert files(harmed_summary) == files(alone_summary)
    for column in ("loss", "entropy", "no_signal"):
        assert [row.get(column) for row in harmed.rows()] == [row.get(column) for row in alone.rows()]
    if algorithm is DAPO:
        assert harmed_summary["no_signal"] == alone_summary["no_signal"] > 0
