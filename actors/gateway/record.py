"""An episode's row as contexts and turns: a copy of what the ledger holds, kept up to date from its answers.

    versions  -2 -1 -1  7 7 7  -1 -1  7 8   -2 -1 -1  8 8
              └─ env ─┘ turn 0 └env┘ turn 1 └─ env ─┘ turn 2
              └──────── context 0 ────────┘ └── context 1 ─┘

Invariants
- Tokens behind the last whole turn are left out: the agent that asked there may ask again.
- A record holds nothing that only the gateway knows: it can be made anew from GetEpisode at any time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from actors.protocol.episodes import FRESH, EpisodeRecord, TurnTaken


@dataclass(frozen=True, slots=True)
class Turn:
    """Holds the positions of one turn of the model in the row."""

    number: int
    context: int
    """Position at which its context begins."""
    asked: int
    """Position at which the environment's tokens before it begin."""
    begin: int
    end: int


class Record:
    """Holds the tokens, turns and budgets of one episode, as far as the gateway knows them."""

    def __init__(self, found: EpisodeRecord) -> None:
        self.context = found.context
        self.tokens, self.logprobs, self.versions = found.tokens, found.logprobs, found.versions
        self.turns = turns_of(self.versions)
        self._cut(self.turns[-1].end if self.turns else 0)
        self.model_tokens_left, self.turns_left = found.model_tokens_left, found.turns_left
        self.left_s = found.left_s
        """Seconds that the episode had left when the ledger answered."""

    @property
    def length(self) -> int:
        return len(self.tokens)

    def cut(self, length: int) -> None:
        """Drop everything from ``length`` on; the model's tokens there return to its budget."""
        self.model_tokens_left += int(np.count_nonzero(self.versions[length:] >= 0))
        self._cut(length)
        self.turns = turns_of(self.versions)

    def _cut(self, length: int) -> None:
        self.tokens, self.logprobs, self.versions = self.tokens[:length], self.logprobs[:length], self.versions[:length]

    def add(self, asked: int, spoken: np.ndarray, said: TurnTaken, *, fresh: bool) -> Turn:
        """Append what the environment said, and the model's turn that followed."""
        marks = np.full(len(spoken), -1, np.int32)
        if fresh:
            marks[0] = FRESH
        self._cut(asked)
        self.tokens = np.concatenate([self.tokens, spoken, said.tokens])
        self.logprobs = np.concatenate([self.logprobs, np.zeros(len(spoken), np.float32), said.logprobs])
        self.versions = np.concatenate([self.versions, marks, said.versions])
        self.turns = turns_of(self.versions)
        self.model_tokens_left -= len(said.tokens)
        return self.turns[-1]

    def said(self, turn: Turn) -> np.ndarray:
        """int32[n] tokens of the model in ``turn``."""
        return self.tokens[turn.begin : turn.end]

    def prompt(self, turn: Turn) -> np.ndarray:
        """int32[n] all tokens before ``turn`` in its context."""
        return self.tokens[turn.context : turn.begin]


def turns_of(versions: np.ndarray) -> list[Turn]:
    """The turns of a row, by the version of each token."""
    model = np.concatenate([[False], versions >= 0, [False]])
    begins, ends = np.flatnonzero(~model[:-1] & model[1:]), np.flatnonzero(model[:-1] & ~model[1:])
    contexts = np.flatnonzero(versions == FRESH)
    turns: list[Turn] = []
    asked = 0
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        before = contexts[: np.searchsorted(contexts, begin)]
        context = int(before[-1]) if len(before) else 0
        turns.append(Turn(len(turns), context, max(asked, context), begin, end))
        asked = end
    return turns
