"""A guessing game over token ids for simulated environments: each word is a function of the seed and the past turns.

    opening ─▶ model's turn ─▶ hint ─▶ model's turn ─▶ … until a guess hits, or the drawn number of turns is reached

Invariants
- A game without ``drift`` answers the same turns with the same words in every life of its environment.
- A game with ``drift`` may say other words in a later life, from some turn on: it is the nondeterministic variant.
- Now and then a turn begins a fresh context, as an agent that rewrites the history does: a later one has more tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

WORDS = 40
"""Number of different tokens that an environment uses; none of them ends a turn."""
_FIRST_WORD = 4
_FRESH = 0.15
"""Probability that a turn begins a fresh context."""


@dataclass(frozen=True)
class Word:
    """Tokens that an environment says, and whether they begin a fresh context."""

    tokens: np.ndarray  # int32[n]
    fresh: bool


@dataclass(frozen=True)
class Game:
    """Plays one episode. ``drift``: probability, in each turn, that a later life says something else from there on."""

    seed: int
    prompt: int
    sibling: int
    turns_max: int
    drift: float = 0.0

    def _rng(self, *names: object) -> random.Random:
        return random.Random("/".join(str(name) for name in (self.seed, self.prompt, *names)))

    @property
    def turns(self) -> int:
        """The most turns that this game has, as drawn."""
        return self._rng(self.sibling, "turns").randint(1, self.turns_max)

    def say(self, said: Sequence[np.ndarray], life: int) -> Word | None:
        """The environment's word after these turns of the model; None: the game is over."""
        if len(said) >= self.turns or any(self.secret in turn for turn in said[-1:]):
            return None
        heard = xxhash.xxh3_64_hexdigest(b"".join(turn.astype("<i4").tobytes() for turn in said))
        rng = self._rng(self.sibling, "word", len(said), heard, self._mood(len(said), life))
        fresh = not said or rng.random() < _FRESH
        count = rng.randint(1, 5) + (3 * len(said) if fresh else 0)
        tokens = [rng.randrange(_FIRST_WORD, _FIRST_WORD + WORDS) for _ in range(count)]
        return Word(np.array(tokens, np.int32), fresh)

    @property
    def secret(self) -> int:
        """The token that is to be guessed, the same for all siblings."""
        return self._rng("secret").randrange(_FIRST_WORD, 64)

    def _mood(self, turn: int, life: int) -> int:
        """The life if it has drifted from the first one by this turn, else 0."""
        drifts = any(self._rng(self.sibling, "drift", t, life).random() < self.drift for t in range(turn + 1))
        return life if life > 1 and drifts else 0

    def reward(self, row: np.ndarray) -> float:
        """A reward from 0 to 1 in quarters, hashed from the row: in some groups all agree, in most not."""
        return (xxhash.xxh3_64_intdigest(row.astype("<i4").tobytes()) % 5) / 4
