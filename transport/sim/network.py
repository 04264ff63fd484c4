"""A memory network with weather: seeded latency, bandwidth, loss, repeats and partitions.

Invariants
- It behaves as TCP does: no message overtakes another of its lane; messages that a partition holds back arrive if it
  heals in time; a lost one breaks the link, at the next of its lane or after the heartbeat time-out, never silently.
- A partition that lasts longer than ``limits.heartbeat_timeout_s`` makes both ends see UNREACHABLE; so does a peer that
  is halted for longer, since nobody answers heartbeats for it.
- The others see a crash as soon as the news can travel, after all that the process had sent; behind a partition, or
  when the machine lost power, only after the heartbeat time-out.
- All randomness comes from one seeded stream, drawn in order of departure.
- Messages in flight belong to no process: they arrive even if their sender ends.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from configs.limits import DEFAULT_LIMITS, Limits
from transport.address import PeerId
from transport.memory_transport import Link, MemoryNetwork, MemoryTransport, Pipe
from transport.transport import DownReason, Frame, Lane

Ends = Callable[[str], bool]
"""Test of whether a peer's name belongs to an end."""


@dataclass(frozen=True)
class Weather:
    """Says how each direction of each link behaves."""

    latency_s: float = 0.0005
    jitter_s: float = 0.0002
    """Upper bound of the seconds, drawn uniformly, that are added to the latency."""
    bandwidth_bytes_s: float = 1.25e9
    """Bandwidth of each lane of each direction."""
    loss: float = 0.0
    """Probability that a message is lost, which breaks the link."""
    duplicate: float = 0.0
    """Probability that a message arrives twice; the receiver drops the repeat."""


@dataclass(frozen=True, eq=False)
class Disturbance:
    """Adds to the weather between ``one`` and ``other``, both ways, on one lane or all, until ``calm``."""

    one: Ends
    other: Ends
    lane: Lane | None = None
    loss: float = 0.0
    duplicate: float = 0.0
    delay_s: float = 0.0
    delay_jitter_s: float = 0.0
    delay_probability: float = 1.0

    def hits(self, source: str, target: str, lane: Lane) -> bool:
        """Whether a message of ``lane`` from ``source`` to ``target`` is disturbed."""
        return self.lane in (None, lane) and _between(self, source, target)


@dataclass(frozen=True, eq=False)
class Cut:
    """Separates ``one`` from ``other`` until ``mend``."""

    one: Ends
    other: Ends
    one_way: bool = False

    def holds(self, source: str, target: str) -> bool:
        """Whether the cut stops messages from ``source`` to ``target``."""
        return (self.one(source) and self.other(target)) if self.one_way else _between(self, source, target)


def _between(pair: Cut | Disturbance, source: str, target: str) -> bool:
    return (pair.one(source) and pair.other(target)) or (pair.other(source) and pair.one(target))


@dataclass
class _Flight:
    seq: int
    frames: list[Frame]


@dataclass
class _Track:
    """Holds one lane of one direction, with its messages in flight."""

    flights: deque[_Flight]
    departed: int = 0
    arrived: int = 0
    free_s: float = 0.0
    last_s: float = 0.0


