"""Walk and bridges by themselves, in random conversations with a BPE whose texts have many tokenizations."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.gateway.record import Record, turns_of
from actors.gateway.rendering import Chat, ChatTemplate
from actors.gateway.replies import ReplyReader
from actors.gateway.walk import Answered, Question, Takes, Undelivered, Walk
from actors.protocol.episodes import EpisodeRecord, TurnTaken
from tests.actors.gateway.bpe_tokenizer import CHATML, END, THINKING, VOCABULARY, make_tokenizer

TEMPLATES = {name: make_tokenizer(template) for name, template in (("chatml", CHATML), ("thinking", THINKING))}
END_ID = int(TEMPLATES["chatml"].convert_tokens_to_ids(END))
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
TEXTS = st.text(st.characters(codec="utf-8"), max_size=20) | st.sampled_from(
    ["the json", "Ünïcode 東京", "  ", "a\n\nb"]
)


@dataclass
class Episode:
    """It is a model and its ledger, asked through the walk."""

    template: str = "chatml"
    record: Record = field(default_factory=lambda: Record(EpisodeRecord(status="live")))
    undelivered: Undelivered = field(default_factory=Undelivered)
    attempt: int = 1
    answered: int = 0
    discarded: int = 0

    def __post_init__(self) -> None:
        tokenizer = TEMPLATES[self.template]
        self.reader = ReplyReader(tokenizer, [END_ID], 512, 1 << 20)
        self.walk = Walk(ChatTemplate(tokenizer, {}, 512, 1 << 20, 1 << 20), self.reader)

    def ask(self, messages: list[dict], said: list[int], *, tools: bool = False, is_retry: bool = False) -> dict:
        """The assistant's message. ``said``: what the model says, if it is asked."""
        chat = Chat(tuple(messages), (TOOL,) if tools else ())
        question = Question(chat, is_retry=is_retry)
        decision = self.walk.decide(self.record, self.undelivered, question, self.attempt)
        if isinstance(decision, Answered):
            turn = decision.turn
            self.answered += 1
        else:
            turn = self._take(decision, said)
        self.undelivered.delivered(turn)
        tokens = self.record.said(turn)
        opened = self.reader.opens_reasoning(self.record.prompt(turn))
        reply = self.reader.read(tokens, opened=opened, chat=chat)
        calls = [{"function": {"name": call.name, "arguments": json.loads(call.arguments)}} for call in reply.calls]
        message = {"role": "assistant", "content": reply.content}
        return (
            message
            | ({"reasoning_content": reply.reasoning} if reply.reasoning else {})
            | ({"tool_calls": calls} if calls else {})
        )

    def _take(self, takes: Takes, said: list[int]):
        if takes.diverged:
            self.discarded += int((self.record.versions[takes.offset :] >= 0).sum())
            self.undelivered.cut(sum(turn.begin < takes.offset for turn in self.record.turns))
        assert takes.offset == self.record.length or takes.diverged
        tokens = np.array(said, np.int32)
        taken = TurnTaken(
            status="taken",
            tokens=tokens,
            logprobs=np.zeros(len(said), np.float32),
            versions=np.full(len(said), 3, np.int32),
        )
        return self.record.add(takes.offset, np.array(takes.tokens, np.int32), taken, fresh=takes.fresh)

    @property
    def contexts(self) -> list[list[int]]:
        begins = np.flatnonzero(self.record.versions == -2).tolist()
        return [
            self.record.tokens[a:b].tolist() for a, b in zip(begins, [*begins[1:], self.record.length], strict=True)
        ]

    @property
    def turns(self) -> list[list[int]]:
        return [self.record.said(turn).tolist() for turn in self.record.turns]


def user(text: str) -> dict:
    return {"role": "user", "content": text}


@st.composite
def speech(draw: st.DrawFn) -> list[int]:
    """What a random model says: any tokens, ended or cut."""
    noise = random.Random(draw(st.integers(0, 2**32)))
    said = [noise.randrange(3, VOCABULARY) for _ in range(noise.randint(0, 12))]
    return [*said, END_ID] if not said or draw(st.booleans()) else said


