"""Real runs whose steps are planned: parts are cut, workers sleep, and one is killed as it is being cut."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_job import SMALL_JOB
from test_same_weights import files, samples

from supervisors.testing.run_under_test import HeadraceRun

PLANNED = {"policy": "planned", "workers_max": 3, "plan": {"choose": "fixed", "cut_at": 0.3}}


def torch_job(model: Path, **scheduling: Any) -> dict[str, Any]:
    ranking = "history" if scheduling else "none"
    return SMALL_JOB | {
        "steps": 10,
        "model": {"source": "hf", "path": str(model)},
        "rollout": {"workers": 3, "max_tokens": 48, "threads": 1, "max_running": 16, "length_ranking": ranking,
                    "engine_options": {"tokens_per_step": 1}},
        "scheduling": scheduling,
        "checkpoint": {"every": 0},
        "limits": {"balance_interval_s": 0.02},
    }  # fmt: skip


def kill_as_they_are_cut(run: HeadraceRun, times: int) -> None:
    """SIGKILL to the next worker that is told to hand over, as soon as the record says so."""
    for number in range(times):
        run.wait_for_step(2 * number)
        pids, seen = run.processes(), len(run.events("samples_cut"))
        cut = run.wait_until("a part that is cut", lambda seen=seen: run.events("samples_cut")[seen:])
        os.kill(pids[cut[0]["worker"]], signal.SIGKILL)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_cuts_and_workers_that_are_killed_as_they_are_cut_change_no_bit_of_the_weights(
    headrace_run: Callable[..., HeadraceRun], small_model: Path
) -> None:
    """One seed, the torch engine on CPU, sync mode: without a plan, with cuts, and with kills among the cuts."""
    plain = headrace_run(torch_job(small_model), name="plain")
    plain_summary = plain.finish()
    cut = headrace_run(torch_job(small_model, **PLANNED), name="cut")
    cut_summary = cut.finish()
    killed = headrace_run(torch_job(small_model, **PLANNED), name="killed")
    kill_as_they_are_cut(killed, 2)
    killed_summary = killed.finish()

    for run in (cut, killed):
        assert sum(row["plan_cut_samples"] for row in run.rows()) > 5
        assert samples(run) == samples(plain)
    assert killed.events("worker_down"), "nobody was killed"
    assert files(plain_summary) == files(cut_summary) == files(killed_summary)
