"""The head may be killed: the next one takes over what runs, and the run finishes by itself."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from left_over import every_sample_once, nothing_left
from small_job import simulated_rollout

from supervisors.testing.run_under_test import HeadraceRun

STEPS = 40


def pids(run: HeadraceRun) -> dict[str, int]:
    """Of the head and the role processes; waits for a head that is just coming back."""
    whole = {"head", "trainer", "weights", "rewards", "rollout-0", "rollout-1"}
    return run.wait_until("a whole tree", lambda: found if whole <= set(found := run.processes()) else None)


def heads_back(run: HeadraceRun) -> int:
    return len(run.events("head_restarted"))


@pytest.mark.timeout(400)
@pytest.mark.parametrize("mode", ["sync", pytest.param("async", marks=pytest.mark.long)])
def test_a_run_survives_its_head_and_no_role_process_is_started_again(
    start_run: Callable[..., HeadraceRun], small_model: Path, mode: str
) -> None:
    """SIGKILL to the head twice in mid-run, once SIGSTOP: trainer, engines and services live through all.

    The one run finishes by itself. The other is interrupted as its head is killed once more: the next one hears of it.
    """
    planned = STEPS if mode == "async" else 1000
    run = start_run("head", steps=planned, sync={"mode": mode}, rollout=simulated_rollout(small_model))
    run.wait_for_step(2)
    before, pauses_s = pids(run), list[tuple[float, float]]()
    for number, harm in enumerate((signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL)):
        head, steps = pids(run)["head"], len(run.rows())
        os.kill(head, harm)
        harmed_s = time.monotonic()
        run.wait_until(f"head {number + 2}", lambda number=number: heads_back(run) > number)
        back_s, steps = time.monotonic(), len(run.rows())
        run.wait_until("progress", lambda steps=steps: len(run.rows()) > steps)
        pauses_s.append((round(time.monotonic() - harmed_s, 2), round(time.monotonic() - back_s, 2)))
        run.wait_for_step(steps + 5)
    after = pids(run)
    if mode == "sync":
        os.kill(after["head"], signal.SIGKILL)
        run.interrupt()
    summary = run.finish(state="finished" if mode == "async" else "interrupted")

    assert summary["steps"] == planned or mode == "sync"
    assert summary["checkpoint"], "also of the interrupted one: its last head has taken it"
    assert (summary["prompts_lost"], summary["samples_trained_twice"]) == (0, 0)
    assert summary["restarts"] == (3 if mode == "async" else 4), "the head's lives, and nobody else's"
    assert after.pop("head") != before.pop("head")
    assert after == before
    assert {event["child"] for event in run.events("child_adopted")} >= set(before)
    every_sample_once(run.run_dir, summary["steps"])
    nothing_left(run.run_dir)
    used, samples = (sum(row[key] for row in run.events("worker_went_on")) for key in ("tokens", "samples"))
    assert used > 0, "what the journals lacked was generated again"
    print(f"{mode}: {used} tokens of {samples} samples were made without a head and used by the next one")
    print(f"seconds from the harm, and from the new head's first word, to the next step: {pauses_s}")
    assert max(after_start_s for _, after_start_s in pauses_s) < 10.0


@pytest.mark.timeout(400)
def test_a_second_interruption_ends_the_run_at_once(start_run: Callable[..., HeadraceRun]) -> None:
    run = start_run("quick", steps=1000)
    run.wait_for_step(1)
    run.interrupt()
    run.interrupt()
    run.finish(timeout_s=120, clean=False)
    assert run.process.returncode == 130
    nothing_left(run.run_dir)


@pytest.mark.timeout(400)
def test_a_head_that_ends_again_and_again_ends_the_run_with_a_message(
    start_run: Callable[..., HeadraceRun],
) -> None:
    """Killed more often than the budget allows."""
    run = start_run("doomed", steps=1000, limits={"restart_max": 3, "backoff_max_s": 0.3})
    run.wait_for_step(1)
    for _ in range(4):
        os.kill(pids(run)["head"], signal.SIGKILL)
        time.sleep(1.0)
    summary = run.finish(clean=False)
    assert (run.process.returncode, summary["state"]) == (1, "failed"), summary
    assert "the head ended too often: 3 restarts in 120 s are used up" in summary["error"]
    nothing_left(run.run_dir)
    assert json.loads((run.run_dir / "logs" / "machine.log").read_text().splitlines()[-1])
