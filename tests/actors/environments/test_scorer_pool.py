"""Verifiers run elsewhere, under deadlines; a failure is a reason, never a reward of 0."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgpack
import psutil
import pytest

from actors.environments.errors import ScorerBroken
from actors.environments.scoring.scorer_pool import ScorerPool
from configs.schema import JobConfig
from tests.chat_tokenizer import save_tokenizer
from tests.smallest_job import smallest_job

VERIFIER = """
import os, subprocess, sys, time

def score(prompt, response, answer, **columns):
    if response == "start a child and hang":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        print("child", child.pid, flush=True)
        time.sleep(60)
    if response == "start a child that reads":
        child = subprocess.run([sys.executable, "-c", "import sys; print(len(sys.stdin.read()))"], capture_output=True)
        return float(child.stdout)
    if response == "hang":
        time.sleep(60)
    if response == "slow":
        time.sleep(0.5)
    if response == "die":
        os._exit(9)
    if response == "raise":
        raise KeyError("no such thing")
    if response == "nan":
        return float("nan")
    if response == "chatter":
        print("x" * 100_000, flush=True)
    print("printed by a verifier")
    return float(response == answer) + columns.get("bonus", 0)
"""


def job_with(function: str, timeout_s: float = 5.0, **sections: Any) -> JobConfig:
    """One scorer process: whoever comes next gets the one that was used before."""
    reward = {"kind": "function", "function": function, "timeout_s": timeout_s, "workers": 1}
    return smallest_job(reward=reward, **sections)


@pytest.fixture
def verifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_verifier.py").write_text(VERIFIER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "my_verifier:score"


async def test_each_response_gets_its_reward_in_order(verifier: str) -> None:
    """Order is kept, further columns arrive, and what a verifier prints does not disturb the frames."""
    pool = ScorerPool(job_with(verifier))
    await pool.start()
    verdicts = await pool.score([*responses("a", "b"), *responses("a", bonus=0.5)])
    await pool.close()
    assert [v.reward for v in verdicts] == [1.0, 0.0, 1.5]


async def test_a_verifier_that_hangs_costs_its_own_sample_only(verifier: str) -> None:
    """The process is killed at the deadline; the responses before and after it have their rewards."""
    pool = ScorerPool(job_with(verifier, timeout_s=2.0))
    await pool.start()
    verdicts = await pool.score(responses("a", "hang", "a"))
    await pool.close()
    assert [v.reward for v in verdicts] == [1.0, None, 1.0]
    assert "2.0 s" in verdicts[1].reason


@pytest.mark.parametrize(("response", "reason"), [("die", "died"), ("raise", "KeyError"), ("nan", "finite")])
async def test_a_verifier_that_fails_gives_a_reason_and_no_reward(verifier: str, response: str, reason: str) -> None:
    """Death, an exception and a number that is none are failures, and the pool goes on."""
    pool = ScorerPool(job_with(verifier))
    await pool.start()
    verdicts = await pool.score(responses(response, "a"))
    await pool.close()
    assert verdicts[0].reward is None
    assert reason in verdicts[0].reason
    assert verdicts[1].reward == 1.0


async def test_prompts_are_read_while_a_verifier_hangs_and_no_verifier_shares_a_process_with_the_tokenizer(
    verifier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one scorer hangs for 5 s before it is killed; its process knows neither transformers nor torch."""
    save_tokenizer(tmp_path)
    seen = tmp_path / "seen.txt"
    lines = "import sys", "heavy = sorted({'transformers', 'tokenizers', 'torch'} & set(sys.modules))"
    write = f"from pathlib import Path; Path({str(seen)!r}).write_text(str(heavy))"
    looks = "\n".join([*lines, write])
    (tmp_path / "my_verifier.py").write_text(VERIFIER.replace("def score", f"{looks}\n\ndef score"))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "abc", "answer": "c"}\n')
    job = job_with(verifier, data={"source": "jsonl", "path": str(tmp_path / "rows.jsonl")})
    pool = ScorerPool(job, model=tmp_path)
    await pool.start()
    scored = asyncio.create_task(pool.score(responses("hang")))
    await asyncio.sleep(0)
    read = await pool.read(0, 1)
    assert [text for _, _, text, _ in read["prompts"]] == ["abc"] and not scored.done()
    assert [verdict.reward for verdict in await scored] == [None]
    await pool.close()
    assert seen.read_text() == "[]"


async def test_a_scorer_that_cannot_be_made_says_why_at_start() -> None:
    """A typo in reward.function is an error of the start, not of each sample."""
    pool = ScorerPool(job_with("no_such_module:score"))
    with pytest.raises(ScorerBroken, match="no_such_module"):
        await pool.start()
    await pool.close()
    assert sys.executable


def responses(*texts: str, **columns: Any) -> list[tuple[str, bytes]]:
    """Answers to a prompt ``p`` whose right answer is ``a``, as journals of 0.1 have it."""
    return [(text, msgpack.packb(["p", "a", 0, columns])) for text in texts]


async def cancelled_in(pause_s: float, work: Coroutine[Any, Any, Any]) -> None:
    """``work`` begun, and given up after ``pause_s``."""
    task = asyncio.create_task(work)
    await asyncio.sleep(pause_s)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_asker_that_goes_away_leaves_no_verdict_to_the_next_one(verifier: str) -> None:
    """Its frames are still on the way: whoever comes next must not take them for its own."""
    pool = ScorerPool(job_with(verifier))
    await pool.start()
    await cancelled_in(0.2, pool.score(responses("slow", "a", "a")))
    verdicts = await pool.score(responses("b", "b", "a"))
    await pool.close()
    assert [v.reward for v in verdicts] == [0.0, 0.0, 1.0]


