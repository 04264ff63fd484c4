"""A memory network with weather: seeded latency, bandwidth, loss, repeats and partitions, per direction of a link.

Invariants
- It behaves as TCP does: within a lane nothing overtakes; what a partition holds back arrives when it heals in time;
  a lost message breaks the link, at the next message of its lane or after the heartbeat time-out, never silently.
- A partition that lasts longer than ``limits.heartbeat_timeout_s`` makes both ends see UNREACHABLE.
- All randomness comes from one seeded stream, drawn in order of departure.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from dataclasses import dataclass

from configs.limits import DEFAULT_LIMITS, Limits
from transport.address import PeerId
from transport.memory_transport import Link, MemoryNetwork, MemoryTransport, Pipe
from transport.transport import DownReason, Frame, Lane


@dataclass(frozen=True)
class Weather:
    """How one direction of a link behaves."""

    latency_s: float = 0.0005
    jitter_s: float = 0.0002
    """Uniform, on top of the latency."""
    bandwidth_bytes_s: float = 1.25e9
    """Of each lane by itself."""
    loss: float = 0.0
    """Probability that a message is lost, which breaks the link."""
    duplicate: float = 0.0
    """Probability that a message arrives twice; the receiver drops the repeat."""


@dataclass
class _Flight:
    seq: int
    frames: list[Frame]


@dataclass
class _Track:
    """One lane of one direction, in the air."""

    flights: deque[_Flight]
    departed: int = 0
    arrived: int = 0
    free_s: float = 0.0
    last_s: float = 0.0


class SimNetwork(MemoryNetwork):
    """See the module's docstring. Peers are named by their names; all their lives share the weather."""

    def __init__(self, seed: int = 0, weather: Weather | None = None, limits: Limits = DEFAULT_LIMITS) -> None:
        super().__init__()
        self.weather = weather or Weather()
        self.limits = limits
        self.lost = 0
        self.duplicates_dropped = 0
        self._rng = random.Random(f"network/{seed}")
        self._links_weather: dict[tuple[str, str], Weather] = {}
        self._cut: dict[tuple[str, str], int] = {}
        self._cuts = 0
        self._tracks: dict[tuple[Pipe, Lane], _Track] = {}

    # what a scenario does

    def set_weather(self, source: str, target: str, weather: Weather) -> None:
        """Weather of one direction."""
        self._links_weather[source, target] = weather

    def partition(self, one: str, other: str, *, one_way: bool = False) -> None:
        """Hold back everything from ``one`` to ``other``, and the other way round unless ``one_way``."""
        self._cuts += 1
        for pair in [(one, other)] if one_way else [(one, other), (other, one)]:
            self._cut[pair] = self._cuts
        loop = asyncio.get_running_loop()
        loop.call_later(self.limits.heartbeat_timeout_s, self._heartbeat_missed, one, other, self._cuts)

    def heal(self, one: str, other: str) -> None:
        """End the partition; what was held back goes on."""
        self._cut.pop((one, other), None)
        self._cut.pop((other, one), None)
        link = self.link_between(one, other)
        for pipe in link.pipes() if link is not None else []:
            self.route(pipe)

    def isolate(self, name: str) -> None:
        """Cut ``name`` off from every peer that listens now."""
        for other in self.names():
            if other != name:
                self.partition(name, other)

    def heal_all(self) -> None:
        """End every partition."""
        for one, other in list(self._cut):
            self.heal(one, other)

    def _heartbeat_missed(self, one: str, other: str, cut: int) -> None:
        if cut in (self._cut.get((one, other)), self._cut.get((other, one))):
            self.break_link(one, other)

    # hooks

    def reachable(self, source: PeerId, target: PeerId) -> bool:
        """A handshake needs both directions."""
        return not self._is_cut(source, target) and not self._is_cut(target, source)

    def _is_cut(self, source: PeerId, target: PeerId) -> bool:
        return (source.name, target.name) in self._cut

    def handshake_s(self, source: PeerId, target: PeerId) -> float:
        """Two round trips."""
        return 2 * (self._latency(source, target) + self._latency(target, source))

    def _weather_of(self, source: PeerId, target: PeerId) -> Weather:
        return self._links_weather.get((source.name, target.name), self.weather)

    def _latency(self, source: PeerId, target: PeerId) -> float:
        weather = self._weather_of(source, target)
        return weather.latency_s + self._rng.random() * weather.jitter_s

    def route(self, pipe: Pipe) -> None:
        """Let everything queued depart, unless the direction is cut."""
        if self._is_cut(pipe.source.peer, pipe.target.peer):
            return
        while pipe.link.alive and (lane := pipe.next_lane()) is not None:
            self._depart(pipe, lane)
        if pipe.ending is not None:
            pipe.source.loop.call_soon(pipe.settle)

    def _depart(self, pipe: Pipe, lane: Lane) -> None:
        source, target, loop = pipe.source.peer, pipe.target.peer, pipe.source.loop
        weather = self._weather_of(source, target)
        track = self._tracks.setdefault((pipe, lane), _Track(deque()))
        frames = pipe.queues[lane].popleft()
        size_bytes = sum(memoryview(frame).nbytes for frame in frames)
        track.departed += 1
        track.free_s = max(loop.time(), track.free_s) + size_bytes / weather.bandwidth_bytes_s
        track.last_s = max(track.last_s, track.free_s + self._latency(source, target))
        if self._rng.random() < weather.loss:
            self.lost += 1
            loop.call_later(self.limits.heartbeat_timeout_s, self._break, pipe.link)
            return
        copies = 2 if self._rng.random() < weather.duplicate else 1
        for _ in range(copies):
            track.flights.append(_Flight(track.departed, frames))
            pipe.in_flight[lane] += 1
            loop.call_at(track.last_s, self._arrive, pipe, lane, track)

    def _arrive(self, pipe: Pipe, lane: Lane, track: _Track) -> None:
        # timers of one moment fire in no fixed order, so each takes the oldest flight, not its own
        flight = track.flights.popleft()
        pipe.in_flight[lane] -= 1
        if flight.seq == track.arrived:
            self.duplicates_dropped += 1
        elif flight.seq > track.arrived + 1:
            self._break(pipe.link)
        else:
            track.arrived = flight.seq
            pipe.deliver(lane, flight.frames)
        pipe.settle()

    def _break(self, link: Link) -> None:
        link.down(DownReason.UNREACHABLE, DownReason.UNREACHABLE)

    def link_ended(self, link: Link) -> None:
        """Forget what was in the air."""
        for pipe in link.pipes():
            for lane in Lane:
                self._tracks.pop((pipe, lane), None)

    def names(self) -> list[str]:
        """Names of who listens, in order of arrival."""
        return [transport.peer.name for transport in self.transports()]

    def transports(self) -> list[MemoryTransport]:
        """Who listens, in order of arrival."""
        return list(self._listening.values())
