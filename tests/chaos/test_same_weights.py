"""Rollout workers that are killed leave no trace in what a synchronous job learns."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from actors.ledger.journal import committed_samples
from supervisors.testing.run_under_test import HeadraceRun
from tests.chaos.small_job import SMALL_JOB


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_with_and_without_killed_rollout_workers_the_trained_weights_are_the_same_bit_for_bit(
    headrace_run: Callable[..., HeadraceRun], small_model: Path
) -> None:
    """One seed, the torch engine on CPU, sync mode: two workers, of which one is killed three times in mid-step.

    The samples that were moved, their tokens and rewards, the learned weights and the optimizer's state are compared by
    their hashes. What may differ are the last bits of the engines' log-probabilities: see ``losses.NUMERICS``.
    """
    job = SMALL_JOB | {
        "steps": 14,
        "model": {"source": "hf", "path": str(small_model)},
        "rollout": {"workers": 2, "max_tokens": 48, "threads": 1, "max_running": 16,
                    "engine_options": {"tokens_per_step": 1}},
        "checkpoint": {"every": 0},
    }  # fmt: skip
    kills = [{"kind": "kill", "target": {"role": "rollout"}, "after_step": step, "at_s": 0.02} for step in (2, 5, 8)]
    alone = headrace_run(job, name="alone")
    alone_summary = alone.finish()
    harmed = headrace_run(job, name="harmed", faults=kills)
    harmed_summary = harmed.finish()

    assert harmed_summary["faults"]["injected"] == len(kills)
    assert harmed.rows()[-1]["samples_migrated"] > 0, "no kill has hit a worker that held samples"
    assert alone.rows()[-1]["samples_migrated"] == 0
    assert samples(harmed) == samples(alone)
    hashes = files(alone_summary)
    assert {"model.safetensors", "trainer/weights.safetensors"} <= set(hashes)
    assert files(harmed_summary) == hashes
    assert [row["loss"] for row in harmed.rows()] == [row["loss"] for row in alone.rows()]


def samples(run: HeadraceRun) -> list[tuple[int, int, int, str, float | None]]:
    rows = committed_samples(run.run_dir / "journal.db")
    return [(r.step, r.prompt, r.sibling, r.tokens_hash, r.reward) for r in rows]


def files(summary: dict[str, Any]) -> dict[str, str]:
    """The hash of each file of the last checkpoint."""
    state = json.loads((Path(summary["checkpoint"]) / "state.json").read_text())
    return {name: file["xxh3"] for name, file in state["files"].items()}
