"""How many machines of a cluster are asked for, and which are given back first.

Pure: which machines there are and how many are wanted in, names and a number out.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class KeepingView:
    """Describes the machines of one run."""

    staying: Sequence[str]
    """Machines that were asked for and not told to go, by age."""
    target: int
    """Machines that are wanted."""
    in_use: Collection[str] = ()
    """Machines with workers, as far as that is known: they are given back last."""


class Keeping(NamedTuple):
    """Says which machines to give back, and how many to ask for, to have as many as are wanted."""

    give_back: list[str]
    ask_for: int


def decide(view: KeepingView) -> Keeping:
    """What to give back, idle machines first and of these the youngest, or how many to ask for."""
    kept_first = sorted(view.staying, key=lambda node: node not in view.in_use)
    return Keeping(kept_first[view.target :], max(0, view.target - len(view.staying)))
