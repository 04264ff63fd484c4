"""``headrace bench modes`` on a job of a few steps, with a learned length ranking, and pictures of what it leaves."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from benchmarks._processes import ROOT
from benchmarks.jobs import modes
from configs.loader import load_job
from supervisors.cli.plot.page import draw
from supervisors.cli.plot.run_data import read_run
from supervisors.preparation.model_preparation import prepare_model

SMALL = [
    "model.hidden=32",
    "model.layers=1",
    "model.warm_start_steps=0",
    "algorithm.prompts_per_step=4",
    "algorithm.group_size=4",
    "rollout.max_running=4",
    "rollout.engine=simulated",
    "rollout.engine_options={base_s: 0.01, mean_tokens: 8}",
    "rollout.length_ranking=learned",
    "trainer.backend=simulated",
    "metrics.tensorboard=false",
    "limits.ranker_refresh_pairs=4",
    "limits.ranker_refresh_slices=1",
]


def test_ratios_are_of_the_baselines_that_were_run() -> None:
    speeds = {"sync": 10.0, "minibatch": 20.0, "async": 30.0}
    found = modes.ratios({mode: {"samples_per_second": speed} for mode, speed in speeds.items()})
    assert found["async"] == {"sync": 3.0, "minibatch": 1.5}
    assert modes.ratios({"async": {"samples_per_second": 1.0}}) == {"async": {}}


@pytest.mark.long
@pytest.mark.timeout(300)  # seconds on an idle machine, minutes on a busy one
def test_bench_modes_runs_each_mode_for_real_and_its_runs_can_be_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = ROOT / "configs" / "quickstart.yaml"
    (tmp_path / "model").mkdir()
    model = asyncio.run(prepare_model(load_job(file, SMALL), tmp_path / "model"))
    sets = [part for override in SMALL for part in ("--set", override)]
    short = ["--job", str(file), "--modes", "sync,dynamic", "--steps", "8", "--skip", "1"]
    places = ["--cores", "64", "--model", str(model), "--keep", str(tmp_path)]
    assert modes.main(["--json", *short, *places, *sets]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ratios"]["sync"] == {"sync": 1.0}
    for mode in ("sync", "dynamic"):
        row = found["modes"][mode]
        assert (row["prompts_lost"], row["samples_trained_twice"]) == (0, 0)
        assert 0.0 <= row["length_recall_20"] <= 1.0
        assert {"trainer", "rollout-0"} <= read_run(tmp_path / f"{mode}-0").lanes.keys()
    assert len(draw(read_run(tmp_path / "dynamic-0"), tmp_path / "pictures")) == 5
    # a run of eight steps may be over before the ranker has learned anything: tests/actors/ranker shows that it does
    events = [json.loads(line) for line in (tmp_path / "dynamic-0" / "events.jsonl").read_text().splitlines()]
    assert any(row["event"] == "child_started" and row["child"] == "ranker" for row in events)
