"""The verbs of death watch, on the bookkeeping of ``watch.py``, where the flow is drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from actors.core.kernel.answers import TargetGone
from actors.core.kernel.cell import Cell
from actors.core.watch import Down, Gone, LocalWatch, Watches
from transport.address import ActorAddress, PeerId
from transport.envelope import Kind
from transport.transport import Lane, SendOutcome

if TYPE_CHECKING:
    from actors.core.kernel.router import Router


class DeathWatch:
    """Watching, being watched, and telling."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self.watches = Watches()

    def watch(self, cell: Cell, target: ActorAddress) -> None:
        """See ``Context.watch``."""
        router = self._router
        if target in cell.watching:
            return
        watch_id = router.next_id()
        cell.watching[target] = watch_id
        self.watches.hold(LocalWatch(watch_id, cell.name, target))
        if target.peer == router.own:
            if target.name in router.cells:
                self.watches.add_watcher(target.name, router.own, watch_id)
            else:
                self.end(watch_id, Gone.UNKNOWN_ACTOR, "")
            return
        outcome = router.post(target.peer, target.endpoint, Lane.SIGNAL, Kind.WATCH, None,
                             target=target.name, request_id=watch_id, surely=True)  # fmt: skip
        if outcome is not SendOutcome.QUEUED:
            self.end(watch_id, Gone.UNREACHABLE, f"there is no link to {target.peer}")

    def unwatch(self, cell: Cell, target: ActorAddress) -> None:
        """See ``Context.unwatch``."""
        router = self._router
        watch_id = cell.watching.pop(target, 0)
        if not watch_id or self.watches.release(watch_id) is None:
            return
        if target.peer == router.own:
            self.watches.remove_watcher(target.name, router.own, watch_id)
        else:
            router.post(target.peer, "", Lane.SIGNAL, Kind.UNWATCH, None, target=target.name, request_id=watch_id)

    def end(self, watch_id: int, reason: Gone, detail: str) -> None:
        """The watched actor is gone: the watcher gets its one Down."""
        router = self._router
        watch = self.watches.release(watch_id)
        if watch is None:
            return
        cell = router.cells.get(watch.watcher)
        if cell is not None and cell.watching.get(watch.target) == watch_id:
            cell.put_own(Down(address=watch.target, reason=reason, detail=detail), watch.target, watch_id)

    def actor_ended(self, name: str, gone: TargetGone) -> None:
        """Tell everybody who watches the local actor ``name``."""
        router = self._router
        for peer, watch_id in self.watches.take_watchers(name):
            if peer == router.own:
                self.end(watch_id, gone.reason, gone.detail)
            else:
                router.post(peer, "", Lane.MESSAGE, Kind.DOWN, gone, request_id=watch_id, surely=True)

    def peer_gone(self, peer: PeerId, reason: Gone, why: str) -> None:
        """Nobody at ``peer`` can be heard any more: end what is held on it, forget what it holds."""
        for watch_id in self.watches.held_on(peer):
            self.end(watch_id, reason, why)
        self.watches.remove_peer(peer)
