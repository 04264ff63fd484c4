"""Every kind of fault, on the processes of real runs: each job finishes by itself, and no checker finds anything."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from left_over import every_sample_once, nothing_left, processes_of
from small_job import simulated_job

from actors.control.errors import BadArgs, NotNow
from configs.errors import ConfigError
from supervisors.checkers.history import RunState
from supervisors.testing.run_under_test import HeadraceRun

StartRun = Callable[..., HeadraceRun]


@pytest.fixture
def job(small_model: Path) -> dict[str, Any]:
    """Long enough for the faults; every checkpoint is kept, so that the journal holds every token."""
    return simulated_job(small_model, steps=200, checkpoint={"every": 25, "keep": 1000})


def doctor(run_dir: Path) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "main", "doctor", "--run", str(run_dir), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, json.loads(done.stdout)


@pytest.mark.timeout(600)
def test_a_plan_of_every_kind_is_carried_out_and_the_run_is_none_the_worse(
    headrace_run: StartRun, job: dict[str, Any]
) -> None:
    """Twelve kinds, begun in the vocabulary's order; the first strikes after the first step.

    Not recorded in that order: a strike that waits for its victim's answer, on a link that an earlier one makes drop
    messages perhaps, is overtaken by a later one.
    """
    faults: list[dict[str, Any]] = [
        {"kind": "kill", "target": {"role": "rollout"}},
        {"kind": "hang", "target": {"name": "rewards"}},
        {"kind": "slow", "target": {"role": "rollout", "count": 2}, "factor": 5, "heal_after_s": 1.5},
        {"kind": "partition", "target": {"link": ["head", "rollout-0"]}, "heal_after_s": 2},
        {"kind": "drop", "target": {"link": ["scheduler", "rollout-1"]}, "probability": 0.3, "heal_after_s": 1},
        {"kind": "delay", "target": {"name": "trainer"}, "delay_ms": 30, "jitter_ms": 30, "heal_after_s": 1},
        {"kind": "duplicate", "target": {"name": "rollout-0"}, "probability": 0.5, "heal_after_s": 1},
        {"kind": "corrupt", "target": {"chunk": {}}, "heal_after_s": 1},
        {"kind": "preempt", "target": {"name": "rollout-1"}, "notice_s": 1, "grace_s": 1},
        {"kind": "disk_full", "heal_after_s": 0.5},
        {"kind": "clock", "target": {"role": "trainer"}, "jump_s": -86400, "heal_after_s": 1},
        {"kind": "out_of_memory", "target": {"role": "trainer"}},
    ]
    for number, fault in enumerate(faults):
        fault["after_step"] = 1 + 10 * number
    run = headrace_run(job | {"steps": 120}, faults=faults, seed=11)
    summary = run.finish(timeout_s=550)

    assert summary["faults"] == {"injected": len(faults), "failed": 0, "skipped": 0}
    injected = run.events("fault_injected")
    assert sorted((row["fault"], row["kind"]) for row in injected) == [(n, f["kind"]) for n, f in enumerate(faults)]
    healed = {row["kind"] for row in run.events("fault_healed")}
    assert healed >= {"slow", "partition", "drop", "delay", "duplicate", "corrupt", "disk_full", "clock"}
    assert summary["prompts_lost"] == summary["samples_trained_twice"] == 0
    assert summary["restarts"] >= 4, "killed, hung, preempted, and the scheduler without its disk"
    report = run.report()
    assert report.counted["tokens_followed"] == report.counted["tokens"] > 10_000
    assert report.counted["asks"] > 100
    code, told = doctor(run.run_dir)
    assert (code, told["clean"], told["state"], told["checked"]["faults"]) == (0, True, "finished", len(faults))


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_plan_that_kills_its_own_head_goes_on_with_the_next_one(headrace_run: StartRun, job: dict[str, Any]) -> None:
    """Killed twice and stopped once, the head comes back; no strike is repeated, none forgotten."""
    faults: list[dict[str, Any]] = [
        {"kind": "kill", "target": {"role": "head"}, "after_step": 5},
        {"kind": "kill", "target": {"role": "rollout"}, "after_step": 12, "times": 2, "every_s": 4},
        {"kind": "hang", "target": {"role": "head"}, "after_step": 40},
        {"kind": "kill", "target": {"role": "head"}, "after_step": 56},
    ]
    run = headrace_run(job | {"steps": 75}, faults=faults)
    summary = run.finish()
    assert summary["faults"] == {"injected": 5, "failed": 0, "skipped": 0}
    assert [row["fault"] for row in run.events("fault_announced")] == [0, 2, 3]
    assert len(run.events("faults_started")) == 1
    assert run.report().counted["scheduler_lives"] == 4


@pytest.mark.timeout(400)
def test_a_run_that_is_killed_as_a_whole_is_told_as_crashed_and_its_resumption_is_clean(
    headrace_run: StartRun, job: dict[str, Any]
) -> None:
    """Dead without a word, with everything that it had started; doctor says so; a resume finishes the job."""
    run = headrace_run(job | {"steps": 20}, name="whole")
    run.wait_for_step(5)
    assert len(processes_of(run.run_dir)) >= 6
    run.kill()
    # The kernel ends the others behind their parent: until the head's journal is closed, the run counts as running.
    run.settle("run told as crashed", lambda: run.report().state is RunState.CRASHED)
    assert doctor(run.run_dir)[0] == 0
    run.settle("end of all processes", lambda: not processes_of(run.run_dir))

    run.resume()
    run.finish()
    assert run.report().counted["scheduler_lives"] == 2


@pytest.mark.timeout(400)
def test_each_process_of_a_run_may_be_killed_over_the_control_socket_and_what_cannot_be_done_is_refused(
    headrace_run: StartRun, job: dict[str, Any]
) -> None:
    """SIGKILL to a rollout worker, the reward worker, the weight server and the trainer, one after the other.

    After each the run moves on; at the end every sample of every step is accounted for exactly once, restarts are
    counted, and no process and no shared memory is left.
    """
    run = headrace_run(job | {"steps": 100_000}, name="inject")
    run.wait_for_step(2)
    names = ("rollout-0", "rewards", "weights", "trainer")
    # one worker does for the first steps: the other may still be starting
    before = run.wait_until(
        "all of them", lambda: found if {*names, "rollout-1"} <= set(found := run.processes()) else None
    )

    for fault, error, says in (
        ({"kind": "kill", "target": {"name": "rollout-7"}}, NotNow, "there is no process 'rollout-7'; there are: "),
        ({"kind": "kill", "target": {"name": "scheduler"}}, NotNow, "lives in the head's process: take role head"),
        ({"kind": "kill", "target": {"node": "mars"}}, NotNow, "there is no node 'mars'"),
        ({"kind": "kill", "target": {"role": "node"}}, NotNow, "no other node has joined"),
        ({"kind": "drop", "target": {"link": ["head", "scheduler"]}}, NotNow, "are one process here"),
        ({"kind": "slow", "target": {"name": "head"}}, NotNow, "nobody is there to slow it down"),
        ({"kind": "corrupt", "target": {"chunk": {"version": 10**6}}}, NotNow, "no segment of version 1000000"),
        ({"kind": "kill", "target": {"role": "rollout"}, "at_s": 3}, BadArgs, "fault.at_s"),
        ({"kind": "kill", "target": {"link": ["a", "b"]}}, BadArgs, "something that kill can hit"),
        ({"kind": "kill", "target": {"name": "trainer", "job": "other"}}, NotNow, "this run is of job 'small'"),
    ):
        with pytest.raises(error) as caught:
            run.call("inject", {"fault": fault})
        assert says in str(caught.value), caught.value
    with pytest.raises(ConfigError, match=r"fault\.factr"):
        run.inject("slow", "trainer", factr=3)
    assert run.processes() == before, "what was refused has done nothing"
    assert {row["why"][:5] for row in run.events("fault_failed")} >= {"there"}

    for name in names:
        steps = len(run.rows())
        assert run.inject("kill", name) == [f"{name} (process {before[name]} on head)"]
        run.wait_for_event("child_restarting", child=name, cause="killed")
        run.wait_until(f"a new {name}", lambda name=name: _lives(run, name) > 1)
        run.wait_for_step(steps + 5)
    run.inject("hang", "weights")
    run.wait_until("another one", lambda: _lives(run, "weights") > 2)
    command = [sys.executable, "-m", "main", "ctl", "--control", str(run.run_dir), "inject", "partition"]
    done = subprocess.run(
        [*command, "link=head,rollout-1", "--for", "2", "--json"], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["kind"] == "partition"
    run.wait_for_event("worker_down", worker="rollout-1", reason="unreachable")
    run.wait_for_event("fault_healed", kind="partition")
    steps = len(run.rows())
    run.wait_for_step(steps + 10)
    assert run.processes()["rollout-1"] == before["rollout-1"], "a short cut is forgiven: the process is the same"

    assert doctor(run.run_dir)[1]["state"] == "running"
    run.interrupt()
    summary = run.finish(state="interrupted")
    lost, twice, restarts = (summary[name] for name in ("prompts_lost", "samples_trained_twice", "restarts"))
    assert (lost, twice, restarts) == (0, 0, len(names) + 1)
    every_sample_once(run.run_dir, summary["steps"])
    nothing_left(run.run_dir)
    code, told = doctor(run.run_dir)
    assert (code, told["state"], told["violations"]) == (0, "interrupted", [])


def _lives(run: HeadraceRun, name: str) -> int:
    return sum(event["child"] == name for event in run.events("child_started"))


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ("faults:\n  - {kind: kill, target: {name: rollot-1}}\n", "faults.0.target.name: no process of this run"),
        ("faults:\n  - {kind: kill, target: {role: rollout}, after_step: 900}\n", "faults.0.after_step: 900 is more"),
        ("faults:\n  - {kind: kill, target: {link: [a, b]}}\n", "plan.yaml:2: faults.0.target: "),
    ],
)
def test_a_plan_that_cannot_be_is_refused_before_the_run_begins(
    headrace_run: StartRun, job: dict[str, Any], tmp_path: Path, plan: str, says: str
) -> None:
    (tmp_path / "plan.yaml").write_text(plan)
    run = headrace_run(job, faults=tmp_path / "plan.yaml")
    assert run.finish(clean=False) == {}
    assert run.process.returncode == 2
    assert says in run.last_words()
    assert not run.run_dir.exists()
