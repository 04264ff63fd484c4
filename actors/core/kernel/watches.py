"""Who watches whom: the table of one process, for both sides of a watch. ``death_watch.py`` acts on it."""

from __future__ import annotations

import msgspec

from transport.address import ActorAddress, PeerId


class LocalWatch(msgspec.Struct, frozen=True):
    """A watch that an actor of this process holds on somebody."""

    watch_id: int
    watcher: str
    target: ActorAddress


class Watches:
    """The watches that actors of this process hold, and those on them. It sends nothing itself."""

    def __init__(self) -> None:
        self._held: dict[int, LocalWatch] = {}
        self._held_by_peer: dict[PeerId, dict[int, None]] = {}
        self._on_local: dict[str, dict[tuple[PeerId, int], None]] = {}

    # held by actors of this process

    def hold(self, watch: LocalWatch) -> None:
        """Remember a watch that an actor of this process holds."""
        self._held[watch.watch_id] = watch
        self._held_by_peer.setdefault(watch.target.peer, {})[watch.watch_id] = None

    def release(self, watch_id: int) -> LocalWatch | None:
        """Forget a held watch; returns it the first time, None ever after."""
        watch = self._held.pop(watch_id, None)
        if watch is not None:
            ids = self._held_by_peer[watch.target.peer]
            del ids[watch_id]
            if not ids:
                del self._held_by_peer[watch.target.peer]
        return watch

    def is_held(self, watch_id: int, peer: PeerId) -> bool:
        """Whether an actor here holds that watch on an actor of ``peer``."""
        watch = self._held.get(watch_id)
        return watch is not None and watch.target.peer == peer

    def held_on(self, peer: PeerId) -> list[int]:
        """The watches that actors of this process hold on actors of ``peer``, oldest first."""
        return list(self._held_by_peer.get(peer, ()))

    # on actors of this process

    def add_watcher(self, target: str, peer: PeerId, watch_id: int) -> None:
        """Somebody at ``peer`` (this process included) watches the local actor ``target``."""
        self._on_local.setdefault(target, {})[peer, watch_id] = None

    def remove_watcher(self, target: str, peer: PeerId, watch_id: int) -> None:
        """Idempotent."""
        watchers = self._on_local.get(target)
        if watchers is not None:
            watchers.pop((peer, watch_id), None)
            if not watchers:
                del self._on_local[target]

    def remove_peer(self, peer: PeerId) -> None:
        """Forget the watchers of a peer that is gone."""
        for target in list(self._on_local):
            for watcher_peer, watch_id in list(self._on_local[target]):
                if watcher_peer == peer:
                    self.remove_watcher(target, peer, watch_id)

    def take_watchers(self, target: str) -> list[tuple[PeerId, int]]:
        """Who is to be told that ``target`` has ended; forgets them."""
        return list(self._on_local.pop(target, ()))

    def counts(self) -> tuple[int, int]:
        """Watches held by this process, and watches on its actors."""
        return len(self._held), sum(len(watchers) for watchers in self._on_local.values())
