"""A guessing game: the model guesses the number of its row, and hears whether the number is higher or lower.

    user: Guess my number, 1 to 8.     assistant: 4     user: higher     assistant: 6     user: right

The game is deterministic: its answers follow from the row and the guesses. The preset ``episodes`` trains on it.
"""

from __future__ import annotations

import random
import re
from typing import Any, Final

_NUMBER: Final = re.compile(r"\d+")


class GuessNumber:
    """Plays one game. The reward of a right guess is 1 for the first, and falls in even steps towards 0."""

    def __init__(self, numbers: int = 8, guesses: int = 4) -> None:
        self._numbers = numbers
        self._guesses = guesses
        self._secret = 0
        self._used = 0
        self._right = False

    def reset(self, row: dict[str, Any]) -> str:
        self._secret = int(row["answer"])
        return f"Guess my number, 1 to {self._numbers}."

    def step(self, answer: str) -> tuple[str, float, bool]:
        self._used += 1
        found = _NUMBER.search(answer)
        guess = int(found.group()) if found else 0
        self._right = guess == self._secret
        if self._right:
            return "right", 1.0 - (self._used - 1) / self._guesses, True
        if not 1 <= guess <= self._numbers:
            said = f"say a number, 1 to {self._numbers}"
        else:
            said = "higher" if guess < self._secret else "lower"
        return said, 0.0, self._used == self._guesses

    def metrics(self) -> dict[str, float]:
        return {"found": float(self._right), "guesses": float(self._used)}

    def example(self, row: dict[str, Any], draw: random.Random) -> list[dict[str, str]]:
        """A game as a fair player plays it, which a tiny model is shown before it learns by itself.

        The player draws a number that is still possible; one guess in five, drawn from all numbers, is careless.
        """
        messages = [{"role": "user", "content": self.reset(row)}]
        low, high, done = 1, self._numbers, False
        while not done:
            careless = draw.random() < 0.2
            guess = draw.randint(1, self._numbers) if careless else draw.randint(low, high)
            said, _, done = self.step(str(guess))
            messages += [{"role": "assistant", "content": str(guess)}, {"role": "user", "content": said}]
            low, high = (max(low, guess + 1), high) if said == "higher" else (low, min(high, guess - 1))
        return messages
