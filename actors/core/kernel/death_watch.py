"""Who watches whom, for both sides of a watch; ``actors/core/watch.py`` draws the flow.

A WATCH goes on the signal lane, so that it never waits behind weights. A DOWN goes on the message lane, behind all that
the actor has sent there: Erlang guarantees that order between two processes for all signals, and code that expects a
worker's last messages before its Down relies on it.
"""

from __future__ import annotations

from actors.core.kernel.answers import Caller, TargetGone
from actors.core.kernel.port import Port, RunningActor
from actors.core.watch import Down, Gone
from transport.address import ActorAddress, PeerId
from transport.envelope import Kind
from transport.transport import Lane, SendOutcome


class DeathWatch:
    """Watches on behalf of the actors of one process, and tells those who watch them."""

    def __init__(self, port: Port) -> None:
        self._port = port
        self.held: dict[int, tuple[str, ActorAddress]] = {}
        """Watches of actors of this process by their ids: the watcher's name, and whom it watches."""
        self.watchers: dict[str, dict[Caller, None]] = {}
        """Watchers of each actor of this process, by its name; each under the id of the watch."""

    def watch(self, cell: RunningActor, target: ActorAddress) -> None:
        port = self._port
        if target in cell.watching:
            return
        watch_id = port.next_id()
        cell.watching[target] = watch_id
        self.held[watch_id] = (cell.name, target)
        if target.peer == port.own:
            if target.name in port.cells:
                self.add_watcher(target.name, Caller(port.own, watch_id))
            else:
                self.end(watch_id, Gone.UNKNOWN_ACTOR, "")
            return
        outcome = port.post(target.peer, target.endpoint, Lane.SIGNAL, Kind.WATCH, None,
                             target=target.name, request_id=watch_id, surely=True)  # fmt: skip
        if outcome is not SendOutcome.QUEUED:
            self.end(watch_id, Gone.UNREACHABLE, f"there is no link to {target.peer}")

    def unwatch(self, cell: RunningActor, target: ActorAddress) -> None:
        port = self._port
        watch_id = cell.watching.pop(target, 0)
        if self.held.pop(watch_id, None) is None:
            return
        if target.peer == port.own:
            self.remove_watcher(target.name, Caller(port.own, watch_id))
        else:
            port.post(target.peer, "", Lane.SIGNAL, Kind.UNWATCH, None, target=target.name, request_id=watch_id)

    def is_held(self, watch_id: int, peer: PeerId) -> bool:
        """Whether an actor here holds that watch on an actor of ``peer``."""
        watch = self.held.get(watch_id)
        return watch is not None and watch[1].peer == peer

    def end(self, watch_id: int, reason: Gone, detail: str, *, permanent: bool = False) -> None:
        """End a watch because the watched actor is gone: the watcher gets its one Down."""
        watch = self.held.pop(watch_id, None)
        if watch is None:
            return
        watcher, target = watch
        cell = self._port.cells.get(watcher)
        if cell is not None and cell.watching.get(target) == watch_id:
            down = Down(address=target, reason=reason, detail=detail, permanent=permanent)
            cell.put_own(down, target, watch_id)

    def add_watcher(self, target: str, watcher: Caller) -> None:
        self.watchers.setdefault(target, {})[watcher] = None

    def remove_watcher(self, target: str, watcher: Caller) -> None:
        """Forget one watcher of ``target``. Idempotent."""
        watchers = self.watchers.get(target, {})
        watchers.pop(watcher, None)
        if not watchers:
            self.watchers.pop(target, None)

    def actor_ended(self, name: str, gone: TargetGone) -> None:
        port = self._port
        for peer, watch_id in self.watchers.pop(name, ()):
            if peer == port.own:
                self.end(watch_id, gone.reason, gone.detail, permanent=gone.permanent)
            else:
                port.post(peer, "", Lane.MESSAGE, Kind.DOWN, gone, request_id=watch_id, surely=True)

    def peer_gone(self, peer: PeerId, reason: Gone, why: str) -> None:
        """End the watches on actors of ``peer``, which is unreachable, and forget the watches that ``peer`` holds."""
        for watch_id in [watch_id for watch_id in self.held if self.is_held(watch_id, peer)]:
            self.end(watch_id, reason, why)
        for target, watchers in list(self.watchers.items()):
            for watcher in [watcher for watcher in watchers if watcher.peer == peer]:
                self.remove_watcher(target, watcher)
