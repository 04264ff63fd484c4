"""How work that takes long before the first step reports its progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase is work that takes long before the first step, with how much of it is done."""

    name: str
    done: int
    total: int
    unit: str
    """Unit of ``done`` and ``total``: ``steps`` or ``bytes``."""


def to_nobody(_: object) -> None:
    """Ignore a report."""


Say = Callable[[str], None]
"""Callback that tells a person something once."""
Show = Callable[[Phase], None]
"""Callback that shows the progress of a phase."""
