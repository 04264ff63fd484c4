"""A guessing game over token ids, which simulated environments play: each word is a function of the seed and the past.

    opening ─▶ model's turn ─▶ hint ─▶ model's turn ─▶ … until a guess hits, or the drawn number of turns is over

Invariants
- A deterministic game says the same again to the same turns, whichever life of its environment says it.
- A game with ``drift`` may say other words in a later life, from some turn on: it is the nondeterministic twin.
- Now and then its agent rewrites the history: a fresh context begins with all that was said before.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

WORDS = 40
"""Different tokens that an environment uses; they end no turn."""
_FIRST_WORD = 4
_FRESH = 0.15
"""How often a turn begins a fresh context."""


@dataclass(frozen=True)
class Word:
    """An environment says these tokens."""

    tokens: np.ndarray  # int32[n]
    fresh: bool


@dataclass(frozen=True)
class Game:
    """One episode of it. ``drift``: how often, in each turn, a later life says something else."""

    seed: int
    prompt: int
    sibling: int
    turns_max: int
    drift: float = 0.0

    def _rng(self, *names: object) -> random.Random:
        return random.Random("/".join(str(name) for name in (self.seed, self.prompt, *names)))

    @property
    def turns(self) -> int:
        """Turns after which it is over at the latest."""
        return self._rng(self.sibling, "turns").randint(1, self.turns_max)

    def say(self, said: Sequence[np.ndarray], life: int) -> Word | None:
        """What comes after these turns of the model; None: the game is over."""
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
        """0 unless this life says something else here than the first one would."""
        drifts = any(self._rng(self.sibling, "drift", t, life).random() < self.drift for t in range(turn + 1))
        return life if life > 1 and drifts else 0

    def reward(self, row: np.ndarray) -> float:
        """In quarters, from all that was said: some groups are of one mind, most are not."""
        return (xxhash.xxh3_64_intdigest(row.astype("<i4").tobytes()) % 5) / 4
