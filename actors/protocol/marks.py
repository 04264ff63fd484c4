"""Reads the marks of an episode's row: who has written each token, and where contexts and turns begin.

marks   -2 -1 -1  0  0 -1 -1  0 | -2 -1  1  1        a token of the model has its policy version as its mark
        ◀ leading ▶◀turn▶      ◀▶  ◀ lead.▶◀turn▶      a bar: a fresh context begins
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from actors.protocol.episodes import FRESH


@dataclass(frozen=True, slots=True)
class RowContext:
    """Holds one context of an episode, as positions in its row."""

    start: int
    first: int
    """Position of the model's first token in the context; ``end`` if the model has said nothing there."""
    end: int


def contexts(marks: np.ndarray) -> list[RowContext]:
    """All contexts of a row with these marks, in order."""
    starts = np.flatnonzero(marks == FRESH).tolist()
    said = np.flatnonzero(marks >= 0)
    found: list[RowContext] = []
    for start, end in pairwise([*starts, len(marks)]):
        at = int(np.searchsorted(said, start))
        found.append(RowContext(start, min(int(said[at]) if at < len(said) else end, end), end))
    return found


def turn_starts(marks: np.ndarray) -> np.ndarray:
    """int64[k] positions at which the model begins to speak, in a row with these marks."""
    said = marks >= 0
    return np.flatnonzero(said & ~np.append(False, said[:-1])) if len(marks) else np.empty(0, np.int64)


def whole_turns(marks: np.ndarray, *, under_way: bool) -> int:
    """Position where the last whole turn ends in a row with these marks; ``under_way``: the newest turn is not over."""
    end = len(marks)
    if under_way and end and marks[-1] >= 0:
        end = int(turn_starts(marks)[-1])
    said = np.flatnonzero(marks[:end] >= 0)
    return int(said[-1]) + 1 if len(said) else 0