async def test_a_pool_that_is_closed_ends_what_is_under_way_and_what_waits(
    verifier: str, caplog: pytest.LogCaptureFixture
) -> None:
    """No task is left behind, abandoned or not, and nothing starts a process again."""
    pool = ScorerPool(job_with(verifier))
    await pool.start()
    before = asyncio.all_tasks()
    await cancelled_in(0.1, pool.score(responses("hang")))
    waiting = [asyncio.create_task(pool.score(responses("a"))) for _ in range(2)]
    await asyncio.sleep(0.1)
    await pool.close()
    outcomes = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 5)
    assert [type(outcome) for outcome in outcomes] == [ScorerBroken, ScorerBroken]
    assert asyncio.all_tasks() == before
    assert not caplog.records


async def test_a_batch_waits_for_a_slow_verifier_as_long_as_its_asker_does(verifier: str) -> None:
    """Slow is not broken: with a limit of the pool's own the samples of a healthy verifier were dropped."""
    pool = ScorerPool(job_with(verifier))
    await pool.start()
    pool._job = job_with(verifier, limits={"ready_timeout_s": 0.2})  # pyright: ignore[reportPrivateUsage]
    slow, next_one = await asyncio.gather(pool.score(responses("slow")), pool.score(responses("a")))
    await pool.close()
    assert [v.reward for v in (*slow, *next_one)] == [0.0, 1.0]


async def test_what_a_verifier_has_started_ends_with_it(verifier: str, tmp_path: Path) -> None:
    """Else each sample that times out would leave a process that computes on for ever."""
    log = tmp_path / "tasks.log"
    pool = ScorerPool(job_with(verifier, timeout_s=2.0), log)
    await pool.start()
    (verdict,) = await pool.score(responses("start a child and hang"))
    await pool.close()
    assert "no verdict within reward.timeout_s (2.0 s)" in verdict.reason
    pids = _children_told_of(log)
    assert pids
    await _until_none_runs(pids)


ROLE = """
import asyncio, msgpack, sys
from pathlib import Path
from actors.environments.scoring.scorer_pool import ScorerPool
from configs.schema import JobConfig

async def role():
    pool = ScorerPool(JobConfig.model_validate_json(sys.argv[1]), Path(sys.argv[2]))
    await pool.start()
    await pool.score([("start a child and hang", msgpack.packb(["p", "a", 0, {}]))])

asyncio.run(role())
"""


@pytest.mark.parametrize("killed", ["role", "scorer"])
async def test_what_a_verifier_has_started_ends_when_its_role_or_its_scorer_is_killed(
    verifier: str, tmp_path: Path, killed: str
) -> None:
    """Nobody is told: what is left of the group would compute on, on a machine that has forgotten it."""
    log = tmp_path / "tasks.log"
    job = job_with(verifier, timeout_s=60.0).model_dump_json()
    role = await asyncio.create_subprocess_exec(sys.executable, "-c", ROLE, job, str(log))
    async with asyncio.timeout(20):
        while not (log.exists() and _children_told_of(log)):
            await asyncio.sleep(0.05)
    (child,) = _children_told_of(log)
    scorer = psutil.Process(child).parent()
    assert scorer is not None
    if killed == "role":
        role.kill()
    else:
        scorer.kill()
    await _until_none_runs([child, scorer.pid])
    await asyncio.wait_for(role.wait(), 20)  # it hears that its scorer has died, and is done


def _children_told_of(log: Path) -> list[int]:
    return [int(line.split()[1]) for line in log.read_text().splitlines() if line.startswith("child")]


async def _until_none_runs(pids: list[int]) -> None:
    async with asyncio.timeout(5):
        while any(_runs(pid) for pid in pids):
            await asyncio.sleep(0.05)


def _runs(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


async def test_a_child_of_a_verifier_that_reads_its_input_finds_none(verifier: str) -> None:
    """The requests are not its input: it would wait for ever, or take them away."""
    pool = ScorerPool(job_with(verifier, timeout_s=5.0))
    await pool.start()
    verdicts = await pool.score(responses("start a child that reads", "a"))
    await pool.close()
    assert [v.reward for v in verdicts] == [0.0, 1.0]


async def test_what_a_verifier_prints_stays_within_its_bound(verifier: str, tmp_path: Path) -> None:
    log = tmp_path / "tasks.log"
    pool = ScorerPool(job_with(verifier, limits={"process_log_max_bytes": 300_000}), log=log)
    await pool.start()
    for _ in range(20):
        await pool.score([("chatter", msgpack.packb(["p", "a", 0, {}]))])
        kept = [path.stat().st_size for path in tmp_path.glob("tasks.log*")]
        assert sum(kept) <= 300_000 + 150_000 + 2 * 100_100, "the bound, the newest half of it, and a frame's prints"
    await pool.close()


async def test_a_verifier_that_prints_to_a_full_disk_gives_its_reward(verifier: str) -> None:
    pool = ScorerPool(job_with(verifier), log=Path("/dev/full"))
    await pool.start()
    [verdict] = await pool.score([("a", msgpack.packb(["p", "a", 0, {}]))])
    await pool.close()
    assert verdict.reward == 1.0
