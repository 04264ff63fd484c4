"""What a model can bring about is graded, or is text that it reads; nothing of it ends an episode without a result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from actors.environments.episodes.tools import Toolbox, Tools
from actors.protocol.episodes import AbandonEpisodes
from tests.actors.environments.episodes.played_gateway import Refusal
from tests.actors.environments.episodes.test_worker import GAMES, HERE, count_down, named, staged

TOO_LONG = Refusal(400, "context_length_exceeded", "messages")


def call(name: str, arguments: str) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"code": "raise SystemExit(3)"}', "Error: SystemExit"),
        ('{"code": "raise KeyboardInterrupt"}', "Error: KeyboardInterrupt"),
        ("[" * 100_000, "are no JSON"),
    ],
)
def test_a_tool_that_a_model_can_have_raise_anything_answers_all_the_same(arguments: str, text: str) -> None:
    toolbox: Toolbox = Tools([f"{HERE}.played_environments:execute"], 5.0).opened()
    assert text in toolbox.answer(call("execute", arguments))["content"]


async def test_half_a_character_in_what_a_tool_says_reaches_the_model_as_a_sign_of_its_own(tmp_path: Path) -> None:
    def say(question: dict[str, Any]) -> Any:
        if len(question["messages"]) == 1:
            return {"role": "assistant", "content": "", "tool_calls": [call("half", "{}")]}
        return question["messages"][-1]["content"]

    tools = [f"{HERE}.played_environments:half"]
    async with staged(tmp_path, say, f"{GAMES}:Countdown", tools=tools) as (stage, gateway):
        stage.begin(named())
        await stage.until(lambda: len(gateway.asked) >= 2)
        assert gateway.asked[1][1]["messages"][-1]["content"] == "a?b"


async def test_a_context_that_is_full_ends_an_episode_by_its_tokens_and_what_there_is_is_scored(tmp_path: Path) -> None:
    def say(question: dict[str, Any]) -> Any:
        return count_down(question) if len(question["messages"]) == 1 else TOO_LONG

    async with staged(tmp_path, say, f"{GAMES}:Countdown") as (stage, _):
        stage.begin(named())
        (ended,) = await stage.ends(1)
        assert (ended.reward, ended.cause) == (1.0, "context")


async def test_a_first_question_that_is_too_long_is_the_datas_doing(tmp_path: Path) -> None:
    async with staged(tmp_path, lambda _: TOO_LONG, f"{GAMES}:Countdown") as (stage, _):
        stage.begin(named())
        (ended,) = await stage.ends(1)
        assert ended.failure is not None
        assert "context_length_exceeded" in ended.failure.message


async def test_an_agent_whose_context_is_full_has_spent_its_tokens(tmp_path: Path) -> None:
    said = iter(["hello"])

    def say(question: dict[str, Any]) -> Any:
        return next(said, TOO_LONG)

    async with staged(tmp_path, say, "played_agents:agent", "wrapping", kind="agent") as (stage, _):
        stage.begin(named())
        (ended,) = await stage.ends(1)
        assert (ended.reward, ended.cause, ended.failure) == (0.0, "context", None)


async def test_the_slot_of_an_abandoned_episode_is_free_at_once(tmp_path: Path) -> None:
    async with staged(tmp_path, lambda _: "go", f"{GAMES}:Noted", "hang", "right", slots=1) as (stage, gateway):
        stage.begin(named())
        await stage.until(lambda: len(gateway.asked) == 1)
        stage.ref.tell(AbandonEpisodes(job="j", term=1, episodes=[named()]))
        stage.begin(named(1))
        (ended,) = await stage.ends(1)
        assert (ended.episode, ended.reward) == (named(1), 1.0)
