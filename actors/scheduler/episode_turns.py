"""Compares a turn that is asked for with the row of its episode, and says what the question means.

    TakeTurn × row ─┬─ the row holds the same there ──▶ Standing: joined while it runs, answered from the row afterwards
                    ├─ it continues the row's end ────▶ NextTurn, perhaps with a cut before it
                    ├─ no turn, no token is left ─────▶ SPENT
                    └─ anything else ─────────────────▶ a sentence that says what does not fit

Invariants
- Pure: nothing is changed here, and equal rows give equal answers.
- A row is cut for a diverging replay, or to remove the environment's tokens before a turn without a token of the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from actors.ledger.batch import SampleState, StepBatch
from actors.protocol.episodes import ENVIRONMENT, FRESH, TakeTurn
from actors.protocol.marks import turn_starts, whole_turns
from actors.protocol.tokens import FinishReason


@dataclass(frozen=True)
class Standing:
    """The turn that is asked for has begun: the model's tokens are in the row from ``start`` on."""

    start: int


@dataclass(frozen=True)
class NextTurn:
    """The turn is a new one, which ends at ``limit`` at the latest."""

    limit: int
    cut: bool
    """Whether the row is cut at the question's offset first."""


SPENT: Final = "spent"


@dataclass(frozen=True)
class Turn:
    """Holds a turn of the model that is over."""

    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish: FinishReason


class EpisodeRow:
    """Reads one row of a batch that is not committed, as it is now."""

    def __init__(self, batch: StepBatch, row: int) -> None:
        assert batch.episodes is not None, "only episodes have turns"
        self._batch, self._row, self._bounds = batch, row, batch.episodes
        self._tokens, self.marks = batch.held(row), batch.marks(row)
        self._waits = bool(batch.state[row] == SampleState.WAITING)
        self.whole = whole_turns(self.marks, under_way=not self._waits)
        """Position at which the last whole turn ends."""

    @property
    def model_tokens_left(self) -> int:
        """Number of tokens that the model may still generate after the last whole turn."""
        return self._batch.sampling.max_tokens - int(np.count_nonzero(self.marks[: self.whole] >= 0))

    @property
    def tokens_left(self) -> int:
        """Number of tokens for which the row has room after the last whole turn."""
        return self._batch.width - self.whole

    @property
    def turns_left(self) -> int:
        """Number of turns that the model may still take after the last whole one."""
        return self._bounds.turns_max - len(turn_starts(self.marks[: self.whole]))

    def record(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens, log-probabilities and marks up to the last whole turn, copied."""
        end = self.whole
        logprobs = self._batch.held_logprobs(self._row)
        return self._tokens[:end].copy(), logprobs[:end].copy(), self.marks[:end].copy()

    def place(self, ask: TakeTurn) -> Standing | NextTurn | str:
        """What ``ask`` means for this row: a sentence if it contradicts the row, SPENT if there is no room for it."""
        end, length = ask.offset + len(ask.tokens), len(self.marks)
        if ask.offset < 0 or not len(ask.tokens) or ask.turn_tokens < 1:
            return f"a turn at {ask.offset} of {len(ask.tokens)} tokens, {ask.turn_tokens} to come: each is at least 1"
        if self._holds(ask, end):
            return Standing(end)
        void = self._waits and ask.offset == self.whole < length
        if not (ask.diverged or void or (self._waits and ask.offset == length)):
            state = "waits for its environment" if self._waits else "has a turn under way"
            return f"a turn at {ask.offset}, where the episode has {length} tokens, other ones there, and {state}"
        if ask.offset > length or not self._is_boundary(ask.offset):
            return f"a turn at {ask.offset}, where no turn of the model ends"
        if ask.offset == 0 and not ask.fresh:
            return "a first context that is none: an episode begins with a fresh one"
        before = self.marks[: ask.offset]
        said = int(np.count_nonzero(before >= 0))
        room = min(
            self._batch.sampling.max_tokens - said, self._batch.width - end, self._bounds.turn_tokens, ask.turn_tokens
        )
        if room < 1 or len(turn_starts(before)) >= self._bounds.turns_max:
            return SPENT
        return NextTurn(end + room, cut=ask.offset < length)

    def turn_at(self, start: int) -> Turn | None:
        """The model's turn that begins at ``start``, once it is over."""
        others = np.flatnonzero(self.marks[start:] < 0)
        if not len(others) and not self._waits:
            return None
        at = slice(start, start + int(others[0]) if len(others) else len(self.marks))
        tokens = self._tokens[at].copy()
        stopped = len(tokens) > 0 and tokens[-1] in self._batch.stop_ids
        finish = FinishReason.STOP if stopped else FinishReason.LENGTH
        return Turn(tokens, self._batch.held_logprobs(self._row)[at].copy(), self.marks[at].copy(), finish)

    def last_turn(self) -> int:
        """Position where the newest whole turn begins: the row may be cut from there on."""
        others = np.flatnonzero(self.marks[: self.whole] < 0)
        return int(others[-1]) + 1 if len(others) else 0

    def _holds(self, ask: TakeTurn, end: int) -> bool:
        """Whether the row has exactly these tokens of the environment there, and the model's turn after them."""
        if end > len(self.marks) or not self._is_boundary(ask.offset):
            return False
        marks = self.marks[ask.offset : end]
        behind = self.marks[end : end + 1]
        return (
            marks[0] == (FRESH if ask.fresh else ENVIRONMENT)
            and bool((marks[1:] == ENVIRONMENT).all())
            and not (len(behind) and behind[0] == ENVIRONMENT)
            and np.array_equal(self._tokens[ask.offset : end], ask.tokens)
        )

    def _is_boundary(self, offset: int) -> bool:
        """Whether a turn of the model ends at ``offset``, or the row or a fresh context begins there."""
        if offset in (0, self.whole):
            return True
        if offset > len(self.marks) or self.marks[offset - 1] < 0:
            return offset < len(self.marks) and self.marks[offset] == FRESH
        return offset == len(self.marks) or self.marks[offset] < 0
