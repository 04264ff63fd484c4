"""Decides who feeds whom while a version spreads over machines: the server feeds a few, each of those a few, and so on.

    server ─┬─▶ a ─┬─▶ c ─▶ …        ─▶  chunks, each passed on once it is verified
            │      └─▶ d
            ├─▶ b ─ ─ ─ b's neighbour    ─ ─  on the same machine: it waits for b, and maps b's file
            ║
            ╚═▶ e ───▶ f ─▶ …            ═▶  to another site: once, whatever the number of machines there

Invariants
- A feed has at most ``children_max`` children at its own site, and as many at other sites. A neighbour on the same
  machine does not count as a child.
- A puller is fed from within its site if that is possible: a version enters another site once, and again only if the
  puller that brought it in has failed.
- Nothing is fed by its own descendant, so there is no circle.
- A puller that complains about its feed gets another one; the feed's other children complain when they notice.
- Two nodes of which one could not feed the other are ``apart`` for later versions as well, so that nodes that cannot
  reach each other find that out only once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from transport.address import ActorAddress


@dataclass(frozen=True)
class RelayPlace:
    """A puller gets a version from ``feed`` (None: the server); ``maps``: it maps the feed's file, on one machine."""

    host: str
    site: str
    feed: ActorAddress | None
    maps: bool


def nodes_of(puller: ActorAddress, feed: ActorAddress) -> frozenset[str]:
    """The nodes on which ``puller`` and ``feed`` run."""
    return frozenset(address.peer.name.partition(".")[0] for address in (puller, feed))


class RelayTree:
    """The tree arranges who feeds whom with one version. ``site``: where the server is."""

    def __init__(self, children_max: int, site: str = "", apart: AbstractSet[frozenset[str]] = frozenset()) -> None:
        self._children_max = children_max
        self._site = site
        self._apart = apart
        """Pairs of nodes, as ``nodes_of`` names them, that could not feed each other; shared by several trees."""
        self._places: dict[ActorAddress, RelayPlace] = {}
        """Place of each puller, in order of arrival, so that those that have received the most come first."""

    def place(self, puller: ActorAddress, host: str, site: str = "", avoid: ActorAddress | None = None) -> RelayPlace:
        """The place of ``puller`` on ``host``; ``avoid``: its present feed, if that has failed it."""
        for former in [p for p, at in self._places.items() if at.host == host and p.name == puller.name]:
            if former != puller:  # an earlier life
                del self._places[former]
        if avoid is not None:
            self._places.pop(avoid, None)
        known = self._places.get(puller)
        if known is None or (avoid is not None and known.feed == avoid):
            known = self._places[puller] = self._choose(puller, host, site)
        return known

    def _choose(self, puller: ActorAddress, host: str, site: str) -> RelayPlace:
        fed = self._fed_by(puller)
        for other, at in self._places.items():
            if at.host == host and not at.maps and other not in fed:
                return RelayPlace(host, site, other, maps=True)
        children = self._children(but=puller)
        for feed in self._feeds(site):
            if feed is not None and nodes_of(puller, feed) in self._apart:
                continue
            if feed not in fed and children[feed, self._site_of(feed) == site] < self._children_max:
                return RelayPlace(host, site, feed, maps=False)
        return RelayPlace(host, site, None, maps=False)

    def _site_of(self, feed: ActorAddress | None) -> str:
        return self._site if feed is None or feed not in self._places else self._places[feed].site

    def _children(self, but: ActorAddress) -> Counter[tuple[ActorAddress | None, bool]]:
        """Number of children of each feed at its own site (True) and at others (False), not counting ``but``."""
        places = [at for other, at in self._places.items() if not at.maps and other != but]
        return Counter((at.feed, self._site_of(at.feed) == at.site) for at in places)

    def _feeds(self, site: str) -> list[ActorAddress | None]:
        """The server (None) and the pullers that could feed a puller at ``site``, those at that site first."""
        pass_on: list[ActorAddress | None] = [None, *(other for other, at in self._places.items() if not at.maps)]
        return sorted(pass_on, key=lambda feed: self._site_of(feed) != site)

    def _fed_by(self, puller: ActorAddress) -> set[ActorAddress | None]:
        """``puller`` and all its descendants."""
        fed: set[ActorAddress | None] = {puller}
        grown = True
        while grown:
            more = {other for other, at in self._places.items() if at.feed in fed} - fed
            fed |= more
            grown = bool(more)
        return fed
