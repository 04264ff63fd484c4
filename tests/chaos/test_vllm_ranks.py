"""Workers of two vLLM ranks each. A follower is killed, then a leader, and a follower is stopped: each time its group
starts anew, what it held goes on, and nothing is lost or left over.
"""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_job import SMALL_JOB

from actors.weights.segments import run_id, segment_directory
from supervisors.testing.run_under_test import HeadraceRun

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(900)]

if importlib.util.find_spec("vllm") is None and os.environ.get("HEADRACE_REQUIRE_VLLM") != "1":
    pytest.skip("vLLM is not installed (make vllm)", allow_module_level=True)

PATIENCE_S = 400.0
JOB: dict[str, Any] = SMALL_JOB | {
    "steps": 100_000,
    "model": {"source": "tiny", "hidden": 64, "layers": 2, "warm_start_steps": 0},
    "algorithm": {"group_size": 4, "prompts_per_step": 4},
    "rollout": {
        "engine": "vllm",
        "workers": 2,
        "tensor_parallel": 2,
        "max_tokens": 64,
        "threads": 1,
        "max_running": 16,
        "device": "cpu",
    },
    "checkpoint": {"every": 1000, "keep": 1000},
    "limits": {"ready_timeout_s": PATIENCE_S},
}


def go_on(run: HeadraceRun, steps: int) -> None:
    wanted = len(run.rows()) + steps
    run.wait_until(f"{wanted} steps", lambda: len(run.rows()) >= wanted, timeout_s=PATIENCE_S)


def lives(run: HeadraceRun, name: str) -> int:
    return sum(event["child"] == name for event in run.events("child_started"))


def registered(run: HeadraceRun, worker: str) -> int:
    return sum(event["worker"] == worker for event in run.events("worker_registered"))


def test_a_rank_that_is_killed_costs_its_worker_a_restart_and_no_sample(
    headrace_run: Callable[..., HeadraceRun],
) -> None:
    queues = vllm_queues()
    run = headrace_run(JOB, name="ranks")
    run.wait_for_step(1, timeout_s=PATIENCE_S)
    run.wait_until("both workers", lambda: registered(run, "rollout-0") and registered(run, "rollout-1"))
    go_on(run, 2)
    for harm, harmed, group, life in (
        (signal.SIGKILL, "rollout-0.rank1", "rollout-0", 2),
        (signal.SIGKILL, "rollout-1", "rollout-1", 2),
        (signal.SIGSTOP, "rollout-0.rank1", "rollout-0", 3),
    ):
        returned = len(run.events("samples_returned"))
        os.kill(run.processes()[harmed], harm)
        run.wait_until("its samples back", lambda returned=returned: len(run.events("samples_returned")) > returned)
        go_on(run, 1)  # on the other worker
        for name in (group, f"{group}.rank1"):
            run.wait_until(f"a new {name}", lambda name=name, life=life: lives(run, name) == life, timeout_s=PATIENCE_S)
        run.wait_until(
            f"{group} at work", lambda group=group, life=life: registered(run, group) == life, timeout_s=PATIENCE_S
        )
        go_on(run, 2)
    run.interrupt()
    summary = run.finish(state="interrupted")
    assert (summary["prompts_lost"], summary["samples_trained_twice"]) == (0, 0)
    assert run.rows()[-1]["samples_migrated"] > 0
    assert not run.events("samples_dropped")
    nothing_left(run.run_dir)
    assert vllm_queues() <= queues
    print(
        f"{summary['restarts']} restarts, {run.rows()[-1]['samples_migrated']} samples moved, {len(run.rows())} steps"
    )


def vllm_queues() -> set[Path]:
    """In shared memory, by which ranks of vLLM's could talk."""
    return set(segment_directory().glob("psm_*"))


def nothing_left(run_dir: Path) -> None:
    assert not list(segment_directory().glob(f"headrace-{run_id(run_dir)}*"))
    own = str(run_dir).encode()
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert own not in entry.read_bytes(), f"process {entry.parent.name} outlived the run"
        except OSError:
            continue
