"""Who feeds whom while a version spreads over machines: the server feeds few, each of them feeds few, and so on.

    server ─┬─▶ a ─┬─▶ c ─▶ …        ─▶  chunks, each passed on once it is verified
            │      └─▶ d
            ├─▶ b ─ ─ ─ b's neighbour    ─ ─  on one machine: it waits, and maps the file
            ║
            ╚═▶ e ───▶ f ─▶ …            ═▶  to another site: once, whatever the number of machines there

Invariants
- Nobody has more than ``children_max`` children at its own site, nor at others: those do not take the place of these. A
  neighbour on the same machine is no child.
- Whoever can be fed from within its site is: a version enters another site once, and again only when its feed failed.
- Nobody is fed by its own descendant, so there is no circle.
- Who complains about its feed gets another one; the feed's other children do the same when they notice.
- Nodes of which one could not feed the other are ``apart``, with the versions that come next, too: two that cannot
  reach each other find that out once, and not with each version.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from transport.address import ActorAddress


@dataclass(frozen=True)
class Place:
    """Says where a puller gets a version: from ``feed`` (None: the server), and whether it can map the file there."""

    host: str
    site: str
    feed: ActorAddress | None
    maps: bool


def nodes_of(puller: ActorAddress, feed: ActorAddress) -> frozenset[str]:
    """The nodes on which these two run."""
    return frozenset(address.peer.name.partition(".")[0] for address in (puller, feed))


class RelayTree:
    """Arranges who feeds whom with one version. ``site``: where the server is."""

    def __init__(self, children_max: int, site: str = "", apart: AbstractSet[frozenset[str]] = frozenset()) -> None:
        self._children_max = children_max
        self._site = site
        self._apart = apart
        """Pairs of nodes, as ``nodes_of`` names them, that could not feed each other; shared by several trees."""
        self._places: dict[ActorAddress, Place] = {}
        """Place of each puller, in the order in which they came, so those that have most come first."""

    def place(self, puller: ActorAddress, host: str, site: str = "", avoid: ActorAddress | None = None) -> Place:
        """Where ``puller`` on ``host`` gets the version; ``avoid``: its feed so far, which has failed it."""
        for former in [p for p, at in self._places.items() if at.host == host and p.name == puller.name]:
            if former != puller:  # an earlier life
                del self._places[former]
        if avoid is not None:
            self._places.pop(avoid, None)
        known = self._places.get(puller)
        if known is None or (avoid is not None and known.feed == avoid):
            known = self._places[puller] = self._choose(puller, host, site)
        return known

    def _choose(self, puller: ActorAddress, host: str, site: str) -> Place:
        fed = self._fed_by(puller)
        for other, at in self._places.items():
            if at.host == host and not at.maps and other not in fed:
                return Place(host, site, other, maps=True)
        children = self._children(but=puller)
        for feed in self._feeds(site):
            if feed is not None and nodes_of(puller, feed) in self._apart:
                continue
            if feed not in fed and children[feed, self._site_of(feed) == site] < self._children_max:
                return Place(host, site, feed, maps=False)
        return Place(host, site, None, maps=False)

    def _site_of(self, feed: ActorAddress | None) -> str:
        return self._site if feed is None or feed not in self._places else self._places[feed].site

    def _children(self, but: ActorAddress) -> Counter[tuple[ActorAddress | None, bool]]:
        """How many each feed has at its own site (True), and at others."""
        places = [at for other, at in self._places.items() if not at.maps and other != but]
        return Counter((at.feed, self._site_of(at.feed) == at.site) for at in places)

    def _feeds(self, site: str) -> list[ActorAddress | None]:
        """Who could feed somebody at ``site``, the nearest first."""
        pass_on: list[ActorAddress | None] = [None, *(other for other, at in self._places.items() if not at.maps)]
        return sorted(pass_on, key=lambda feed: self._site_of(feed) != site)

    def _fed_by(self, puller: ActorAddress) -> set[ActorAddress | None]:
        """``puller`` and all that comes after it."""
        fed: set[ActorAddress | None] = {puller}
        grown = True
        while grown:
            more = {other for other, at in self._places.items() if at.feed in fed} - fed
            fed |= more
            grown = bool(more)
        return fed