@given(st.lists(st.tuples(TEXTS, speech()), min_size=1, max_size=6), st.sampled_from(sorted(TEMPLATES)))
@settings(max_examples=60, deadline=None)
def test_in_a_conversation_the_row_is_the_rendering_of_the_whole_and_each_turn_stands_as_it_was_drawn(
    turns, name
) -> None:
    """The text of the one context is what the template makes of the conversation; no token was drawn twice."""
    episode, messages = Episode(name), [user("begin")]
    for text, said in turns:
        messages += [episode.ask(messages, said), user(text)]
    assert episode.turns == [said for _, said in turns]
    assert len(episode.contexts) == 1
    tokenizer = TEMPLATES[name]
    whole = tokenizer.apply_chat_template(_untrimmed(messages, turns), tokenize=False)
    ended = [*episode.contexts[0], *([] if turns[-1][1][-1] == END_ID else [END_ID])]
    text = tokenizer.decode(ended, skip_special_tokens=False)
    behind_last = tokenizer.apply_chat_template([user("")], tokenize=False)
    assert text + "\n" == whole.removesuffix(tokenizer.apply_chat_template([messages[-1]], tokenize=False)), behind_last


def _untrimmed(messages: list[dict], turns) -> list[dict]:
    """The conversation with what the model said as text, whole."""
    texts = iter(said for _, said in turns)
    return [
        m | {"content": TEMPLATES["chatml"].decode([t for t in next(texts) if t != END_ID])}
        if m["role"] == "assistant"
        else m
        for m in messages
    ]


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_whatever_an_agent_does_each_model_token_stands_once_and_in_the_context_that_it_was_drawn_in(data) -> None:
    """Agents go on, rewrite history, ask again, or begin a second conversation, at random."""
    episode = Episode(data.draw(st.sampled_from(sorted(TEMPLATES))))
    talks: list[list[dict]] = [[user("one")]]
    drawn: list[list[int]] = []
    for _ in range(data.draw(st.integers(1, 8))):
        messages = list(data.draw(st.sampled_from(talks)))
        deed = data.draw(st.sampled_from(["go on", "rewrite", "begin", "tool"]))
        if deed == "rewrite":
            messages = [messages[0] | {"content": data.draw(TEXTS)}, *messages[1:]]
        elif deed == "begin":
            messages = [user(data.draw(TEXTS))]
        said = data.draw(speech())
        if deed == "tool":
            said = [
                *TEMPLATES["chatml"]('<tool_call>{"name": "look", "arguments": {"a": [1]}}</tool_call>')["input_ids"],
                END_ID,
            ]
        before = episode.record.tokens.tolist()
        reply = episode.ask(messages, said, tools=deed == "tool")
        drawn.append(said)
        assert episode.record.tokens[: len(before)].tolist() == before
        follows = {"role": "tool", "content": "seen"} if reply.get("tool_calls") else user(data.draw(TEXTS))
        talks.append([*messages, reply, follows])
    assert episode.turns == drawn
    assert episode.answered == episode.discarded == 0


