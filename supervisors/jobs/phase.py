"""What is told of work that takes long before the first step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase is work that takes long before the first step, and how much of it is done."""

    name: str
    done: int
    total: int
    unit: str
    """What is counted: ``steps`` or ``bytes``."""


def to_nobody(_: object) -> None:
    """Tell nobody."""


Say = Callable[[str], None]
"""Callback that tells a person something once."""
Show = Callable[[Phase], None]
"""Callback that shows how far it is."""
