"""What a request means, seen from what the ledger holds of its episode. Pure functions, without a clock or a wait.

    the request asks just what a turn was asked before ─┬─ it is a retry, or the episode replays ──▶ Answered(turn)
                                                        └─ else: asked once more on purpose ─┐
    it goes on behind the last turn of the last context ──────────────────────────────▶ Takes, behind it
    else: history was rewritten, or a second conversation begun ─────────────────────────────▶ Takes, fresh
    an earlier life's turns are still to be replayed, and it asks for none of them ──────────▶ Takes, cut at the first

Invariants
- A turn is owed until its reply has been delivered in this life of the environment. A request that asks just what an
  owed turn was asked is answered from the record, and no token is sampled twice.
- After the gateway's death it is not known what is owed. In an environment's first life that is nothing, but a request
  that equals a turn is answered by it. In a later life the episode is taken to replay.
- Only the last context is gone on with, for the row is append-only. A token question is compared by tokens, messages by
  what they render to: the environment's tokens must be the same, each assistant's message what was read to the agent.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from actors.gateway.record import Record, Turn
from actors.gateway.rendering import Chat, ChatTemplate
from actors.gateway.replies import Reply, ReplyReader


@dataclass(frozen=True, slots=True)
class Question:
    """It is what an agent asks: messages, or the tokens that they are."""

    chat: Chat | None = None
    tokens: tuple[int, ...] | None = None
    stop: tuple[str, ...] = ()
    turn_tokens: int | None = None
    """Tokens of the answer, at most."""
    is_retry: bool = False
    """Whether an SDK says that it has asked this before."""

    @property
    def looks_for_calls(self) -> bool:
        return self.chat is not None and bool(self.chat.tools)


@dataclass(frozen=True, slots=True)
class Answered:
    """The record holds the answer."""

    turn: Turn


@dataclass(frozen=True, slots=True)
class Takes:
    """The model is to take a turn behind ``tokens``."""

    offset: int
    tokens: list[int]
    context: int
    """Where the context begins in the row; ``offset``: they begin a fresh one."""
    diverged: bool = False
    """Whether what stands from ``offset`` on is cut off first."""
    unbridged: bool = False
    """Whether it would have gone on behind the last turn, had the template allowed it."""

    @property
    def fresh(self) -> bool:
        return self.context == self.offset

    @property
    def context_tokens(self) -> int:
        """Tokens of the context when the turn begins."""
        return self.offset - self.context + len(self.tokens)


@dataclass
class Owed:
    """It is what the agent has not been told in this life of its environment: numbers of turns."""

    replay: set[int] | None = None
    """Turns of an earlier life that this one has yet to come to; None: it is not known."""
    undelivered: set[int] = field(default_factory=set[int])
    """Turns of this life whose replies nobody was there to take."""

    @property
    def turns(self) -> list[int]:
        return sorted((self.replay or set()) | self.undelivered)

    def told(self, turn: Turn) -> None:
        self.undelivered.discard(turn.number)
        if self.replay:
            self.replay.discard(turn.number)

    def cut(self, turns: int) -> None:
        """Only the first ``turns`` are there any more, and nothing is replayed behind them."""
        self.replay = {number for number in self.replay or () if number < turns}
        self.undelivered = {number for number in self.undelivered if number < turns}


class Walk:
    """Compares requests with records."""

    def __init__(self, template: ChatTemplate, reader: ReplyReader) -> None:
        self._template, self._reader = template, reader

    def decide(self, record: Record, owed: Owed, question: Question, attempt: int) -> Answered | Takes:
        """What to do about ``question``; notes in ``owed`` what it has learnt of it."""
        ask = _Ask(record, question, self._template, self._reader)
        turns = record.turns
        if owed.replay is None:
            found = next(filter(ask.equals, turns if attempt > 1 else reversed(turns)), None)
            told = len(turns) if attempt == 1 else found.number if found else ask.reaches()
            owed.replay = set(range(told, len(turns)))
        else:
            found = next((turns[number] for number in owed.turns if ask.equals(turns[number])), None)
        if found is None and question.is_retry:
            found = next(filter(ask.equals, reversed(turns)), None)
        return Answered(found) if found is not None else ask.takes(min(owed.replay, default=None))


class _Ask:
    """One question against one record."""

    def __init__(self, record: Record, question: Question, template: ChatTemplate, reader: ReplyReader) -> None:
        self._record, self._question = record, question
        self._template, self._reader = template, reader
        self._unbridged = False

    def equals(self, turn: Turn) -> bool:
        """Whether it asks just what ``turn`` was asked."""
        record, tokens = self._record, self._question.tokens
        if tokens is not None:
            return np.array_equal(record.prompt(turn), np.array(tokens, np.int64))
        behind = self._behind(self._context_before(turn), turn.context)
        return behind is not None and np.array_equal(behind, record.tokens[turn.asked : turn.begin])

    def takes(self, cut: int | None) -> Takes:
        """The turn that it wants. ``cut``: number of the turn with which the record is to end first."""
        turns = self._record.turns[:cut]
        offset = turns[-1].end if turns else 0
        if turns:
            context = turns[-1].context
            behind = self._behind([turn for turn in turns if turn.context == context], context)
            if behind:
                return Takes(offset, behind, context, diverged=cut is not None)
        return Takes(offset, self._whole(), offset, diverged=cut is not None, unbridged=self._unbridged)

    def reaches(self) -> int:
        """How many turns of the record it has behind it, if it is a replay that has left the path; all: it goes on."""
        for turn in reversed(self._record.turns):
            if self._behind([*self._context_before(turn), turn], turn.context):
                return turn.number + 1
        return 0

    def _context_before(self, turn: Turn) -> list[Turn]:
        return [other for other in self._record.turns[: turn.number] if other.context == turn.context]

    def _whole(self) -> list[int]:
        if self._question.tokens is not None:
            return list(self._question.tokens)
        assert self._question.chat is not None, "it has messages or tokens"
        return self._template.render(self._question.chat)

    def _behind(self, turns: list[Turn], context: int) -> list[int] | None:
        """What it says behind ``turns``, the first ones of a context, as tokens; None: it does not go on there."""
        record, chat, tokens = self._record, self._question.chat, self._question.tokens
        if tokens is not None:
            past = record.tokens[context : turns[-1].end if turns else context]
            is_behind = len(tokens) > len(past) and np.array_equal(past, np.array(tokens[: len(past)], np.int64))
            return list(tokens[len(past) :]) if is_behind else None
        assert chat is not None, "it has messages or tokens"
        places = chat.said[-len(turns) :] if turns else []
        if len(places) < len(turns):
            return None
        ends = [*places[1:], len(chat.messages)]
        if not turns:
            return self._template.render(chat)
        if self._template.render(chat, places[0]) != record.tokens[context : turns[0].begin].tolist():
            return None
        reasoned: list[int] = []
        behind: list[int] | None = None
        for turn, place, end in zip(turns, places, ends, strict=True):
            if behind is not None and behind != record.tokens[turn.asked : turn.begin].tolist():
                return None
            reply = self._read(turn, self._question.stop)
            if not reply.is_said_by(chat.messages[place]):
                return None
            if reply.reasoning:
                reasoned.append(place)
            behind = self._template.bridge(chat, place, end, int(record.tokens[turn.end - 1]), reasoned)
            if behind is None:
                self._unbridged = True
                return None
        return behind

    def _read(self, turn: Turn, stop: tuple[str, ...]) -> Reply:
        opened = self._reader.opens_reasoning(self._record.prompt(turn))
        said = self._record.said(turn)
        return self._reader.read(said, opened=opened, tools=self._question.looks_for_calls, stop=stop)
