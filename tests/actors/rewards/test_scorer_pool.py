"""Verifiers run elsewhere, under deadlines; a failure is a reason, never a reward of 0."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from actors.rewards.errors import ScorerBroken
from actors.rewards.scorer_pool import ScorerPool
from configs.schema import JobConfig
from tests.smallest_job import smallest_job

VERIFIER = """
import os, time

def score(prompt, response, answer, **columns):
    if response == "hang":
        time.sleep(60)
    if response == "die":
        os._exit(9)
    if response == "raise":
        raise KeyError("no such thing")
    if response == "nan":
        return float("nan")
    print("printed by a verifier")
    return float(response == answer) + columns.get("bonus", 0)
"""


def job_with(function: str, timeout_s: float = 5.0) -> JobConfig:
    return smallest_job(reward={"kind": "function", "function": function, "timeout_s": timeout_s})


@pytest.fixture
def verifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_verifier.py").write_text(VERIFIER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "my_verifier:score"


async def test_each_response_gets_its_reward_in_order(verifier: str) -> None:
    """Order is kept, further columns arrive, and what a verifier prints does not disturb the frames."""
    pool = ScorerPool(job_with(verifier))
    await pool.start()
    verdicts = await pool.score([("a", "p", "a", 0, {}), ("b", "p", "a", 0, {}), ("a", "p", "a", 0, {"bonus": 0.5})])
    await pool.close()
    assert [v.reward for v in verdicts] == [1.0, 0.0, 1.5]


async def test_a_verifier_that_hangs_costs_its_own_sample_only(verifier: str) -> None:
    """The process is killed at the deadline; the responses before and after it have their rewards."""
    pool = ScorerPool(job_with(verifier, timeout_s=2.0))
    await pool.start()
    verdicts = await pool.score([("a", "p", "a", 0, {}), ("hang", "p", "a", 0, {}), ("a", "p", "a", 0, {})])
    await pool.close()
    assert [v.reward for v in verdicts] == [1.0, None, 1.0]
    assert verdicts[1].timed_out
    assert "2.0 s" in verdicts[1].reason


@pytest.mark.parametrize(("response", "reason"), [("die", "died"), ("raise", "KeyError"), ("nan", "finite")])
async def test_a_verifier_that_fails_gives_a_reason_and_no_reward(verifier: str, response: str, reason: str) -> None:
    """Death, an exception and a number that is none are failures, and the pool goes on."""
    pool = ScorerPool(job_with(verifier))
    await pool.start()
    verdicts = await pool.score([(response, "p", "a", 0, {}), ("a", "p", "a", 0, {})])
    await pool.close()
    assert verdicts[0].reward is None
    assert reason in verdicts[0].reason
    assert verdicts[1].reward == 1.0


async def test_a_scorer_that_cannot_be_made_says_why_at_start() -> None:
    """A typo in reward.function is an error of the start, not of each sample."""
    pool = ScorerPool(job_with("no_such_module:score"))
    with pytest.raises(ScorerBroken, match="no_such_module"):
        await pool.start()
    await pool.close()
    assert sys.executable
