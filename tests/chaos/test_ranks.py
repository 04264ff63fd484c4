"""A trainer of two ranks in a real run that is harmed: what it learns is the same, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_job import SMALL_JOB
from test_same_weights import files, samples

from supervisors.testing.run_under_test import HeadraceRun

RANKS = ("trainer", "trainer.rank1")


def job_of(model: Path, **trainer: Any) -> dict[str, Any]:
    return SMALL_JOB | {
        "model": {"source": "hf", "path": str(model)},
        "trainer": SMALL_JOB["trainer"] | {"backend": "fsdp", "ranks": 2} | trainer,
    }


def hit(kind: str, name: str, step: int, at_s: float = 0.02) -> dict[str, Any]:
    return {"kind": kind, "target": {"name": name}, "after_step": step, "at_s": at_s}


def assert_alike(harmed: HeadraceRun, alone: HeadraceRun, faults: int) -> None:
    summary, hashes = harmed.finish(), files(alone.finish())
    assert summary["faults"]["injected"] == faults
    assert summary["prompts_lost"] == summary["samples_trained_twice"] == 0
    assert samples(harmed) == samples(alone)
    assert "model.safetensors" in hashes and files(summary) == hashes
    assert [row["loss"] for row in harmed.rows()] == [row["loss"] for row in alone.rows()]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_rank_and_a_silent_leader_restart_their_group_and_nothing_is_learned_otherwise(
    headrace_run: Callable[..., HeadraceRun], small_model: Path
) -> None:
    """The checkpoint of step 3 and the replay of what came after it are in it; a version never changes on the way."""
    job = job_of(small_model)
    alone = headrace_run(job, name="alone")
    alone.finish()
    harmed = headrace_run(job, name="harmed", faults=[hit("kill", "trainer.rank1", 2), hit("hang", "trainer", 5)])
    assert_alike(harmed, alone, 2)
    ends = [(event["child"], event["cause"]) for event in harmed.events("child_restarting")]
    assert len(ends) == 2, f"one unit of budget for each recovery of the group: {ends}"
    for name in RANKS:
        assert len([e for e in harmed.events("child_started") if e["child"] == name]) == 3
