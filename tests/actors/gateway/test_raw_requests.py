"""Requests as other clients send them, and what is wrong with some: read from the wire, not through an SDK."""

from __future__ import annotations

import asyncio
import io
import json
import random
from pathlib import Path
from typing import Any

import aiohttp
import msgpack
import pytest

from actors.protocol.episodes import EpisodeName
from actors.protocol.session_keys import SessionKeys, admin_key
from configs.limits import Limits
from tests.actors.gateway.bpe_tokenizer import CHATML, VOCABULARY
from tests.actors.gateway.gateway_world import END_ID, NAME, TOKENIZER, World, babble, gateway_world, script, work

OTHER_FORM = CHATML.replace("<tool_call>", "[TOOL_CALLS]").replace("</tool_call>", "")
USER = {"role": "user", "content": "What is the prostering json?"}


class Agent:
    """It speaks plain HTTP."""

    def __init__(self, world: World, session: aiohttp.ClientSession) -> None:
        self.world, self.session = world, session

    async def post(self, path: str, body, *, key: str | None = None, headers: dict | None = None):
        """Status, body and headers of the answer."""
        sent = {"Authorization": f"Bearer {self.world.key() if key is None else key}"} | (headers or {})
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(self.world.root + path, data=io.BytesIO(data), headers=sent) as answer:
            text = await answer.read()
            return answer.status, json.loads(text), answer.headers

    async def refused(self, body, path: str = "/v1/chat/completions", **settings) -> tuple[int, str, str | None]:
        status, answer, _ = await self.post(path, body, **settings)
        return status, answer["error"]["code"], answer["error"]["param"]


def ask(**fields) -> dict:
    return {"model": "m", "messages": [USER]} | fields


def in_world(tmp_path: Path, scenario, **settings) -> None:
    async def main() -> None:
        async with gateway_world(tmp_path, **settings) as world, aiohttp.ClientSession() as session:
            await scenario(world, Agent(world, session))

    asyncio.run(main())


def test_verifiers_of_today_asks_with_tokens_and_gets_tokens(tmp_path: Path) -> None:
    async def scenario(world: World, agent: Agent) -> None:
        row = world.begin()
        headers = {"Authorization": f"Bearer {world.key()}"}
        async with agent.session.get(world.url + "/models", headers=headers) as answer:
            assert (await answer.json())["data"][0]["max_model_len"] == 4096
        prompt = TOKENIZER("How is the castering?")["input_ids"]
        for _ in range(2):
            params = {"max_tokens": 30, "stop_token_ids": [END_ID], "logprobs": 1, "skip_special_tokens": False}
            body = {"model": "m", "token_ids": prompt, "sampling_params": params}
            status, found, _ = await agent.post("/inference/v1/generate", body, headers={"X-Session-ID": "x"})
            choice = found["choices"][0]
            assert status == 200
            assert choice["token_ids"] == row.turns[-1]
            content = choice["logprobs"]["content"]
            assert [(c["token"], c["token_id"]) for c in content] == [(f"token_id:{t}", t) for t in row.turns[-1]]
            assert content[0]["logprob"] == pytest.approx(-row.turns[-1][0] / 1000)
            prompt = [*prompt, *choice["token_ids"], *TOKENIZER("\nAnd now?")["input_ids"]]
        assert len(row.contexts) == 1
        assert [run["version"] for run in found["weight_versions"]] == [4, 5]

    in_world(tmp_path, scenario)


def test_verifiers_of_before_asks_with_messages_then_tokenises_and_asks_with_both(tmp_path: Path) -> None:
    async def scenario(world: World, agent: Agent) -> None:
        row = world.begin()
        body = ask(logprobs=True, return_token_ids=True, max_completion_tokens=64, n=1)
        status, first, _ = await agent.post("/v1/chat/completions", body)
        choice = first["choices"][0]
        assert status == 200
        assert (choice["token_ids"], len(choice["logprobs"]["content"])) == (row.turns[0], len(row.turns[0]))
        assert first["prompt_token_ids"] + choice["token_ids"] == row.tokens
        messages = [USER, choice["message"], USER]
        _, whole, _ = await agent.post("/tokenize", {"model": "m", "messages": messages})
        past = {"model": "m", "messages": messages[:2], "add_generation_prompt": False}
        _, short, _ = await agent.post("/tokenize", past)
        tokens = [*first["prompt_token_ids"], *choice["token_ids"], *whole["tokens"][short["count"] - 1 :]]
        status, second, _ = await agent.post(
            "/v1/chat/completions/tokens", body | {"messages": messages, "tokens": tokens}
        )
        assert status == 200
        assert second["prompt_token_ids"] == tokens
        assert len(row.contexts) == 1

    in_world(tmp_path, scenario)


