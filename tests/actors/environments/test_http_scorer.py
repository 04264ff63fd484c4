"""A remote scorer: what is sent, what is taken for a reward, what is tried again, and what ends the run."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from email.utils import formatdate
from pathlib import Path
from typing import Any, cast

import msgpack
import pytest

from actors.environments.errors import RewardRefused
from actors.environments.scoring.batches import Asked
from actors.environments.scoring.examples import Example
from actors.environments.scoring.http_scorer import HttpScorer
from actors.environments.scoring.scorer_frames import ScorerVerdict
from actors.environments.scoring.scorer_pool import ScorerPool
from configs.schema import JobConfig
from tests.chat_tokenizer import save_tokenizer
from tests.scorer_server import Question, Reply, rewards, scorer_server
from tests.smallest_job import smallest_job


def job_at(url: str, timeout_s: float = 5.0, limits: dict[str, Any] | None = None, **reward: Any) -> JobConfig:
    section = {"kind": "http", "url": url, "timeout_s": timeout_s, **reward}
    return smallest_job(
        reward=section, limits=limits or {}, data={"path": "unused.jsonl", "template": "Q: {prompt}A: "}
    )


def scorer_of(job: JobConfig) -> closing[HttpScorer]:
    return closing(HttpScorer(job, "reward", job.reward, ""))


def ask(job: JobConfig, *responses: str) -> list[ScorerVerdict]:
    asked = [Asked(text, Example("2+2", "4", 0, {}), job.data) for text in responses]
    with scorer_of(job) as scorer:
        return scorer.score(asked, lambda: None)


def test_the_question_has_the_shape_that_remote_scorers_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCORER_KEY", "secret-7")
    with scorer_server(lambda _: rewards(1, -0.5)) as server:
        found = ask(job_at(server.url, key_env="SCORER_KEY"), "4", "five")
    assert [one.reward for one in found] == [1.0, -0.5]
    assert server.questions == [
        {"query": ["Q: 2+2A: 4", "Q: 2+2A: five"], "prompts": ["Q: 2+2A: "] * 2, "labels": ["4", "4"]}
    ]
    assert server.headers[0]["Authorization"] == "Bearer secret-7"


def test_what_is_no_finite_number_costs_its_own_sample_only() -> None:
    reply = (200, b'{"rewards": [0, NaN, null, "1", true, Infinity, 2.5]}')
    with scorer_server(lambda _: reply) as server:
        found = ask(job_at(server.url), *"abcdefg")
    finite = [one.reward for one in found]
    assert finite[0] == 0.0 and finite[6] == 2.5 and finite[2:5] == [None] * 3
    assert found[3].reason == "its reward is str, expected a number"


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (rewards(1.0), "it gave 1 rewards for 2 responses"),
        (rewards(1.0, 1.0, 1.0), "it gave 3 rewards for 2 responses"),
        ((200, b"<html>Please log in</html>"), "its reply is HTML"),
        ((200, b'{"scores": [1, 1]}'), "its reply has no list 'rewards'"),
        ((200, b"[1, 1]"), "its reply has no list 'rewards'"),
        ((200, b" " * 2000), "longer than limits.remote_reply_bytes (1000)"),
    ],
)
def test_another_reply_is_no_result_for_all_and_before_the_run_it_is_refused(reply: Reply, why: str) -> None:
    with scorer_server(lambda _: reply) as server:
        job = job_at(server.url, limits={"remote_reply_bytes": 1000})
        found = ask(job, "a", "b")
        asked = Asked("4", Example("2+2", "4", 0, {}), job.data)
        assert [one.reward for one in found] == [None, None]
        assert why in found[0].reason
        if reply != rewards(1.0):
            with scorer_of(job) as scorer, pytest.raises(RewardRefused, match=r"reward\.url http://127\.0\.0\.1"):
                scorer.try_once(asked)


@pytest.mark.parametrize("status", [500, 503, 429, 408])
def test_a_server_that_is_not_well_is_asked_again(status: int) -> None:
    replies = iter([(status, b"later"), (status, b"later"), rewards(0.25)])
    with scorer_server(lambda _: next(replies)) as server:
        found = ask(job_at(server.url), "4")
    assert found == [ScorerVerdict(0.25)]
    assert len(server.questions) == 3


@pytest.mark.parametrize("asked_s", [0.6, "date", -5, "soon"])
def test_a_server_that_says_when_to_come_again_is_left_alone_until_then(asked_s: float | str) -> None:
    """Seconds or a date; what is past or cannot be read is nobody's wish. HTTP tells whole seconds only."""
    in_a_second = formatdate(math.ceil(time.time()) + 1, usegmt=True)
    said = {"date": in_a_second, 0.6: "1"}.get(asked_s, str(asked_s))
    replies: Iterator[Reply] = iter([(429, b"", {"Retry-After": said}), rewards(0.5)])
    with scorer_server(lambda _: next(replies)) as server:
        began_s = time.monotonic()
        found = ask(job_at(server.url), "4")
        took_s = time.monotonic() - began_s
    assert found == [ScorerVerdict(0.5)]
    assert took_s >= 0.9 if said in ("1", in_a_second) else took_s < 0.9


def test_a_server_that_wants_more_time_than_there_is_has_no_result_at_the_deadline() -> None:
    with scorer_server(lambda _: (503, b"", {"Retry-After": "3600"})) as server:
        (found,) = ask(job_at(server.url, timeout_s=0.4), "4")
    assert found.reward is None and "within reward.timeout_s (0.4 s); last: it answered 503" in found.reason
    assert len(server.questions) == 1


