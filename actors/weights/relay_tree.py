"""Who feeds whom while a version spreads over machines: the server feeds few, each of them feeds few, and so on.

    server ─┬─▶ a ─┬─▶ c ─▶ …        ─▶  chunks, each passed on once it is verified
            │      └─▶ d
            └─▶ b ─ ─ ─ b's neighbour    ─ ─  on one machine: it waits, and maps the file

Invariants
- Nobody has more than ``children_max`` children; a neighbour on the same machine is no child.
- Nobody is fed by its own descendant, so there is no circle.
- Who complains about its feed gets another one; the feed's other children do the same when they notice.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from transport.address import ActorAddress


@dataclass(frozen=True)
class Place:
    """Where a puller gets a version: from ``feed`` (None: the server), and whether it can map the file there."""

    host: str
    feed: ActorAddress | None
    maps: bool


class RelayTree:
    """The tree of one version."""

    def __init__(self, children_max: int) -> None:
        self._children_max = children_max
        self._places: dict[ActorAddress, Place] = {}
        """In the order in which they came, so those that have most come first."""

    def place(self, puller: ActorAddress, host: str, avoid: ActorAddress | None = None) -> Place:
        """Where ``puller`` on ``host`` gets the version; ``avoid``: its feed so far, which has failed it."""
        for former in [p for p, at in self._places.items() if at.host == host and p.name == puller.name]:
            if former != puller:  # an earlier life
                del self._places[former]
        if avoid is not None:
            self._places.pop(avoid, None)
        known = self._places.get(puller)
        if known is None or (avoid is not None and known.feed == avoid):
            known = self._places[puller] = self._choose(puller, host)
        return known

    def _choose(self, puller: ActorAddress, host: str) -> Place:
        fed = self._fed_by(puller)
        children = Counter(at.feed for other, at in self._places.items() if not at.maps and other != puller)
        for other, at in self._places.items():
            if at.host == host and not at.maps and other not in fed:
                return Place(host, other, maps=True)
        for feed in (None, *self._places):
            passes_on = feed is None or not self._places[feed].maps
            if passes_on and feed not in fed and children[feed] < self._children_max:
                return Place(host, feed, maps=False)
        return Place(host, None, maps=False)

    def _fed_by(self, puller: ActorAddress) -> set[ActorAddress | None]:
        """``puller`` and all that comes after it."""
        fed: set[ActorAddress | None] = {puller}
        grown = True
        while grown:
            more = {other for other, at in self._places.items() if at.feed in fed} - fed
            fed |= more
            grown = bool(more)
        return fed