def test_a_key_may_stand_in_a_header_or_in_the_path(tmp_path: Path) -> None:
    async def scenario(world: World, agent: Agent) -> None:
        world.begin()
        assert (await agent.post(f"/s/{world.key()}/v1/chat/completions", ask(), key=""))[0] == 200
        given = {"x-api-key": world.key(), "Authorization": ""}
        assert (await agent.post("/v1/chat/completions", ask(), headers=given))[0] == 200

    in_world(tmp_path, scenario)


def test_keys_that_are_forged_expired_or_none_are_refused_and_an_ended_episode_is_gone(tmp_path: Path) -> None:
    async def scenario(world: World, agent: Agent) -> None:
        row = world.begin()
        admin = admin_key(world.run_dir)
        stranger = SessionKeys("hr-admin-other", "j").sign(NAME)
        other_job = SessionKeys(admin, "k").sign(NAME)
        for key in ("", "x", stranger, other_job, world.key()[:-1], "hr-j-1-2-3-4-", "hr-j-٣-2-3-4-00", "ü" * 500):
            path = f"/s/{key}/v1/chat/completions" if key == "x" else "/v1/chat/completions"
            status, code, _ = await agent.refused(ask(), path=path, key=key.encode().decode("latin-1"))
            assert (status, code) in [(401, "invalid_key"), (401, "no_key")], key
        assert (await agent.refused(ask(), key=admin))[:2] == (401, "not_a_session")
        assert (await agent.refused(ask(), key=world.key(EpisodeName(1, 1, 1, 1))))[:2] == (410, "episode_ended")
        row.attempt = 2
        assert (await agent.refused(ask()))[:2] == (401, "key_expired")
        row.attempt, row.ended = 1, True
        assert (await agent.refused(ask()))[:2] == (410, "episode_ended")

    in_world(tmp_path, scenario)


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b"{", "invalid_json", "body"),
        (b"[]", "invalid_type", "body"),
        ({"model": "m"}, "invalid_type", "messages"),
        (ask(messages=[]), "invalid_value", "messages"),
        (ask(messages=[{"role": "robot"}]), "invalid_value", "messages[0].role"),
        (ask(messages=[{"role": "user", "content": 3}]), "invalid_value", "messages[0].content"),
        (
            ask(messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
            "unsupported_value",
            "messages[0].content[0]",
        ),
        (ask(max_tokens="many"), "invalid_type", "max_tokens"),
        (ask(max_tokens=0), "invalid_value", "max_tokens"),
        (ask(n=2), "unsupported_value", "n"),
        (ask(response_format={"type": "json_object"}), "unsupported_value", "response_format"),
        (ask(tool_choice="required"), "unsupported_value", "tool_choice"),
        (ask(tools=[{"name": "f"}]), "invalid_value", "tools[0]"),
        (ask(presence_penalty=1.5), "unsupported_value", "presence_penalty"),
        (ask(top_logprobs=5), "unsupported_value", "top_logprobs"),
        (ask(stop=""), "invalid_value", "stop"),
        (ask(stop=["x"] * 99), "invalid_value", "stop"),
        (ask(chat_template_kwargs={"tokenize": True}), "unsupported_value", "chat_template_kwargs.tokenize"),
        (ask(messages=[{"role": "user", "content": "the json " * 3000}]), "context_length_exceeded", "messages"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_field(tmp_path: Path, body, code: str, param: str) -> None:
    async def scenario(world: World, agent: Agent) -> None:
        row = world.begin()
        assert await agent.refused(body) == (400, code, param)
        assert row.turns == []

    in_world(tmp_path, scenario)


def test_a_spent_budget_is_said_with_its_name_and_not_retried(tmp_path: Path) -> None:
    async def scenario(world: World, agent: Agent) -> None:
        row = world.begin()
        row.turns_left = 0
        assert await agent.refused(ask()) == (400, "budget_spent", "turns")
        row.turns_left = 1
        world.scheduler.turn_s, row.left_s = 30.0, 0.2
        await world.restart_gateway()
        assert await agent.refused(ask()) == (400, "budget_spent", "time")

    in_world(tmp_path, scenario)


def test_a_turn_that_outlasts_its_episode_only_by_a_pause_of_the_job_is_answered(tmp_path: Path) -> None:
    async def scenario(world: World, agent: Agent) -> None:
        row = world.begin()
        world.scheduler.turn_s, row.left_s = 1.0, 0.3
        asked = asyncio.ensure_future(agent.post("/v1/chat/completions", ask()))
        await asyncio.sleep(0.1)
        row.left_s = 60.0  # its time has stood still meanwhile
        assert (await asked)[0] == 200

    in_world(tmp_path, scenario)


def test_how_tokens_are_drawn_is_the_jobs_and_said_once(tmp_path: Path) -> None:
    async def scenario(world: World, agent: Agent) -> None:
        world.begin()
        for fields in ({"temperature": 1.0, "top_p": 1.0}, {"temperature": 0.1}, {"temperature": 0.2, "seed": 1}):
            assert (await agent.post("/v1/chat/completions", ask(**fields)))[0] == 200
        kinds = [trouble.kind for trouble in world.scheduler.troubles]
        assert kinds == ["gateway_sampling", "gateway_sampling"]  # the first, and when their number has doubled

    in_world(tmp_path, scenario)


def test_stop_tokens_that_are_not_the_jobs_are_ignored_and_named(tmp_path: Path) -> None:
    async def scenario(world: World, agent: Agent) -> None:
        world.begin()
        assert (await agent.post("/v1/chat/completions", ask(stop_token_ids=[7])))[0] == 200
        (trouble,) = world.scheduler.troubles
        assert "stop_token_ids" in trouble.text and "rollout.stop" in trouble.text

    in_world(tmp_path, scenario)


TOOL = {"type": "function", "function": {"name": "shell", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize(("template", "told"), [(CHATML, []), (OTHER_FORM, ["gateway_tools"])])
def test_tools_for_a_model_whose_calls_are_in_a_form_that_is_not_read_are_told(
    tmp_path: Path, template: str, told: list[str]
) -> None:
    async def scenario(world: World, agent: Agent) -> None:
        world.begin()
        assert (await agent.post("/v1/chat/completions", ask()))[0] == 200
        assert (await agent.post("/v1/chat/completions", ask(tools=[TOOL])))[0] == 200
        assert [trouble.kind for trouble in world.scheduler.troubles] == told

    in_world(tmp_path, scenario, template=template)


def test_an_agent_outside_begins_and_ends_an_episode(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "guess", "answer": 7, "low": 1}\n')
    data = {"source": "jsonl", "path": str(tmp_path / "tasks.jsonl")}

    async def scenario(world: World, agent: Agent) -> None:
        from actors.environments.prompts.sources import open_source

        admin = admin_key(world.run_dir)
        assert (world.run_dir / "gateway.key").stat().st_mode & 0o777 == 0o600
        status, answer, headers = await agent.post("/v1/episodes", {}, key=admin)
        assert (status, headers["Retry-After"], answer["error"]["code"]) == (429, "7", "none_to_begin")
        assert (await agent.refused({}, path="/v1/episodes"))[:2] == (401, "not_admin")
        digest = open_source(world.job.data, world.job.seed).row(0).digest
        row = world.begin()
        world.scheduler.lease = work(NAME, msgpack.packb([0, digest]))
        status, begun, _ = await agent.post("/v1/episodes", b"", key=admin)
        assert (status, begun["attempt"], begun["deadline_s"]) == (200, 1, 55.0)
        assert begun["task"] == {"prompt": "guess", "answer": 7, "low": 1, "row": 0}
        assert begun["base_url"] == world.url
        assert (await agent.post("/v1/chat/completions", ask(), key=begun["key"]))[0] == 200
        assert (await agent.refused({}, path="/v1/episodes/end"))[2] == "reward"
        assert (await agent.refused({"reward": 1, "failure": "x"}, path="/v1/episodes/end"))[2] == "reward"
        many = {f"m{i}": i for i in range(65)}
        assert (await agent.refused({"reward": 1, "metrics": many}, path="/v1/episodes/end"))[2] == "metrics"
        for _ in range(2):
            assert (await agent.post("/v1/episodes/end", {"reward": 0.5, "metrics": {"moves": 3}}))[:2] == (200, {})
        assert (await agent.refused({"reward": 0.75}, path="/v1/episodes/end"))[:2] == (410, "conflict")
        assert [(end.reward, end.metrics) for end in world.scheduler.ended] == [(0.5, {"moves": 3})]
        assert (await agent.refused(ask()))[:2] == (410, "episode_ended")
        assert row.ended

    in_world(tmp_path, scenario, environment={"kind": "external", "path": None}, data=data)


def test_an_agent_that_has_not_heard_the_answer_gets_the_episode_that_was_begun_for_it(tmp_path: Path) -> None:
    """Whoever says that it asks again, by one and the same Idempotency-Key; others begin others."""
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "guess", "answer": 7}\n')
    data = {"source": "jsonl", "path": str(tmp_path / "tasks.jsonl")}

    async def scenario(world: World, agent: Agent) -> None:
        from actors.environments.prompts.sources import open_source

        async def begin(asked_as: str) -> tuple[int, Any]:
            status, answer, _ = await agent.post(
                "/v1/episodes", {}, key=admin_key(world.run_dir), headers={"Idempotency-Key": asked_as}
            )
            return status, answer

        digest = open_source(world.job.data, world.job.seed).row(0).digest
        assert (await begin("one"))[0] == 429, "nothing was begun, and nothing is kept of that"
        world.scheduler.lease = work(NAME, msgpack.packb([0, digest]))
        world.scheduler.lease_s = 0.1
        first, second = await asyncio.gather(begin("one"), begin("one"))
        assert sorted([first[0], second[0]]) == [200, 503], "it is being begun"
        begun = first[1] if first[0] == 200 else second[1]
        asked = world.scheduler.leases
        row = world.begin()
        row.left_s = 12.0  # as the ledger has it, which knows of pauses
        again = (await begin("one"))[1]
        assert 11.0 < again.pop("deadline_s") <= 12.0 < begun.pop("deadline_s")
        assert again == begun and world.scheduler.leases == asked
        for other in ("two", "", ""):
            assert (await begin(other))[0] == 200
        assert world.scheduler.leases == asked + 3
        row.ended = True
        status, answer = await begin("one")
        assert (status, answer["error"]["code"]) == (410, "episode_ended")

    in_world(tmp_path, scenario, environment={"kind": "external", "path": None}, data=data)


def test_where_workers_drive_the_episodes_an_agent_can_not_reward_itself(tmp_path: Path) -> None:
    async def scenario(world: World, agent: Agent) -> None:
        world.begin()
        assert (await agent.refused({"reward": 1}, path="/v1/episodes/end"))[:2] == (403, "not_external")
        assert (await agent.refused({}, path="/v1/episodes", key=admin_key(world.run_dir)))[:2] == (403, "not_external")

    in_world(tmp_path, scenario)


def test_bodies_and_questions_are_bounded(tmp_path: Path) -> None:
    async def scenario(world: World, agent: Agent) -> None:
        row = world.begin()
        status, answer, _ = await agent.post("/v1/chat/completions", b" " * 70_000)
        assert (status, answer["error"]["code"]) == (413, "too_large")
        world.scheduler.turn_s = 0.3
        questions = [agent.post("/v1/chat/completions", ask(messages=[USER] * (i + 1))) for i in range(4)]
        answers = await asyncio.gather(*questions)
        assert sorted(status for status, *_ in answers) == [200, 200, 429, 429]
        assert len(row.turns) == 2

    in_world(tmp_path, scenario, limits=Limits(gateway_request_bytes=65_536, gateway_questions=2))


def test_nothing_that_comes_in_ends_the_gateway(tmp_path: Path) -> None:
    """Requests are damaged at random; each is answered, as JSON, by a status that says whose fault it is."""
    noise = random.Random(7)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    told = [USER, {"role": "assistant", "content": None, "tool_calls": calls}, {"role": "tool", "content": "x"}]
    bodies = [
        ("/v1/chat/completions", json.dumps(ask(messages=told, tools=tools, stop=["a"], max_tokens=9)).encode()),
        ("/inference/v1/generate", b'{"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 9, "logprobs": 1}}'),
        (
            "/tokenize",
            b'{"messages": [{"role": "user", "content": "\xc3\xa4"}], "tools": [{"function": {"name": "f"}}]}',
        ),
        ("/v1/episodes/end", b'{"reward": 1.5, "metrics": {"a": 2}}'),
    ]
    odd = [
        b"null",
        b"-1",
        b"1e999",
        b"NaN",
        b'"\\ud800"',
        b"[" * 5000,
        b"{}",
        b"99999999999999999999",
        b'"\x00"',
        b"\xff",
    ]

    def damaged(body: bytes) -> bytes:
        for _ in range(noise.randint(1, 3)):
            a = noise.randrange(len(body))
            b = min(len(body), a + noise.choice([0, 1, 1, 4, 12]))
            piece = noise.choice([b"", noise.randbytes(2), noise.choice(odd)])
            body = body[:a] + piece + body[b:]
        return body

    async def scenario(world: World, agent: Agent) -> None:
        world.begin().turns_left = 10_000
        seen: dict[int, int] = {}
        for i in range(600):
            path, body = bodies[i % len(bodies)]
            status, answer, _ = await agent.post(path, damaged(body))
            assert status in (200, 400, 403), (status, answer)
            assert status == 200 or answer["error"]["message"]
            seen[status] = seen.get(status, 0) + 1
        assert seen[200] > 20 and seen[400] > 100
        assert (await agent.post("/v1/chat/completions", ask()))[0] == 200

    in_world(tmp_path, scenario, limits=Limits(gateway_questions=64))


def test_a_connection_that_says_nothing_or_leaves_in_the_middle_harms_nobody(tmp_path: Path) -> None:
    async def scenario(world: World, agent: Agent) -> None:
        row = world.begin()
        host, port = world.root.removeprefix("http://").split(":")
        for said in (
            b"",
            b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 99\r\n\r\n{",
            b"\x16\x03\x01\x00\x00",
        ):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(said)
            await writer.drain()
            writer.close()
        assert (await agent.post("/v1/chat/completions", ask()))[0] == 200
        assert len(row.turns) == 1

    in_world(tmp_path, scenario)


def test_two_questions_at_once_are_two_turns_one_after_the_other(tmp_path: Path) -> None:
    async def scenario(world: World, agent: Agent) -> None:
        row = world.begin()
        world.scheduler.turn_s = 0.2
        same = [agent.post("/v1/chat/completions", ask()) for _ in range(3)]
        answers = await asyncio.gather(*same)
        assert [status for status, *_ in answers] == [200] * 3
        assert len(row.turns) == len(row.contexts) == 3

    in_world(tmp_path, scenario)


def test_a_turn_that_fails_behind_signs_of_life_breaks_the_connection_so_that_a_retry_hears_why(tmp_path: Path) -> None:
    async def scenario(world: World, agent: Agent) -> None:
        row = world.begin()
        world.scheduler.turn_s, row.left_s = 30.0, 1.0
        with pytest.raises(aiohttp.ClientError):
            await agent.post("/v1/chat/completions", ask())
        assert await agent.refused(ask()) == (400, "budget_spent", "time")

    in_world(tmp_path, scenario)


def test_a_token_that_the_model_has_no_row_for_is_refused(tmp_path: Path) -> None:
    async def scenario(world: World, agent: Agent) -> None:
        world.begin()
        refused = await agent.refused({"token_ids": [5, VOCABULARY + 50]}, path="/inference/v1/generate")
        assert refused == (400, "invalid_value", "token_ids[1]")

    in_world(tmp_path, scenario, speak=babble)


@pytest.mark.parametrize("value", ["", r'"\ud800"', "NaN", "1e999"])
def test_a_tool_call_that_is_no_json_to_every_reader_is_told_as_it_was_written(tmp_path: Path, value: str) -> None:
    said = '<tool_call>\n{"name": "f", "arguments": {"a": ' + value + "}}\n</tool_call>"

    async def scenario(world: World, agent: Agent) -> None:
        world.begin()
        tools = [{"type": "function", "function": {"name": "f"}}]
        status, found, _ = await agent.post("/v1/chat/completions", ask(tools=tools))
        message = found["choices"][0]["message"]
        assert (status, message["content"]) == (200, None)
        (call,) = message["tool_calls"]
        assert call["function"]["arguments"] == said.split("\n")[1]

    in_world(tmp_path, scenario, speak=script(said))


def test_arguments_of_a_call_with_half_a_character_are_read_as_the_text_that_they_are(tmp_path: Path) -> None:
    async def scenario(world: World, agent: Agent) -> None:
        world.begin()
        calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": r'{"a": "\ud800"}'}}]
        told = [USER, {"role": "assistant", "content": None, "tool_calls": calls}, USER]
        assert (await agent.post("/v1/chat/completions", ask(messages=told)))[0] == 200

    in_world(tmp_path, scenario)


def test_a_body_that_cannot_be_unpacked_is_the_askers_fault(tmp_path: Path) -> None:
    async def scenario(world: World, agent: Agent) -> None:
        world.begin()
        refused = await agent.refused(b"no gzip", headers={"Content-Encoding": "gzip"})
        assert refused == (400, "unreadable", None)

    in_world(tmp_path, scenario)
