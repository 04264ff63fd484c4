"""``headrace bench multiplex`` on real processes, as short as it can be; and what it makes of its runs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks._jobs import BenchmarkFailed
from benchmarks._processes import ROOT
from benchmarks.jobs import multiplex
from benchmarks.jobs._shared_runs import Life, PairRun, Window
from configs.errors import ConfigError
from configs.loader import load_job
from configs.services import ServicesConfig, problems_with
from supervisors.preparation.model_preparation import prepare_model
from supervisors.testing.run_under_test import RunRecord

KEYS = {"jobs", "trainer_seconds_saved", "slowdown_max", "switch_p50_s", "switch_p99_s"}
PROMISES = {"bit_identical", "lost", "twice"}
JOB = ROOT / "benchmarks" / "jobs" / "multiplex.yaml"
SMALL = ["model.hidden=32", "model.layers=1", "model.warm_start_steps=0"]


def played(directory: Path, step_s: dict[str, float], trainers: int, **row: float) -> PairRun:
    """Jobs whose ten steps begin at 100 s and take that long, and trainers that are there from 90 s on."""
    jobs: dict[str, RunRecord] = {}
    for name, each_s in step_s.items():
        (directory / name).mkdir(parents=True)
        jobs[name] = RunRecord(directory / name)
        lines = [{"event": "version_available", "version": v, "time_s": 100 + v * each_s} for v in range(11)]
        (directory / name / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        rows = "".join(json.dumps({"step": step} | row) + "\n" for step in range(10))
        (directory / name / "metrics.jsonl").write_text(rows)
    return PairRun(jobs, {}, {pid: Life(90.0, 200.0) for pid in range(trainers)}, "")


def test_one_trainer_for_two_saves_what_the_slowdown_leaves(tmp_path: Path) -> None:
    """Steps of 1 s become such of 1.1 s: a trainer a step costs 1 s before, and 0.55 s after."""
    own, shared = Window(), Window()
    told = {"service_wait_s": 0.06, "switch_s": 0.04, "compute_s": 0.33}
    own.add(played(tmp_path / "own", {"first": 1.0, "second": 1.0}, 2), skip=2)
    for repeat in ("a", "b"):
        shared.add(played(tmp_path / repeat, {"first": 1.1, "second": 1.1}, 1, **told), skip=2)
    found = multiplex.compared(own, shared)
    assert found["trainer_seconds_saved"] == pytest.approx(0.45)
    assert found["slowdown_max"] == found["jobs"]["first"]["told_slowdown"] == pytest.approx(1.1)
    assert (found["switch_p50_s"], found["switches"]) == (0.04, 2 * 2 * 8)
    assert found["trainers"] == {"own": 2.0, "shared": 1.0}
    assert found["bubble"] == pytest.approx(1 - 2 * 0.33 / 1.1, abs=1e-3)


def test_only_the_time_in_which_both_are_at_work_counts(tmp_path: Path) -> None:
    window = Window()
    window.add(played(tmp_path, {"first": 1.0, "second": 3.0}, 1), skip=1)
    assert window.seconds == pytest.approx(7.0), "from the second's first step to the first's last"
    assert (window.jobs["first"].steps, window.jobs["second"].steps) == (7, 2)
    with pytest.raises(BenchmarkFailed, match="job second: no whole step while both were at work"):
        window.add(played(tmp_path / "again", {"first": 1.0, "second": 6.0}, 1), skip=1)


def test_what_was_lost_and_what_differs_is_a_goal_missed() -> None:
    good: dict[str, Any] = {"trainer_seconds_saved": 0.4, "slowdown_max": 1.1, "differ": [], "lost": 0, "twice": 0}
    assert multiplex.missed(good) == []
    assert multiplex.missed(good | {"slowdown_max": 1.2, "differ": ["first: losses"], "twice": 1}) == [
        "slowdown_max: 1.2, the goal is 1.15",
        "first: losses differ from the job alone",
        "twice is 1",
    ]


@pytest.mark.long
def test_the_service_has_room_for_one_of_the_jobs_or_for_both_and_threads_are_named(tmp_path: Path) -> None:
    job = load_job(JOB, SMALL)
    model = asyncio.run(prepare_model(job, tmp_path))
    assert model is not None
    for room, jobs in (("one", 1), ("both", 2)):
        config = ServicesConfig.model_validate(multiplex.services_for(job, model, room))
        each = multiplex.state_bytes(model, dtype="float32", replicas=1)
        assert config.services[0].memory_bytes // each == jobs
        for file in multiplex.write_jobs(JOB, tmp_path / room, SMALL, service=multiplex.SERVICE):
            assert problems_with(load_job(file), config) == []
    with pytest.raises(ConfigError, match="explicit threads"):
        multiplex.services_for(load_job(JOB, ["trainer.threads=0"]), model, "one")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_bench_multiplex_runs_the_jobs_alone_side_by_side_and_shared(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sets = [word for setting in SMALL for word in ("--set", setting)]
    few = ["--steps", "40", "--skip", "1", "--cores", "64", "--keep", str(tmp_path)]
    assert multiplex.main(["--json", *few, *sets]) == 0
    told = json.loads(capfd.readouterr().out)
    assert set(told) >= KEYS
    assert (told["bit_identical"], told["lost"], told["twice"]) == (True, 0, 0), told["differ"]
    assert told["switches"] > 0 and told["switch_p50_s"] <= told["switch_p99_s"]
    assert told["trainers"] == {"own": 2.0, "shared": 1.0}
    assert set(told["jobs"]) == {"first", "second"}
