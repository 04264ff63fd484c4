"""Evaluation leaves no trace in what a synchronous job learns, and loses nothing to who is killed beside it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_job import SMALL_JOB
from test_same_weights import files, samples

from actors.jobs.evaluation_rows import read_rows
from supervisors.testing.run_under_test import HeadraceRun


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_training_with_evaluation_and_kills_is_training_without_bit_for_bit(
    headrace_run: Callable[..., HeadraceRun], small_model: Path
) -> None:
    """A worker and the head are killed while versions are evaluated; each evaluation has all its samples of one."""
    job = SMALL_JOB | {
        "steps": 6,
        "model": {"source": "hf", "path": str(small_model)},
        "rollout": {"workers": 2, "max_tokens": 24, "threads": 1, "max_running": 16},
        "checkpoint": {"every": 2},
    }
    held_out = {"source": "reasoning_gym", "task": "spell_backward", "size": 100}
    evaluated = job | {"eval": {"data": held_out, "every": 2, "samples": 4, "prompts": 40, "max_tokens": 48}}
    alone = headrace_run(job, name="alone")
    plain = alone.finish()
    kills: list[dict[str, Any]] = [
        {"kind": "kill", "target": {"role": "rollout"}, "after_step": 1, "at_s": 0.05},
        {"kind": "kill", "target": {"role": "head"}, "after_step": 3, "at_s": 0.05},
    ]
    harmed = headrace_run(evaluated, name="harmed", faults=kills)
    summary = harmed.finish()

    assert samples(harmed) == samples(alone)
    assert files(summary) == files(plain)
    rows = read_rows(harmed.run_dir / "eval.jsonl")
    assert [row["version"] for row in rows] == [0, 2, 4, 6]
    for row in rows:
        assert row["samples"] == 160 and row["version_min"] == row["version_max"] == row["version"], row
    lines = (harmed.run_dir / "eval.jsonl").read_text().splitlines()
    assert len({json.loads(line)["version"] for line in lines}) == len(lines), "each is told once"
    assert summary["eval"]["last"]["avg_at_k"] == rows[-1]["avg_at_k"]