@given(st.lists(st.tuples(TEXTS, speech()), min_size=1, max_size=5), st.integers(0, 5), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_replay_costs_nothing_until_it_leaves_the_path(turns, leaves: int, forgotten: bool) -> None:
    """``forgotten``: the gateway dies in the middle of the replay, and knows nothing afterwards."""
    episode, messages = Episode(), [user("begin")]
    for text, said in turns:
        messages += [episode.ask(messages, said), user(text)]
    row = episode.record.tokens.tolist()
    episode.attempt, episode.undelivered = 2, Undelivered()
    again = [user("begin")]
    for number, (text, _) in enumerate(turns):
        if number == leaves:
            again[-1] = user(text + " otherwise")
        if forgotten and number == 1:
            episode.undelivered = Undelivered()
        again += [episode.ask(again, [9, 9, END_ID]), user(text)]
    assert episode.answered == min(leaves, len(turns))
    lost = sum(len(said) for _, said in turns[leaves:])
    assert episode.discarded == lost
    if leaves >= len(turns):
        assert episode.record.tokens.tolist() == row
    assert len(episode.turns) == len(turns) and len(episode.contexts) == 1


def test_a_template_that_drops_thinking_is_bridged_over_tools_and_not_over_questions() -> None:
    episode = Episode("thinking")
    tokenizer = TEMPLATES["thinking"]

    def say(text: str) -> list[int]:
        return [*tokenizer(text)["input_ids"], END_ID]

    messages = [user("begin")]
    call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    for thought in ("first", "second"):
        messages.append(episode.ask(messages, say(f"<think>\n{thought}\n</think>\n\n{call}"), tools=True))
        messages.append({"role": "tool", "content": "seen"})
    messages.append(episode.ask(messages, say("<think>\nthird\n</think>\n\nDone."), tools=True))
    assert len(episode.contexts) == 1
    assert tokenizer.decode(episode.contexts[0], skip_special_tokens=False) + "\n" == tokenizer.apply_chat_template(
        messages, tokenize=False
    )
    messages.append(user("And now?"))
    episode.ask(messages, say("Well."), tools=True)
    assert len(episode.contexts) == 2
    assert "first" not in tokenizer.decode(episode.contexts[1])


def test_agents_that_trim_or_keep_the_reasoning_go_on_in_the_same_context() -> None:
    episode = Episode("thinking")
    said = [*TEMPLATES["thinking"]("<think>\nhm\n</think>\n\n four ")["input_ids"], END_ID]
    reply = episode.ask([user("begin")], said)
    assert (reply["content"], reply["reasoning_content"]) == (" four ", "hm")
    told = {"role": "tool", "content": "x"}
    for kept in (reply, {"role": "assistant", "content": "four"}):
        again = Episode("thinking", Record(_found(episode)))
        again.undelivered.replay = set()
        again.ask([user("begin"), kept, told], [7, END_ID])
        assert len(again.contexts) == 1
    other = Episode("thinking", Record(_found(episode)))
    other.undelivered.replay = set()
    other.ask([user("begin"), {"role": "assistant", "content": "five"}, told], [7, END_ID])
    assert len(other.contexts) == 2


def _found(episode: Episode) -> EpisodeRecord:
    record = episode.record
    return EpisodeRecord(status="live", tokens=record.tokens, logprobs=record.logprobs, versions=record.versions)


@pytest.mark.parametrize("attempt", [1, 2])
def test_a_gateway_that_knows_nothing_answers_what_was_answered_and_goes_on_behind_the_rest(attempt: int) -> None:
    episode, messages = Episode(), [user("begin")]
    for text in ("a", "b"):
        messages += [episode.ask(messages, [11, 12, END_ID]), user(text)]
    reborn = Episode("chatml", Record(_found(episode)), attempt=attempt)
    assert reborn.ask(messages[:3], [9])["content"] == messages[3]["content"]
    assert reborn.answered == 1
    reborn = Episode("chatml", Record(_found(episode)), attempt=attempt)
    reborn.ask(messages, [13, END_ID])
    assert (reborn.answered, reborn.discarded, len(reborn.turns), len(reborn.contexts)) == (0, 0, 3, 1)


def test_turns_are_read_from_the_marks() -> None:
    marks = np.array([-2, -1, 7, 7, -1, 8, -2, -1, 9, -1], np.int32)
    found = [(turn.context, turn.asked, turn.begin, turn.end) for turn in turns_of(marks)]
    assert found == [(0, 0, 2, 4), (0, 4, 5, 6), (6, 6, 8, 9)]
    assert Record(EpisodeRecord(status="live", tokens=marks, logprobs=marks, versions=marks)).length == 9
    assert turns_of(np.empty(0, np.int32)) == []
