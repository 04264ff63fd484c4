"""Every role process may be killed in mid-run: the run finishes by itself, nothing is lost, nothing trained twice."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from small_job import TORCH

from actors.ledger.journal import committed_samples
from actors.weights.segments import run_id, segment_directory
from supervisors.testing.run_under_test import HeadraceRun

STEPS = 1000


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_survives_the_death_of_each_of_its_processes(start_run: Callable[..., HeadraceRun]) -> None:
    """SIGKILL to a rollout worker, the reward worker, the weight server and the trainer, one after the other.

    After each the run moves on; at the end every sample of every step is accounted for exactly once, restarts are
    counted, and no process and no shared memory is left.
    """
    run = start_run("kill", **TORCH, steps=STEPS, checkpoint={"every": 10})
    run.wait_for_step(2)
    names = ("rollout-0", "rewards", "weights", "trainer")
    # one worker does for the first steps: the other may still be starting
    pids = run.wait_until("all of them", lambda: found if set(names) <= set(found := run.processes()) else None)
    for name in names:
        steps = len(run.rows())
        os.kill(pids[name], signal.SIGKILL)
        run.wait_until(f"a new {name}", lambda name=name: _started_again(run, name))
        run.wait_for_step(steps + 5)
    run.interrupt()
    summary = run.finish(state="interrupted")

    assert summary["prompts_lost"] == 0
    assert summary["samples_trained_twice"] == 0
    assert summary["restarts"] == 4
    _every_sample_once(run.run_dir, summary["steps"])
    _nothing_left(run.run_dir)


def _started_again(run: HeadraceRun, name: str) -> bool:
    return sum(event["child"] == name for event in run.events("child_started")) > 1


def _every_sample_once(run_dir: Path, steps: int) -> None:
    rows = committed_samples(run_dir / "journal.db")
    names = [(row.step, row.prompt, row.sibling) for row in rows]
    assert len(names) == len(set(names))
    assert set(names) >= {(step, step * 6 + p, s) for step in range(steps) for p in range(6) for s in range(4)}


def _nothing_left(run_dir: Path) -> None:
    assert not list(segment_directory().glob(f"headrace-{run_id(run_dir)}*"))
    own = str(run_dir).encode()
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert own not in entry.read_bytes(), f"process {entry.parent.name} outlived the run"
        except OSError:
            continue