def test_one_that_stays_ill_or_silent_is_no_result_within_the_deadline() -> None:
    gate = threading.Event()
    with scorer_server(lambda _: (503, b"")) as server:
        ill = ask(job_at(server.url, timeout_s=0.5), "a", "b")
        assert 2 <= len(server.questions) <= 5, "the pause grows"
    gone = ask(job_at(server.url, timeout_s=0.3), "a")

    def silent(_: Question) -> Reply:
        gate.wait(5)
        return rewards(1)

    with scorer_server(silent) as server:
        late = ask(job_at(server.url, timeout_s=0.3), "a")
        gate.set()
    assert [one.reward for one in (*ill, *gone, *late)] == [None] * 4
    assert "within reward.timeout_s (0.5 s); last: it answered 503" in ill[1].reason
    assert "ConnectError" in gone[0].reason
    assert "within reward.timeout_s (0.3 s)" in late[0].reason


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        ((404, b"no such page"), "answered 404 Not Found, as it would again: no such page"),
        ((400, b"bad secret-7 given"), r"answered 400 Bad Request, as it would again: bad \*\*\* given"),
        ((401, b""), r"it wants a key, or another one; reward\.key_env names the variable"),
    ],
)
def test_what_no_repeat_will_mend_is_refused_and_the_key_is_not_told(
    reply: Reply, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCORER_KEY", "secret-7")
    with scorer_server(lambda _: reply) as server, pytest.raises(RewardRefused, match=words) as refused:
        ask(job_at(f"{server.url}?token=hidden", key_env="SCORER_KEY"), "4")
    assert "secret-7" not in str(refused.value) and "hidden" not in str(refused.value)
    assert len(server.questions) == 1


def test_a_redirect_is_not_followed_for_the_key_would_go_with_it() -> None:
    with (
        scorer_server(lambda _: rewards(1.0)) as other,
        scorer_server(lambda _: (307, b"", {"Location": other.url})) as server,
        pytest.raises(RewardRefused, match="redirects are not followed"),
    ):
        ask(job_at(server.url), "4")
    assert other.questions == []


def test_a_key_that_is_not_there_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SCORER_KEY", raising=False)
    with pytest.raises(RewardRefused, match="the environment variable SCORER_KEY is not set"):
        scorer_of(job_at("http://127.0.0.1:9/", key_env="SCORER_KEY"))


# ------------------------------------------------------------ in the pool


def right(question: Question) -> Reply:
    """1 for the answer 4, and one response that is never scored."""
    texts = [query.removeprefix(prompt) for query, prompt in zip(question["query"], question["prompts"], strict=True)]
    return rewards(*(None if text == "odd" else float(text == "4") for text in texts))


def responses(*texts: str) -> list[tuple[str, bytes]]:
    context = cast("bytes", msgpack.packb(["2+2", "4", 0, {}]))
    return [(text, context) for text in texts]


async def test_the_pool_asks_in_bounded_batches_and_each_response_gets_its_verdict() -> None:
    with scorer_server(right) as server:
        pool = ScorerPool(job_at(server.url, batch_samples=2))
        await pool.start()
        verdicts = await pool.score(responses("4", "5", "odd", "4", "4"))
        await pool.close()
    assert [verdict.reward for verdict in verdicts] == [1.0, 0.0, None, 1.0, 1.0]
    assert verdicts[2].reason == "reward.kind http: its reward is NoneType, expected a number"
    assert [len(question["query"]) for question in server.questions] == [2, 2, 1]


async def test_a_remote_reward_is_a_part_of_the_sum_and_without_it_there_is_none() -> None:
    with scorer_server(right) as server:
        parts = [
            {"kind": "http", "url": server.url, "name": "judge", "weight": 0.5},
            {"kind": "exact_match", "name": "right"},
        ]
        pool = ScorerPool(smallest_job(reward={"parts": parts, "workers": 2}))
        await pool.start()
        verdicts = await pool.score(responses("4", "5", "odd"))
        await pool.close()
    assert [(verdict.reward, verdict.parts) for verdict in verdicts] == [
        (1.5, (1.0, 1.0)),
        (0.0, (0.0, 0.0)),
        (None, ()),
    ]


async def test_the_prompt_is_sent_as_the_policy_saw_it_and_a_refusal_in_mid_run_is_permanent(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "2+2", "answer": "4"}) + "\n")
    replies = iter([rewards(1.0), rewards(0.5), (422, b"field missing")])
    with scorer_server(lambda _: next(replies)) as server:
        reward = {"kind": "http", "url": server.url}
        job = smallest_job(reward=reward, data={"path": str(tmp_path / "rows.jsonl"), "chat": True})
        pool = ScorerPool(job, None, tmp_path / "model")
        await pool.start()
        context = (await pool.read(0, 1))["prompts"][0][3]
        (verdict,) = await pool.score([("4", context)])
        with pytest.raises(RewardRefused, match="422") as refused:
            await pool.score([("4", context)])
        await asyncio.wait_for(pool.close(), 10)
    assert verdict.reward == 0.5 and refused.value.permanent
    prompt = "<|im_start|>user\n2+2<|im_end|>\n<|im_start|>assistant\n"
    assert server.questions[1] == {"query": [prompt + "4"], "prompts": [prompt], "labels": ["4"]}
