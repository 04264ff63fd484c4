"""A real run whose verifier fails on every response ends with its checkpoint and the cause, and goes on once mended."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from supervisors.testing.run_under_test import HeadraceRun

FAILS = """
def score(prompt, response, answer, **columns):
    if response == answer:
        return 1.0  # as in the trial before the start
    raise ValueError("what is this?")
"""


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_run_that_trains_on_nothing_fails_with_file_and_line_and_is_resumed_once_mended(
    start_run: Callable[..., HeadraceRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "failing_rewards.py"
    module.write_text(FAILS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    run = start_run("hopeless", reward={"kind": "function", "function": "failing_rewards:score"}, steps=20)
    summary = run.finish(state="failed")
    assert "had no verdict: ValueError: what is this? (failing_rewards.py:5)" in summary["error"]
    assert 3 <= summary["steps"] <= 4 and summary["reward_last"] is None and Path(summary["checkpoint"]).is_dir()
    assert {event["kind"] for event in run.events("trouble")} >= {"first_without_verdict", "samples_dropped"}
    assert all(row["reward_mean"] is None for row in run.rows())
    module.write_text(FAILS.replace("raise", "return 0.5  #"))
    run.resume(settings=["steps=9"])
    assert run.finish()["steps"] == 9
    assert run.report().clean
