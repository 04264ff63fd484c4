"""Siblings with the same tokens so far share a row of the cache until they differ.

    slots            0   1   2   3   4            a slot is a sample, a branch a row of the cache
    branches         0   0   0   1   1
    newest tokens    a   b   a   c   c
                     │   └── forks: a new row, copied from row 0
                     └────── 0 and 2 stay in row 0, 3 and 4 in row 1

Invariants
- Two slots are on one branch only if all of their tokens but the newest are the same; after ``rearranged`` the newest
  is the same too. So the logits of a branch hold for each of its slots.
- Branches are 0 … rows - 1 without a gap. No arrangement reads a row that it has overwritten.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Rearranges the rows of a cache: ``sources[j]`` is copied onto ``targets[j]``, then the first ``rows`` stay."""

    branches: NDArray[np.int64]
    """Row of each slot afterwards, int64[n]."""
    sources: NDArray[np.int64]
    targets: NDArray[np.int64]
    rows: int


def one_slot_each(branches: NDArray[np.int64], rows: int) -> NDArray[np.int64]:
    """For each of ``rows`` branches one of its slots, int64[rows]; slots of a branch have the same tokens."""
    slots = np.zeros(rows, np.int64)
    slots[branches] = np.arange(len(branches))
    return slots


def rearranged(branches: NDArray[np.int64], tokens: NDArray[np.int64]) -> Arrangement:
    """Fork where slots of one branch differ in their newest token, and drop branches without a slot.

    Args:
        branches: each slot's present row, int64[n].
        tokens: each slot's newest token, int64[n].
    """
    keys = branches * (int(tokens.max(initial=0)) + 1) + tokens
    _, first, ways = np.unique(keys, return_index=True, return_inverse=True)
    rows = len(first)
    source = branches[first]  # ascending: ways are ordered by branch, then by token
    stays = np.ones(rows, bool)
    stays[1:] = source[1:] != source[:-1]
    stays &= source < rows
    place = np.where(stays, source, -1)
    taken = np.zeros(rows, bool)
    taken[source[stays]] = True
    place[~stays] = np.flatnonzero(~taken)
    return Arrangement(place[ways], source[~stays], place[~stays], rows)
