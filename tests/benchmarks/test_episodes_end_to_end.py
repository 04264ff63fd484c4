"""``headrace bench episodes``: its games, its control and its verdict; and held-out episodes in a real run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks._processes import ROOT
from benchmarks.jobs import episodes
from benchmarks.jobs._shuffled import advantage
from configs.loader import load_job

PRESET = ROOT / "configs" / "episodes.yaml"


def test_the_control_gives_siblings_each_others_rewards_and_a_replay_the_same_ones() -> None:
    lengths = np.arange(8)
    groups = [np.array([0.0, 0.0, 0.25, 0.5, 0.5, 0.75, 1.0, n / 400]) for n in range(400)]
    mixed = np.array([advantage(rewards, lengths) for rewards in groups])
    again = np.array([advantage(rewards, lengths) for rewards in groups])
    assert (mixed == again).all()
    standard = np.array([(rewards - rewards.mean()) / (rewards.std() + 1e-6) for rewards in groups])
    assert np.allclose(np.sort(mixed), np.sort(standard)), "nothing but their order has changed"
    assert abs(np.corrcoef(mixed.ravel(), standard.ravel())[0, 1]) < 0.1


def test_no_game_is_played_twice(tmp_path: Path) -> None:
    job = load_job(PRESET, episodes.overrides(tmp_path))
    assert job.eval is not None and job.eval.samples == 8
    rows = [line for name in ("train", "held_out") for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
    assert len(set(rows)) == len(rows) == 90


def test_what_does_not_rise_in_each_seed_or_rises_in_the_control_is_said() -> None:
    good = {"avg_at_8_first": [0.4, 0.4], "avg_at_8_last": [0.6, 0.5], "control_first": 0.4, "control_last": 0.45}
    assert episodes.missed(good) == []
    assert len(episodes.missed(good | {"avg_at_8_last": [0.6, 0.42]})) == 1
    assert len(episodes.missed(good | {"control_last": 0.6})) == 1


@pytest.mark.long
@pytest.mark.timeout(400)
def test_held_out_episodes_of_a_checkpoint_by_itself_are_those_of_its_run(tmp_path: Path) -> None:
    small = ["steps=1", "model.hidden=32", "model.layers=1", "model.warm_start_steps=60", "metrics.tensorboard=false"]
    sets = [part for one in [*small, *episodes.overrides(tmp_path), "eval.prompts=4"] for part in ("--set", one)]
    run, checkpoint = tmp_path / "run", tmp_path / "run/checkpoints/step_000001"
    summary = headrace("run", str(PRESET), "--dir", str(run), *sets)
    rows = [json.loads(line) for line in (run / "eval.jsonl").read_text().splitlines()]
    assert [row["version"] for row in rows] == [0, 1] and all(row["samples"] == 32 for row in rows)
    assert all(1 <= row["turns_mean"] == row["env_guesses"] <= 4 for row in rows)
    assert summary["samples"] == 64 and summary["tokens_discarded"] == 0
    again = headrace("eval", str(checkpoint), str(PRESET), "--dir", str(tmp_path / "again"), *sets)
    assert again == {key: rows[1][key] for key in ("avg_at_k", "pass_at_k", "samples", "response_tokens_mean")}


def headrace(*words: str) -> dict[str, object]:
    command = [sys.executable, str(ROOT / "main.py"), *words, "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
