"""The verbs of death watch, on the table of ``watches.py``; ``actors/core/watch.py`` draws the flow."""

from __future__ import annotations

from actors.core.kernel.answers import TargetGone
from actors.core.kernel.port import Port, RunningActor
from actors.core.kernel.watches import LocalWatch
from actors.core.watch import Down, Gone
from transport.address import ActorAddress, PeerId
from transport.envelope import Kind
from transport.transport import Lane, SendOutcome


class DeathWatch:
    """Watching, being watched, and telling."""

    def __init__(self, port: Port) -> None:
        self._port = port

    def watch(self, cell: RunningActor, target: ActorAddress) -> None:
        """See ``Context.watch``."""
        port = self._port
        if target in cell.watching:
            return
        watch_id = port.next_id()
        cell.watching[target] = watch_id
        self._port.watches.hold(LocalWatch(watch_id, cell.name, target))
        if target.peer == port.own:
            if target.name in port.cells:
                self._port.watches.add_watcher(target.name, port.own, watch_id)
            else:
                self.end(watch_id, Gone.UNKNOWN_ACTOR, "")
            return
        outcome = port.post(target.peer, target.endpoint, Lane.SIGNAL, Kind.WATCH, None,
                             target=target.name, request_id=watch_id, surely=True)  # fmt: skip
        if outcome is not SendOutcome.QUEUED:
            self.end(watch_id, Gone.UNREACHABLE, f"there is no link to {target.peer}")

    def unwatch(self, cell: RunningActor, target: ActorAddress) -> None:
        """See ``Context.unwatch``."""
        port = self._port
        watch_id = cell.watching.pop(target, 0)
        if not watch_id or self._port.watches.release(watch_id) is None:
            return
        if target.peer == port.own:
            self._port.watches.remove_watcher(target.name, port.own, watch_id)
        else:
            port.post(target.peer, "", Lane.SIGNAL, Kind.UNWATCH, None, target=target.name, request_id=watch_id)

    def end(self, watch_id: int, reason: Gone, detail: str) -> None:
        """The watched actor is gone: the watcher gets its one Down."""
        port = self._port
        watch = self._port.watches.release(watch_id)
        if watch is None:
            return
        cell = port.cells.get(watch.watcher)
        if cell is not None and cell.watching.get(watch.target) == watch_id:
            cell.put_own(Down(address=watch.target, reason=reason, detail=detail), watch.target, watch_id)

    def actor_ended(self, name: str, gone: TargetGone) -> None:
        """Tell everybody who watches the local actor ``name``."""
        port = self._port
        for peer, watch_id in self._port.watches.take_watchers(name):
            if peer == port.own:
                self.end(watch_id, gone.reason, gone.detail)
            else:
                port.post(peer, "", Lane.MESSAGE, Kind.DOWN, gone, request_id=watch_id, surely=True)

    def peer_gone(self, peer: PeerId, reason: Gone, why: str) -> None:
        """Nobody at ``peer`` can be heard any more: end what is held on it, forget what it holds."""
        for watch_id in self._port.watches.held_on(peer):
            self.end(watch_id, reason, why)
        self._port.watches.remove_peer(peer)
