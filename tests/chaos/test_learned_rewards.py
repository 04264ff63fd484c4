"""Real runs with rewards that are learned: behind HTTP, which may be ill or refuse, and in a process that is killed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from supervisors.testing.run_under_test import HeadraceRun
from tests.scorer_server import Question, Reply, rewards, scorer_server

ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.timeout(200)
def test_a_run_survives_a_scorer_that_is_ill_and_ends_with_a_sentence_where_it_is_refused(
    start_run: Callable[..., HeadraceRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCORER_KEY", "secret-7")
    count = itertools.count()

    def answer(question: Question) -> Reply:
        asked = next(count)
        if 2 <= asked < 5:
            return 503, b"starting"
        if asked > 12:
            return 403, b"key has expired"
        return rewards(*(len(query) % 3 for query in question["query"]))

    with scorer_server(answer) as server:
        reward = {"kind": "http", "url": server.url, "key_env": "SCORER_KEY"}
        run = start_run("remote", reward=reward, steps=200)
        summary = run.finish(state="failed")
    assert "reward.url http://127.0.0.1" in summary["error"] and "answered 403" in summary["error"]
    assert summary["steps"] >= 1 and len(server.questions) < 40
    assert all(row["samples_dropped"] == 0 for row in run.rows())
    for file in run.run_dir.rglob("*"):
        assert not file.is_file() or b"secret-7" not in file.read_bytes(), file


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_reward_model_whose_process_is_killed_is_loaded_again_and_no_sample_is_lost(
    headrace_run: Callable[..., HeadraceRun], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The preset, only smaller: its reward model is trained before the first step, and killed as it scores."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    job: dict[str, Any] = yaml.safe_load((ROOT / "configs" / "rlhf.yaml").read_text())
    job["model"] |= {"hidden": 48, "layers": 2, "warm_start_steps": 20}
    job["reward"]["parts"][0]["train"] |= {"pairs": 300, "steps": 20}
    job["algorithm"] |= {"group_size": 4, "prompts_per_step": 6}
    run = headrace_run(job | {"steps": 40})
    run.wait_for_step(5)
    _process_of_the_model(run.process.pid).kill()
    summary = run.finish()
    rows = run.rows()
    assert summary["steps"] == 40 and all(row["samples_dropped"] == 0 for row in rows)
    assert len({row["reward_learned_mean"] for row in rows}) > 10, "the model tells responses apart"
    assert all(row["reward_mean"] == pytest.approx(row["reward_learned_mean"]) for row in rows)
    (trained,) = run.events("reward_model_trained")
    assert (trained["reward"], trained["made"], trained["steps"]) == ("learned", "trained", 20)
    assert 0 <= trained["accuracy_held_out"] <= 1
    assert run.report().clean


def _process_of_the_model(pid: int) -> psutil.Process:
    """The one that holds torch, among all that score or read."""
    scorers = [
        child
        for child in psutil.Process(pid).children(recursive=True)
        if any(word.endswith("scorer_process") for word in child.cmdline())
    ]
    return max(scorers, key=lambda child: child.memory_info().rss)
