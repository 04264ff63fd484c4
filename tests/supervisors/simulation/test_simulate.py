"""Simulated runs: they finish, they repeat themselves, they say what is wrong, and who waits for whom."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from actors.fleet.returns import Returns
from actors.scheduler.scheduler import Scheduler
from configs.scenario import Scenario
from supervisors.cli.app import app
from supervisors.simulation.runner import Outcome, simulate
from tests.supervisors.simulation.scenarios import CHAOS_FILE, ROOT, calm, chaos, scenario


def plan(*faults: dict[str, Any], **changes: Any) -> Scenario:
    return scenario(faults={"plan": list(faults)}, **changes)


def told(outcome: Outcome) -> str:
    return "\n".join([*outcome.faults, *outcome.violations, outcome.report])


def test_a_job_without_faults_finishes_on_the_virtual_clock() -> None:
    outcome = simulate(scenario(), 1)
    assert (outcome.violations, outcome.faults) == ([], [])
    assert 5 < outcome.virtual_seconds < 60
    assert outcome.seconds < 10


def test_equal_seeds_give_equal_hashes_and_others_do_not() -> None:
    first = simulate(chaos(), 7)
    other = simulate(chaos(), 8)
    again = simulate(chaos(), 7)
    assert (again.hash, again.events, again.faults) == (first.hash, first.events, first.faults)
    assert other.hash != first.hash


def test_equal_seeds_give_equal_hashes_in_other_processes_with_other_string_hashes() -> None:
    seeds = (11, 12)
    here = [simulate(chaos(), seed).hash for seed in seeds]
    for hash_seed in ("1", "2"):
        assert [hash_of(seed, hash_seed) for seed in seeds] == here


def hash_of(seed: int, hash_seed: str) -> str:
    command = [sys.executable, "-P", "-m", "main", "simulate", str(CHAOS_FILE), "--seed", str(seed), "--json"]
    environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=True)
    return json.loads(done.stdout.splitlines()[-1])["hash"]


@pytest.mark.parametrize("role", ["rollout", "trainer", "weights", "rewards", "head"])
def test_a_process_may_be_killed(role: str) -> None:
    outcome = simulate(plan({"kind": "kill", "target": {"role": role}, "at_s": 3.0}), 3)
    assert len(outcome.faults) == 1, told(outcome)
    assert outcome.violations == [], told(outcome)


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "hang", "target": {"role": "rollout"}, "at_s": 3.0},
        {"kind": "hang", "target": {"role": "trainer"}, "at_s": 3.0, "heal_after_s": 0.5},
        {"kind": "slow", "target": {"role": "rollout"}, "at_s": 1.0, "factor": 20.0, "heal_after_s": 5.0},
        {"kind": "partition", "target": {"node": "node-1"}, "at_s": 3.0, "heal_after_s": 6.0},
        {"kind": "partition", "target": {"link": ["head", "rollout"]}, "at_s": 3.0, "heal_after_s": 1.0},
        {"kind": "drop", "target": {"role": "rollout"}, "at_s": 0.0, "probability": 0.2, "heal_after_s": 8.0},
        {"kind": "delay", "target": {"role": "weights"}, "at_s": 0.0, "delay_ms": 500, "heal_after_s": 8.0},
        {"kind": "duplicate", "target": {"role": "trainer"}, "at_s": 0.0, "probability": 0.5, "heal_after_s": 8.0},
        {"kind": "corrupt", "target": {"chunk": {"where": "served"}}, "at_s": 2.0, "heal_after_s": 4.0},
        {"kind": "corrupt", "target": {"chunk": {"where": "segment"}}, "after_step": 1, "heal_after_s": 4.0},
        {"kind": "preempt", "target": {"role": "rollout"}, "at_s": 3.0, "notice_s": 1.0, "grace_s": 1.0},
        {"kind": "preempt", "target": {"role": "node"}, "at_s": 3.0, "notice_s": 0.0, "grace_s": 1.0},
        {"kind": "kill", "target": {"role": "node"}, "at_s": 3.0},
        {"kind": "kill", "target": {"node": "head"}, "at_s": 6.0},
        {"kind": "hang", "target": {"role": "head"}, "at_s": 3.0, "heal_after_s": 5.0},
        {"kind": "disk_full", "at_s": 3.0, "heal_after_s": 1.0},
        {"kind": "clock", "target": {"role": "trainer"}, "at_s": 3.0, "jump_s": -3600.0, "heal_after_s": 2.0},
        {"kind": "out_of_memory", "target": {"role": "trainer"}, "at_s": 1.0},
    ],
    ids=lambda fault: f"{fault['kind']}-{next(iter(fault.get('target', {'disk': 'full'}).values()))}",
)
def test_each_kind_of_fault_strikes_and_is_survived(fault: dict[str, Any]) -> None:
    outcome = simulate(plan(fault, nodes=2), 5)
    assert len(outcome.faults) == 1, told(outcome)
    assert outcome.violations == [], told(outcome)


def test_what_is_slowed_down_already_is_not_slowed_down_again() -> None:
    slow = {"kind": "slow", "target": {"name": "rollout-0"}, "factor": 20.0, "heal_after_s": 5.0}
    outcome = simulate(plan(slow | {"at_s": 1.0}, slow | {"at_s": 1.1}), 5)
    assert len(outcome.faults) == 1, told(outcome)
    assert outcome.violations == [], told(outcome)


def test_in_sync_mode_faults_change_neither_the_weights_nor_the_samples() -> None:
    busy = chaos()
    busy = busy.model_copy(update={"jobs": [job for job in busy.jobs if job.mode == "sync"], "jobs_at_once": [3]})
    struck = 0
    for seed in range(4):
        outcome = simulate(busy, seed)
        struck += len(outcome.faults)
        assert outcome.violations == [], told(outcome)
        assert outcome.learned == simulate(calm(busy), seed).learned, told(outcome)
    assert struck > 12


def test_a_run_in_which_nothing_moves_is_a_deadlock_that_names_who_waits_for_whom() -> None:
    outcome = simulate(scenario(jobs=[{"name": "a", "workers": 0}], stall_s=30), 0)
    assert outcome.violations[0] == "deadlock: nothing has moved for 30 s"
    assert "job a waits for a rollout worker: 8 samples are queued and none has registered" in outcome.report
    assert "head.a.trainer: trainer: train at locks.py" in outcome.report


def test_an_ask_that_nobody_answers_is_named_with_both_its_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(self: Scheduler, order: object) -> None:
        await self.ctx.sleep(1e9)

    monkeypatch.setattr(Scheduler, "open_step", never)
    limits = {"ask_timeout_s": 1000.0, "trainer_patience_s": 2000.0}
    outcome = simulate(scenario(stall_s=30, limits=limits), 0)
    assert "deadlock" in outcome.violations[0]
    assert re.search(
        r"head\.a\.trainer: trainer has waited [0-9.]+ s for scheduler\.a@head#\w+ \(ask scheduler\.open_step\)",
        outcome.report,
    )


def test_a_call_that_is_not_deterministic_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    code = compile("import time\ndef now(self):\n    return time.monotonic()", "x", "exec")
    names: dict[str, Any] = {"__name__": "actors.trespasser"}
    exec(code, names)
    monkeypatch.setattr(Scheduler, "need_batch", names["now"])
    outcome = simulate(scenario(), 0)
    assert any("time.monotonic is called by actors.trespasser, line 3" in v for v in outcome.violations), told(outcome)


def result_in(stdout: str) -> dict[str, Any]:
    """The last JSON object: threads of earlier tests in this process may have put in a word of their own."""
    objects = [line for line in stdout.splitlines() if line.startswith("{")]
    assert objects, f"no result in {stdout!r}"
    return json.loads(objects[-1])


def test_a_failing_seed_is_told_with_the_command_that_shows_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Returns, "lose", lambda self, worker, *_, **__: self._scope.workers.by_name.pop(worker.name))
    runner = CliRunner()
    many = runner.invoke(app, ["simulate", str(CHAOS_FILE), "--seeds", "0..5", "--json"])
    result = result_in(many.stdout)
    assert (many.exit_code, result["seeds"], set(result)) == (1, 6, {"seeds", "violations", "failing", "seconds"})
    failing = result["failing"][0]
    assert failing["replay"] in many.stderr
    replay = runner.invoke(app, [*failing["replay"].split()[1:], "--json"])
    again = result_in(replay.stdout)
    assert (replay.exit_code, again["seed"]) == (1, failing["seed"])
    assert again["violations"][0] == failing["violation"]
    assert set(again) == {"seed", "hash", "violations", "virtual_seconds", "seconds", "events"}


def test_seeds_may_be_shared_among_processes() -> None:
    done = CliRunner().invoke(app, ["simulate", str(CHAOS_FILE), "--seeds", "0..3", "--processes", "2", "--json"])
    assert (done.exit_code, json.loads(done.stdout)["seeds"]) == (0, 4)


def test_what_happens_is_told_in_virtual_time_to_those_who_want_it() -> None:
    told: list[str] = []
    with_words = simulate(plan({"kind": "kill", "target": {"name": "rollout-1"}, "at_s": 2.0}), 1, told.append)
    silent = simulate(plan({"kind": "kill", "target": {"name": "rollout-1"}, "at_s": 2.0}), 1)
    assert with_words.hash == silent.hash, "looking changes nothing"
    assert any(re.match(r" +\d+\.\d{4}  fault .*kind=kill", line) for line in told)
    assert any("worker_down" in line for line in told)