class SimNetwork(MemoryNetwork):
    """Carries messages under weather, disturbances and cuts, which apply to all lives of a name."""

    def __init__(self, seed: int = 0, weather: Weather | None = None, limits: Limits = DEFAULT_LIMITS) -> None:
        super().__init__()
        self.weather = weather or Weather()
        self.limits = limits
        self.lost = 0
        self.heard: Callable[[str, str, Lane, list[Frame]], None] | None = None
        """Callback for every message at its delivery: source, target, lane, frames."""
        self.tamper: Callable[[str, list[Frame]], list[Frame]] | None = None
        """Callback that is given a source and the frames that it sends, and may return other frames."""
        self._rng = random.Random(f"network/{seed}")
        self._disturbances: dict[Disturbance, None] = {}
        self._cuts: dict[Cut, None] = {}
        self._halted: dict[str, list[Callable[[], None]]] = {}
        """Halted peers, each with the arrivals that wait."""
        self._tracks: dict[tuple[Pipe, Lane], _Track] = {}
        self._nobody = contextvars.Context()

    def disturb(self, disturbance: Disturbance) -> None:
        """Add a disturbance; ``calm`` takes it away."""
        self._disturbances[disturbance] = None

    def calm(self, disturbance: Disturbance) -> None:
        """Remove a disturbance. Idempotent."""
        self._disturbances.pop(disturbance, None)

    def cut(self, cut: Cut) -> None:
        """Hold back everything that ``cut`` covers, also between peers that are yet to come."""
        self._cuts[cut] = None
        self._later(self.limits.heartbeat_timeout_s, self._heartbeat_missed, cut)

    def mend(self, cut: Cut) -> None:
        """End the cut, and send what it held back. Idempotent."""
        if self._cuts.pop(cut, cut) is not None:
            return
        for link in self._links_under(cut):
            for pipe in link.pipes():
                self.route(pipe)
            for end in (link.near, link.far):
                if not end.open:  # it crashed behind the cut, and now the other end learns of it
                    self.crashed(link, end)

    def halt(self, name: str, *, heartbeats: bool = False) -> None:
        """Deliver nothing to ``name`` until ``go_on``. Without ``heartbeats`` its links break after the time-out."""
        waiting = self._halted.setdefault(name, [])
        if not heartbeats:
            self._later(self.limits.heartbeat_timeout_s, self._silent, name, waiting)

    def go_on(self, name: str) -> None:
        """Deliver the messages that have arrived at ``name`` since ``halt``. Idempotent."""
        for arrive in self._halted.pop(name, []):
            arrive()

    def _silent(self, name: str, waiting: list[Callable[[], None]]) -> None:
        if self._halted.get(name) is waiting:
            for transport in self.transports():
                for link in transport.links() if transport.peer.name == name else []:
                    self._break(link)

    def _heartbeat_missed(self, cut: Cut) -> None:
        if cut in self._cuts:
            for link in self._links_under(cut):
                self._break(link)

    def _links_under(self, cut: Cut) -> list[Link]:
        links = dict.fromkeys(link for transport in self.transports() for link in transport.links())
        return [link for link in links if _between(cut, link.near.peer.name, link.far.peer.name)]

    def _later(self, delay_s: float, function: Callable[..., None], *args: object) -> None:
        asyncio.get_running_loop().call_later(delay_s, function, *args, context=self._nobody)

    def reachable(self, source: PeerId, target: PeerId) -> bool:
        """Whether a handshake is possible: neither direction is cut and neither end halted."""
        if self._halted and (source.name in self._halted or target.name in self._halted):
            return False
        return not self._is_cut(source, target) and not self._is_cut(target, source)

    def _is_cut(self, source: PeerId, target: PeerId) -> bool:
        return bool(self._cuts) and any(cut.holds(source.name, target.name) for cut in self._cuts)

    def handshake_s(self) -> float:
        return 2 * (self._latency_s() + self._latency_s())

    def _latency_s(self) -> float:
        return self.weather.latency_s + self._rng.random() * self.weather.jitter_s

    def route(self, pipe: Pipe) -> None:
        """Let everything queued depart, unless the direction is cut."""
        if self._is_cut(pipe.source.peer, pipe.target.peer):
            return
        for lane, queue in pipe.queues.items():
            while queue and pipe.link.alive:
                self._depart(pipe, lane)
        if pipe.ending is not None:
            pipe.source.loop.call_soon(pipe.settle, context=self._nobody)

    def _depart(self, pipe: Pipe, lane: Lane) -> None:
        source, target, loop = pipe.source.peer, pipe.target.peer, pipe.source.loop
        weather = self.weather
        loss, duplicate, delay_s = weather.loss, weather.duplicate, 0.0
        for disturbance in self._disturbances:
            if disturbance.hits(source.name, target.name, lane):
                loss, duplicate = max(loss, disturbance.loss), max(duplicate, disturbance.duplicate)
                if self._rng.random() < disturbance.delay_probability:
                    delay_s += disturbance.delay_s + self._rng.random() * disturbance.delay_jitter_s
        track = self._tracks.get((pipe, lane))
        if track is None:
            track = self._tracks[pipe, lane] = _Track(deque())
        # copied: a frame may be a view of memory that its sender goes on writing to
        frames: list[Frame] = [f if type(f) is bytes else bytes(f) for f in pipe.queues[lane].popleft()]
        size_bytes = sum(map(len, frames))
        track.departed += 1
        track.free_s = max(loop.time(), track.free_s) + size_bytes / weather.bandwidth_bytes_s
        track.last_s = max(track.last_s, track.free_s + self._latency_s() + delay_s)
        if self._rng.random() < loss:
            self.lost += 1
            self._later(self.limits.heartbeat_timeout_s, self._break, pipe.link)
            return
        if self.tamper is not None:
            frames = self.tamper(source.name, frames)
        copies = 2 if self._rng.random() < duplicate else 1
        for _ in range(copies):
            track.flights.append(_Flight(track.departed, frames))
            pipe.in_flight[lane] += 1
            loop.call_at(track.last_s, self._arrive, pipe, lane, track, context=self._nobody)

    def _arrive(self, pipe: Pipe, lane: Lane, track: _Track) -> None:
        if self._halted and (waiting := self._halted.get(pipe.target.peer.name)) is not None:
            waiting.append(lambda: self._arrive(pipe, lane, track))
            return
        # timers of one moment need not fire in their order on another loop, so each takes the oldest flight
        flight = track.flights.popleft()
        pipe.in_flight[lane] -= 1
        if flight.seq == track.arrived:
            pass  # a repeat: dropped
        elif flight.seq > track.arrived + 1:
            self._break(pipe.link)
        else:
            track.arrived = flight.seq
            if pipe.link.alive and pipe.target.open:
                if self.heard is not None:
                    self.heard(pipe.source.peer.name, pipe.target.peer.name, lane, flight.frames)
                pipe.deliver(lane, flight.frames)
        pipe.settle()

    def _break(self, link: Link) -> None:
        link.down(DownReason.UNREACHABLE, DownReason.UNREACHABLE)

    def crashed(self, link: Link, transport: MemoryTransport, *, silent: bool = False) -> None:
        other = link.far if transport is link.near else link.near
        if not self.reachable(transport.peer, other.peer):
            silent = True
        if silent:
            self._later(self.limits.heartbeat_timeout_s, self._break, link)
            return
        pipe = link.pipe_from(transport)
        tracks = [track for lane in Lane if (track := self._tracks.get((pipe, lane))) is not None]
        now_s = transport.loop.time()
        news_s = max([now_s + self._latency_s(), *(track.last_s for track in tracks)])
        self._later(news_s - now_s, self._break, link)

    def link_ended(self, link: Link) -> None:
        """Forget the messages in flight."""
        for pipe in link.pipes():
            for lane in Lane:
                self._tracks.pop((pipe, lane), None)
