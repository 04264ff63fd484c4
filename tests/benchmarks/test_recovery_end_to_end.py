"""``headrace bench recovery`` and ``headrace bench chaos`` on real processes, as short as they can be."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks._processes import ROOT
from benchmarks.jobs import chaos, recovery
from configs.loader import load_job
from supervisors.preparation.model_preparation import prepare_model

SHORT = ["rollout.workers=2", "rollout.max_tokens=24", "model.hidden=32", "model.layers=1", "trainer.backend=simulated"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    job = load_job(ROOT / "benchmarks" / "jobs" / "recovery.yaml", SHORT)
    path = asyncio.run(prepare_model(job, tmp_path_factory.mktemp("bench_model")))
    assert path is not None
    return path


def measured(main: Any, capfd: pytest.CaptureFixture[str], model: Path, *arguments: str) -> dict[str, Any]:
    sets = [word for setting in SHORT for word in ("--set", setting)]
    assert main([*arguments, *sets, "--json", "--model", str(model)]) == 0
    return json.loads(capfd.readouterr().out)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_bench_recovery_ends_with_the_times_of_faults_on_real_processes(
    model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    once = [word for what in ("kills", "hangs", "trainers", "heads") for word in (f"--{what}", "1")]
    told = measured(recovery.main, capfd, model, *once)
    times = {"detect_exit_s", "detect_hang_s", "reassign_p50_s", "reassign_p99_s", "head_to_progress_s",
             "trainer_to_progress_s"}  # fmt: skip
    assert times <= set(told)
    assert all(0 < told[name] < 60 for name in times), told
    assert told["reassign_p50_s"] == told["reassign_p99_s"] >= min(told["times"]["detect_exit_s"])
    assert told["reassign_p99_s"] < 5 and told["hang_reassign_s"] < 10, "far above the goals: this machine may be busy"
    assert told["detect_hang_s"] > told["detect_exit_s"], "a process that stands still is given a grace"
    assert 0 < told["exported"]["trainer_to_progress_s"] <= told["trainer_to_progress_s"]
    assert (told["prompts_lost"], told["samples_trained_twice"]) == (0, 0)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_bench_chaos_ends_with_what_was_lost_and_how_much_of_it_was_away(
    model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = {"base_s": 0.025, "decode_s": 0.0, "mean_tokens": 10}
    short = [
        "--set",
        "steps=7",
        "--set",
        f"rollout.engine_options={json.dumps(options)}",
        "--every-s",
        "3",
    ]
    told = measured(chaos.main, capfd, model, *short, "--skip", "1")
    assert told["kills"] == len(told["away_s"]) >= 1
    assert 0 < told["away"] < 1
    assert told["beyond"] == pytest.approx(told["lost"] - told["away"], abs=2e-4)
    assert told["samples_migrated"] > 0
