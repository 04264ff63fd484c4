"""OpenAI's SDK, unmodified, against the gateway: each question is one turn, and nothing that was said is said again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import openai
import pytest

from tests.actors.gateway.bpe_tokenizer import THINKING
from tests.actors.gateway.gateway_world import END_ID, TOKENIZER, gateway_world, script

USER = {"role": "user", "content": "What is the answer, the castering json?"}


async def converse(agent: openai.AsyncOpenAI, turns: int, **settings) -> list[dict]:
    messages: list[dict] = [{"role": "system", "content": "You play."}, USER]
    for number in range(turns):
        reply = await agent.chat.completions.create(model="any", messages=messages, **settings)
        messages.append(reply.choices[0].message.model_dump(exclude_none=True))
        messages.append({"role": "user", "content": f"And the {number}th, prostering?"})
    return messages


async def test_a_conversation_is_one_context_in_which_every_model_token_stands_as_it_was_drawn(tmp_path: Path) -> None:
    async with gateway_world(tmp_path) as world:
        row = world.begin()
        messages = await converse(world.agent(), 4)
        assert len(row.turns) == 4 and len(row.contexts) == 1
        whole = TOKENIZER.apply_chat_template(messages[:-1], tokenize=False)
        assert world.text(row.tokens) + "\n" == whole
        assert TOKENIZER(whole, add_special_tokens=False)["input_ids"] != row.tokens  # a rendering would have drifted


async def test_a_stream_whose_turn_lasts_longer_than_the_read_time_out_is_one_turn(tmp_path: Path) -> None:
    async with gateway_world(tmp_path) as world:
        row = world.begin()
        world.scheduler.turn_s = 2.5
        agent = world.agent(timeout=1.0)
        stream = await agent.chat.completions.create(
            model="m", messages=[USER], stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert len(row.turns) == 1 and len(world.scheduler.turns_asked()) == 1
        assert text == TOKENIZER.decode(row.turns[0][:-1])
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert chunks[-1].usage.completion_tokens == len(row.turns[0])
        whole = await agent.chat.completions.create(model="m", messages=[USER])
        assert whole.choices[0].message.content == TOKENIZER.decode(row.turns[1][:-1])


async def test_a_retry_while_the_turn_runs_joins_it_and_one_after_it_is_answered_from_the_record(
    tmp_path: Path,
) -> None:
    async with gateway_world(tmp_path) as world:
        row = world.begin()
        world.scheduler.turn_s = 1.0
        agent = world.agent()
        retry = {"x-stainless-retry-count": "1"}
        first = asyncio.create_task(agent.chat.completions.create(model="m", messages=[USER]))
        await asyncio.sleep(0.3)
        joined = agent.chat.completions.create(model="m", messages=[USER], extra_headers=retry)
        one, two = await asyncio.gather(first, joined)
        three = await agent.chat.completions.create(model="m", messages=[USER], extra_headers=retry)
        assert one.choices == two.choices == three.choices
        assert len(row.turns) == 1
        await agent.chat.completions.create(model="m", messages=[USER])  # asked again on purpose
        assert len(row.turns) == len(row.contexts) == 2


async def test_an_agent_that_left_before_the_answer_gets_it_when_it_asks_again(tmp_path: Path) -> None:
    async with gateway_world(tmp_path) as world:
        row = world.begin()
        world.scheduler.turn_s = 1.5
        agent = world.agent(max_retries=0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(agent.chat.completions.create(model="m", messages=[USER]), 0.7)
        await asyncio.sleep(1.5)
        reply = await agent.chat.completions.create(model="m", messages=[USER])
        assert len(row.turns) == 1
        assert reply.choices[0].message.content == TOKENIZER.decode(row.turns[0][:-1])


async def test_calls_of_tools_come_and_go_and_the_context_goes_on_behind_them(tmp_path: Path) -> None:
    said = 'I look. <tool_call>\n{"name": "look",  "arguments": {"at": "the json"}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    async with gateway_world(tmp_path, speak=script(said, "A cat.")) as world:
        row = world.begin()
        agent = world.agent()
        reply = await agent.chat.completions.create(model="m", messages=[USER], tools=tools)
        choice = reply.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "I look."
        call = choice.message.tool_calls[0]
        assert (call.function.name, call.function.arguments) == ("look", '{"at": "the json"}')
        told = [USER, choice.message.model_dump(exclude_none=True)]
        told.append({"role": "tool", "tool_call_id": call.id, "content": "it is a cat"})
        reply = await agent.chat.completions.create(model="m", messages=told, tools=tools)
        assert reply.choices[0].message.content == "A cat."
        assert len(row.contexts) == 1
        assert said + "<|im_end|>\n<|im_start|>user\n<tool_response>\nit is a cat" in world.text(row.tokens)


async def test_thinking_that_the_template_drops_makes_a_fresh_context_and_is_said_once(tmp_path: Path) -> None:
    said = ["<think>\nhm\n</think>\n\nfour", "<think>\nno\n</think>\n\nfive", "plain", "six"]
    async with gateway_world(tmp_path, speak=script(*said), template=THINKING) as world:
        row = world.begin()
        agent = world.agent()
        messages: list[dict] = [USER]
        for _ in range(4):
            reply = await agent.chat.completions.create(model="m", messages=messages)
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})  # drops the reasoning
            messages.append({"role": "user", "content": "Go on."})
        assert len(row.turns) == 4
        assert len(row.contexts) == 3  # behind a turn without thinking it goes on
        assert "hm" not in world.text(row.contexts[1])
        assert [trouble.kind for trouble in world.scheduler.troubles] == ["gateway_unbridged", "gateway_unbridged"]


async def test_a_stop_text_cuts_the_reply_and_the_row(tmp_path: Path) -> None:
    async with gateway_world(tmp_path, speak=script("one two STOP three four", "five")) as world:
        row = world.begin()
        agent = world.agent()
        reply = await agent.chat.completions.create(model="m", messages=[USER], stop=["STOP"])
        assert reply.choices[0].message.content == "one two "
        assert reply.choices[0].finish_reason == "stop"
        assert "three" not in world.text(row.turns[0]) and world.scheduler.discarded > 0
        told = [USER, {"role": "assistant", "content": "one two "}, USER]
        await agent.chat.completions.create(model="m", messages=told, stop=["STOP"])
        assert len(row.contexts) == 1
        assert "STOP<|im_end|>\n<|im_start|>user" in world.text(row.tokens)
        assert world.scheduler.turns_asked()[1].turn_tokens == 1000 - len(row.turns[0])  # what was cut is not spent


async def test_a_turn_that_was_too_long_is_closed_before_the_next_message(tmp_path: Path) -> None:
    async with gateway_world(tmp_path, speak=script([50] * 9, "done")) as world:
        row = world.begin()
        agent = world.agent()
        reply = await agent.chat.completions.create(model="m", messages=[USER], max_tokens=5)
        assert reply.choices[0].finish_reason == "length"
        told = [USER, reply.choices[0].message.model_dump(exclude_none=True), USER]
        await agent.chat.completions.create(model="m", messages=told)
        assert row.turns[0] == [50] * 5
        assert row.tokens[row.tokens.index(50) + 5] == END_ID
        assert len(row.contexts) == 1


async def test_after_its_own_death_the_gateway_goes_on_where_it_was(tmp_path: Path) -> None:
    async with gateway_world(tmp_path) as world:
        row = world.begin()
        messages = await converse(world.agent(), 2)
        before = world.url
        await world.restart_gateway()
        assert world.url == before
        again = await world.agent().chat.completions.create(model="m", messages=messages[:-2])
        assert again.choices[0].message.content == messages[-2]["content"]  # its last turn, which it may not have read
        await world.agent().chat.completions.create(model="m", messages=messages)
        assert (len(row.turns), len(row.contexts)) == (3, 1)


async def test_a_stream_whose_turn_fails_says_why(tmp_path: Path) -> None:
    async with gateway_world(tmp_path) as world:
        row = world.begin()
        world.scheduler.turn_s, row.left_s = 30.0, 1.0
        stream = await world.agent().chat.completions.create(model="m", messages=[USER], stream=True)
        with pytest.raises(openai.APIError, match="budget is spent"):
            [chunk async for chunk in stream]


async def test_a_question_outlives_the_scheduler(tmp_path: Path) -> None:
    async with gateway_world(tmp_path) as world:
        row = world.begin()
        world.scheduler.turn_s = 0.6
        asked = asyncio.create_task(converse(world.agent(max_retries=0), 1))
        await asyncio.sleep(0.2)
        row.tokens.clear()
        row.versions.clear()
        await world.restart_scheduler()
        await asked
        assert len(row.turns) == 1


async def test_an_episode_that_is_driven_again_replays_and_is_cut_where_it_leaves_the_path(tmp_path: Path) -> None:
    async with gateway_world(tmp_path) as world:
        row = world.begin()
        first = await converse(world.agent(), 3)
        turns = row.turns
        row.attempt = 2
        agent = world.agent(attempt=2)
        second = await converse(agent, 3)
        assert second == first and row.turns == turns and world.scheduler.discarded == 0
        row.attempt = 3
        agent = world.agent(attempt=3)
        await agent.chat.completions.create(model="m", messages=first[:2])
        changed = [*first[:3], {"role": "user", "content": "Something else."}]
        await agent.chat.completions.create(model="m", messages=changed)
        assert row.turns[0] == turns[0] and len(row.turns) == 2 and len(row.contexts) == 1
        assert world.scheduler.discarded == len(turns[1]) + len(turns[2])
