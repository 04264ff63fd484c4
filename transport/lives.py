"""Knows which life of a name is valid: the newest that was welcomed; all earlier ones are fenced.

Invariants
- Incarnations are random, so age is the order of welcome at this process, not the number.
- A fenced life stays fenced while it is remembered; memory is bounded by names and by lives of a name.
"""

from __future__ import annotations

from collections import OrderedDict

from configs.limits import Limits
from transport.address import PeerId


class Lives:
    """Remembers the lives of every name, oldest first."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._known: OrderedDict[str, list[PeerId]] = OrderedDict()

    def is_fenced(self, peer: PeerId) -> bool:
        """Whether a newer life of the same name has been welcomed."""
        lives = self._known.get(peer.name, [])
        return peer in lives[:-1]

    def welcome(self, peer: PeerId) -> None:
        """Make ``peer`` the valid life of its name."""
        lives = self._known.setdefault(peer.name, [])
        if not lives or lives[-1] != peer:
            lives.append(peer)
        del lives[: -self._limits.lives_remembered]
        self._known.move_to_end(peer.name)
        if len(self._known) > self._limits.names_remembered:
            self._known.popitem(last=False)
