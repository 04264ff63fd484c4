"""What is asked with one key keeps nobody else waiting: long texts, many messages, many requests, ended episodes."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import aiohttp
import pytest

from actors.gateway.rendering import ChatTemplate
from actors.protocol.episodes import EpisodeName
from actors.protocol.session_keys import admin_key
from configs.limits import Limits
from tests.actors.gateway.gateway_world import NAME, World, gateway_world
from tests.actors.gateway.test_raw_requests import USER, Agent, ask

OTHER = EpisodeName(3, 8, 0, 1)
LONG = "lo mi ster " * 100_000


def in_world(tmp_path: Path, scenario, **settings) -> None:
    async def main() -> None:
        async with gateway_world(tmp_path, **settings) as world, aiohttp.ClientSession() as session:
            await scenario(world, Agent(world, session))

    asyncio.run(main())


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"prompt": LONG}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
        ("/tokenize", {"messages": [USER], "tools": [{"type": "function", "function": {"name": LONG}}]}, "messages"),
        ("/v1/chat/completions", ask(messages=[{"role": "user", "content": LONG}]), "messages"),
        ("/v1/chat/completions", ask(messages=[{"role": "user", "content": "x"}] * 5_000), "messages"),
        ("/inference/v1/generate", {"token_ids": [5] * 5_000}, "token_ids"),
    ],
    ids=["prompt", "messages", "tools", "chat", "many messages", "tokens"],
)
def test_what_cannot_fit_the_context_is_refused_before_it_is_tokenized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, body: dict, param: str
) -> None:
    from transformers import PreTrainedTokenizerBase

    async def scenario(world: World, agent: Agent) -> None:
        world.begin()
        longest: list[int] = []
        call = PreTrainedTokenizerBase.__call__

        def counted(self, text: str, **settings):
            longest.append(len(text))
            return call(self, text, **settings)

        monkeypatch.setattr(PreTrainedTokenizerBase, "__call__", counted)
        assert await agent.refused(body, path=path) == (400, "context_length_exceeded", param)
        assert max(longest, default=0) < 100_000

    in_world(tmp_path, scenario)


def test_while_one_key_has_long_texts_tokenized_others_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight texts that take 0.4 s each, and 0.2 s of them the interpreter: they run one after the other."""
    encode, at_once, most = ChatTemplate.encode, [0], [0]

    def slow(self: ChatTemplate, text: str, **settings):
        if "slow" in text:
            at_once[0] += 1
            most[0] = max(most[0], at_once[0])
            until_s = time.monotonic() + 0.2
            while time.monotonic() < until_s:
                pass
            time.sleep(0.2)
            at_once[0] -= 1
        return encode(self, text, **settings)

    monkeypatch.setattr(ChatTemplate, "encode", slow)

    async def scenario(world: World, agent: Agent) -> None:
        world.begin()
        world.begin(OTHER)
        heavy = [asyncio.create_task(agent.post("/tokenize", {"prompt": f"slow {i}"})) for i in range(8)]
        await asyncio.sleep(0.3)
        for _ in range(3):
            status, _, _ = await agent.post("/v1/chat/completions", ask(), key=world.key(OTHER))
            assert status == 200
        assert [one.done() for one in heavy].count(True) < 8
        assert {status for status, *_ in await asyncio.gather(*heavy)} == {200}
        assert most[0] == 1

    in_world(tmp_path, scenario)


def test_a_key_has_few_requests_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = ChatTemplate.encode

    def slow(self: ChatTemplate, text: str, **settings):
        time.sleep(0.3 if "slow" in text else 0.0)
        return encode(self, text, **settings)

    monkeypatch.setattr(ChatTemplate, "encode", slow)

    async def scenario(world: World, agent: Agent) -> None:
        world.begin()
        asked = [agent.post("/tokenize", {"prompt": f"slow {i}"}) for i in range(4)]
        answers = await asyncio.gather(*asked)
        assert sorted(status for status, *_ in answers) == [200, 200, 429, 429]
        assert (await agent.post("/tokenize", {"prompt": "now"}))[0] == 200

    in_world(tmp_path, scenario, limits=Limits(backoff_first_s=0.02, gateway_questions=2))


def test_work_that_takes_too_long_is_answered_so_and_the_key_works_again_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = ChatTemplate.encode

    def slow(self: ChatTemplate, text: str, **settings):
        time.sleep(0.6 if "slow" in text else 0.0)
        return encode(self, text, **settings)

    monkeypatch.setattr(ChatTemplate, "encode", slow)

    async def scenario(world: World, agent: Agent) -> None:
        world.begin()
        assert (await agent.refused({"prompt": "slow"}, path="/tokenize"))[:2] == (503, "busy")
        await asyncio.sleep(0.5)
        assert (await agent.post("/tokenize", {"prompt": "now"}))[0] == 200

    in_world(tmp_path, scenario, limits=Limits(backoff_first_s=0.02, gateway_read_s=0.3))


def test_the_key_of_an_ended_episode_is_refused_everywhere(tmp_path: Path) -> None:
    async def scenario(world: World, agent: Agent) -> None:
        row = world.begin()
        asked = [
            ("/v1/chat/completions", ask()),
            ("/v1/chat/completions/tokens", ask(tokens=[5])),
            ("/inference/v1/generate", {"token_ids": [5]}),
            ("/tokenize", {"prompt": "hm"}),
        ]

        async def models(key: str) -> int:
            head = {"Authorization": f"Bearer {key}"}
            async with agent.session.get(world.url + "/models", headers=head) as answer:
                return answer.status

        assert {(await agent.post(path, body))[0] for path, body in asked} == {200}
        assert await models(world.key()) == 200
        for change, refusal in (({"attempt": 2}, (401, "key_expired")), ({"ended": True}, (410, "episode_ended"))):
            row.attempt = 1
            vars(row).update(change)
            assert {(await agent.refused(body, path=path))[:2] for path, body in asked} == {refusal}
            assert await models(world.key()) == refusal[0]
        assert await models(admin_key(world.run_dir)) == 200
        assert (await agent.post("/tokenize", {"prompt": "hm"}, key=admin_key(world.run_dir)))[0] == 200

    assert NAME.attempt == 1
    in_world(tmp_path, scenario)
