"""Decides what a request means, given the record of its episode. Pure functions, without a clock or a wait.

    the request equals that of an earlier turn ─┬─ a retry, or the episode replays ───────▶ Answered(turn)
                                                └─ else: asked once more on purpose ─┐
    the request continues the last turn of the last context ────────────────────────────▶ Takes, behind that turn
    else: history was rewritten, or a second conversation begun ────────────────────────▶ Takes, fresh
    turns of an earlier life are still to be replayed, and the request asks for none ───▶ Takes, cut at the first

Invariants
- A turn is undelivered until this life of the environment has been given its reply. A request that equals that of an
  undelivered turn is answered from the record, and no token is sampled twice.
- A restarted gateway does not know which turns are undelivered. In an environment's first life it assumes none, but a
  request that equals a turn's is answered by that turn. In a later life it assumes that the episode replays.
- Only the last context can be continued, since the row is append-only. A token question is compared by its tokens,
  messages by their rendering: the environment's tokens must be equal, each assistant's message what the agent was told.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from actors.gateway.record import Record, Turn
from actors.gateway.rendering import Chat, ChatTemplate
from actors.gateway.replies import Reply, ReplyReader


@dataclass(frozen=True, slots=True)
class Question:
    """Holds what an agent asks: messages, or their token ids."""

    chat: Chat | None = None
    tokens: tuple[int, ...] | None = None
    stop: tuple[str, ...] = ()
    turn_tokens: int | None = None
    """Most tokens of the answer."""
    is_retry: bool = False
    """Whether an SDK says that it has asked this before."""


@dataclass(frozen=True, slots=True)
class Answered:
    """Decides that a turn of the record is the answer."""

    turn: Turn


@dataclass(frozen=True, slots=True)
class Takes:
    """Decides that the model takes a turn behind ``tokens``."""

    offset: int
    tokens: list[int]
    context: int
    """Position at which the context begins; ``offset`` if ``tokens`` begin a fresh one."""
    diverged: bool = False
    """Whether the row is first cut at ``offset``."""
    unbridged: bool = False
    """Whether only the template keeps the turn from continuing the last context."""

    @property
    def fresh(self) -> bool:
        return self.context == self.offset

    @property
    def context_tokens(self) -> int:
        """Length of the context when the turn begins."""
        return self.offset - self.context + len(self.tokens)


@dataclass
class Undelivered:
    """Holds the numbers of the turns whose replies this life of the environment has not been given."""

    replay: set[int] | None = None
    """Turns of an earlier life that this one has yet to replay; None if they are not known."""
    own: set[int] = field(default_factory=set[int])
    """Turns of this life whose replies no agent was there to take."""

    @property
    def turns(self) -> list[int]:
        return sorted((self.replay or set()) | self.own)

    def delivered(self, turn: Turn) -> None:
        self.own.discard(turn.number)
        if self.replay:
            self.replay.discard(turn.number)

    def cut(self, turns: int) -> None:
        """Forget all but the first ``turns``: the others were cut, and nothing is replayed behind them."""
        self.replay = {number for number in self.replay or () if number < turns}
        self.own = {number for number in self.own if number < turns}


class Walk:
    """Compares requests with records."""

    def __init__(self, template: ChatTemplate, reader: ReplyReader) -> None:
        self._template, self._reader = template, reader

    def decide(self, record: Record, undelivered: Undelivered, question: Question, attempt: int) -> Answered | Takes:
        """What to do about ``question``; notes in ``undelivered`` which turns are to be replayed."""
        ask = _Ask(record, question, self._template, self._reader)
        turns = record.turns
        if undelivered.replay is None:
            found = next(filter(ask.equals, turns if attempt > 1 else reversed(turns)), None)
            told = len(turns) if attempt == 1 else found.number if found else ask.reaches()
            undelivered.replay = set(range(told, len(turns)))
        else:
            found = next((turns[number] for number in undelivered.turns if ask.equals(turns[number])), None)
        if found is None and question.is_retry:
            found = next(filter(ask.equals, reversed(turns)), None)
        return Answered(found) if found is not None else ask.takes(min(undelivered.replay, default=None))


class _Ask:
    """Compares one question with one record."""

    def __init__(self, record: Record, question: Question, template: ChatTemplate, reader: ReplyReader) -> None:
        self._record, self._question = record, question
        self._template, self._reader = template, reader
        self._unbridged = False

    def equals(self, turn: Turn) -> bool:
        """Whether the question equals the one that ``turn`` has answered."""
        record, tokens = self._record, self._question.tokens
        if tokens is not None:
            return np.array_equal(record.prompt(turn), np.array(tokens, np.int64))
        behind = self._behind(self._context_before(turn), turn.context)
        return behind is not None and np.array_equal(behind, record.tokens[turn.asked : turn.begin])

    def takes(self, cut: int | None) -> Takes:
        """The turn that the question asks for. ``cut``: number of the turn at which the record is cut first, if any."""
        turns = self._record.turns[:cut]
        offset = turns[-1].end if turns else 0
        if turns:
            context = turns[-1].context
            behind = self._behind([turn for turn in turns if turn.context == context], context)
            if behind:
                return Takes(offset, behind, context, diverged=cut is not None)
        return Takes(offset, self._whole(), offset, diverged=cut is not None, unbridged=self._unbridged)

    def reaches(self) -> int:
        """Number of turns of the record that the question continues: all, or fewer for a replay that has diverged."""
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
        """Tokens of the question behind ``turns``, the first of a context; None if it does not continue them."""
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
        return self._reader.read(said, opened=opened, chat=self._question.chat, stop=stop)
