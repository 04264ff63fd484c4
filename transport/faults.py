"""A transport that misbehaves on order: wraps any transport and drops, delays, repeats, corrupts or cuts off.

    FaultyTransport.send ─▶ rules ─▶ inner.send          inner ─▶ order check ─▶ receiver

Invariants
- The wrapper keeps the contract that it wraps: it numbers messages itself, so a dropped one breaks the link at the next
  message of its lane, or after the heartbeat time-out, and a repeated one is dropped by the receiving wrapper. Both
  ends must be wrapped.
- Corruption flips bits of the payload and is passed on: reading what cannot be read is the receiver's part to survive.
- A partition holds both directions; lasting longer than ``limits.heartbeat_timeout_s`` it is UNREACHABLE at both ends.
- Which messages are hit is drawn from a seeded stream and the loop's clock; equal seeds hit the same messages.
"""

from __future__ import annotations

import asyncio
import enum
import random
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from configs.limits import DEFAULT_LIMITS, Limits
from transport.address import PeerId
from transport.errors import LinkTimeout
from transport.transport import DownReason, Frame, Lane, Receiver, SendOutcome, Transport, queue_bounds

_SEQ = struct.Struct("<Q")
_POLL_S = 0.02


class FaultKind(enum.Enum):
    DROP = "drop"
    DELAY = "delay"
    DUPLICATE = "duplicate"
    CORRUPT = "corrupt"


@dataclass
class Fault:
    """One rule. None matches every peer or lane; ``peer`` is a name."""

    kind: FaultKind
    peer: str | None = None
    lane: Lane | None = None
    probability: float = 1.0
    delay_s: float = 0.0
    times: int | None = None
    """How many messages it may still hit; None is no bound."""
    hits: int = 0

    def wants(self, peer: PeerId, lane: Lane, rng: random.Random) -> bool:
        """Whether this message is hit; counts it if so."""
        if self.peer not in (None, peer.name) or self.lane not in (None, lane) or self.times == 0:
            return False
        if self.probability < 1.0 and rng.random() >= self.probability:
            return False
        self.hits += 1
        if self.times is not None:
            self.times -= 1
        return True


@dataclass
class _Lane:
    """One lane of one link at this end."""

    sent_seq: int = 0
    received_seq: int = 0
    waiting: deque[tuple[float, list[Frame]]] = field(default_factory=lambda: deque[tuple[float, list[Frame]]]())
    """Messages held back, each with the time from which it may leave."""


class FaultyTransport:
    """See the module's docstring. ``faults`` may be changed at any time."""

    def __init__(self, inner: Transport, *, seed: int = 0, limits: Limits = DEFAULT_LIMITS) -> None:
        self.inner = inner
        self.faults: list[Fault] = []
        self.duplicates_dropped = 0
        self._limits = limits
        self._bounds = queue_bounds(limits)
        self._rng = random.Random(f"faults/{inner.peer.name}/{seed}")
        self._lanes: dict[tuple[PeerId, Lane], _Lane] = {}
        self._cut: dict[str, int] = {}
        self._cuts = 0
        self._hidden: set[PeerId] = set()
        self._broken: dict[PeerId, DownReason] = {}
        self._loop: asyncio.AbstractEventLoop
        self._receiver: Receiver

    @property
    def peer(self) -> PeerId:
        return self.inner.peer

    @property
    def endpoint(self) -> str:
        return self.inner.endpoint

    async def start(self, receiver: Receiver) -> None:
        """See ``Transport.start``."""
        self._loop = asyncio.get_running_loop()
        self._receiver = receiver
        await self.inner.start(self)

    # what a script does

    def partition(self, name: str) -> None:
        """Cut the peer called ``name`` off, both ways."""
        self._cuts += 1
        self._cut[name] = self._cuts
        self._loop.call_later(self._limits.heartbeat_timeout_s, self._heartbeat_missed, name, self._cuts)

    def heal(self, name: str) -> None:
        """End the partition; what was held back goes on."""
        self._cut.pop(name, None)
        for (peer, lane), state in list(self._lanes.items()):
            if peer.name == name:
                self._release(peer, lane, state)

    def break_link(self, name: str) -> None:
        """Break the link at once; both ends see UNREACHABLE."""
        for peer in self.inner.peers():
            if peer.name == name:
                self._break(peer)

    def _heartbeat_missed(self, name: str, cut: int) -> None:
        if self._cut.get(name) == cut:
            self.break_link(name)

    def _break(self, peer: PeerId) -> None:
        self._forget(peer)
        self._broken[peer] = DownReason.UNREACHABLE
        self.inner.disconnect(peer, DownReason.UNREACHABLE)

    def _forget(self, peer: PeerId) -> None:
        for lane in Lane:
            self._lanes.pop((peer, lane), None)

    # outbound

    async def connect(self, endpoint: str, *, timeout_s: float) -> PeerId:
        """See ``Transport.connect``; a peer that is cut off does not answer."""
        until = self._loop.time() + timeout_s
        while True:
            try:
                peer = await self.inner.connect(endpoint, timeout_s=max(0.001, until - self._loop.time()))
            except LinkTimeout:
                raise LinkTimeout(f"nobody answered at {endpoint} within {timeout_s} s") from None
            if peer.name not in self._cut and peer not in self._hidden and peer not in self._broken:
                return peer
            if self._loop.time() + _POLL_S >= until:
                raise LinkTimeout(f"nobody answered at {endpoint} within {timeout_s} s")
            await asyncio.sleep(_POLL_S)

    def send(self, peer: PeerId, lane: Lane, frames: Sequence[Frame]) -> SendOutcome:
        """See ``Transport.send``."""
        if peer in self._broken or peer in self._hidden or peer not in self.inner.peers():
            return SendOutcome.NO_LINK
        state = self._lanes.setdefault((peer, lane), _Lane())
        if len(state.waiting) >= self._bounds[lane]:
            return SendOutcome.FULL
        hit = {fault.kind: fault for fault in self.faults if fault.wants(peer, lane, self._rng)}
        message: list[Frame] = [_SEQ.pack(state.sent_seq + 1), *frames]
        if FaultKind.DROP in hit:
            state.sent_seq += 1
            self._loop.call_later(self._limits.heartbeat_timeout_s, self._break_if, peer, state, lane)
            return SendOutcome.QUEUED
        if FaultKind.CORRUPT in hit and frames:
            message = [message[0], *self._corrupted(frames)]
        delay_s = hit[FaultKind.DELAY].delay_s if FaultKind.DELAY in hit else 0.0
        outcome = self._pass_on(peer, lane, state, message, delay_s)
        if outcome is SendOutcome.QUEUED:
            state.sent_seq += 1
            if FaultKind.DUPLICATE in hit:
                self._pass_on(peer, lane, state, message, delay_s)
        return outcome

    def _pass_on(self, peer: PeerId, lane: Lane, state: _Lane, message: list[Frame], delay_s: float) -> SendOutcome:
        if not delay_s and not state.waiting and peer.name not in self._cut:
            return self.inner.send(peer, lane, message)
        state.waiting.append((self._loop.time() + delay_s, message))
        self._loop.call_later(delay_s, self._release, peer, lane, state)
        return SendOutcome.QUEUED

    def _release(self, peer: PeerId, lane: Lane, state: _Lane) -> None:
        """Let what may leave now leave, in order."""
        while state.waiting and self._lanes.get((peer, lane)) is state and peer.name not in self._cut:
            due_s, message = state.waiting[0]
            if due_s > self._loop.time() + 1e-6:
                self._loop.call_at(due_s, self._release, peer, lane, state)
                return
            if self.inner.send(peer, lane, message) is not SendOutcome.QUEUED:
                self._loop.call_later(_POLL_S, self._release, peer, lane, state)
                return
            state.waiting.popleft()

    def _break_if(self, peer: PeerId, state: _Lane, lane: Lane) -> None:
        if self._lanes.get((peer, lane)) is state:
            self._break(peer)

    def _corrupted(self, frames: Sequence[Frame]) -> list[Frame]:
        copies = [bytearray(frame) for frame in frames]
        victims = [copy for copy in copies if copy]
        if victims:
            victim = self._rng.choice(victims)
            victim[self._rng.randrange(len(victim))] ^= 1 << self._rng.randrange(8)
        return [bytes(copy) for copy in copies]

    # inbound

    def on_frames(self, peer: PeerId, lane: Lane, frames: list[Frame]) -> None:
        """Check the order, then pass on."""
        if peer in self._hidden or peer in self._broken:
            return
        if peer.name in self._cut:
            # the other end's wrapper holds its own back; what was already under way is lost with the cut
            self._break(peer)
            return
        state = self._lanes.setdefault((peer, lane), _Lane())
        if not frames or len(frames[0]) != _SEQ.size:
            self._break(peer)
            return
        (seq,) = _SEQ.unpack(frames[0])
        if seq <= state.received_seq:
            self.duplicates_dropped += 1
        elif seq > state.received_seq + 1:
            self._break(peer)
        else:
            state.received_seq = seq
            self._receiver.on_frames(peer, lane, frames[1:])

    def on_peer_up(self, peer: PeerId) -> None:
        """Pass on, unless the peer is cut off: then the link is dropped and nobody hears of it."""
        self._forget(peer)
        if peer.name in self._cut:
            self._hidden.add(peer)
            self._loop.call_soon(self.inner.disconnect, peer, DownReason.UNREACHABLE)
        else:
            self._receiver.on_peer_up(peer)

    def on_peer_down(self, peer: PeerId, reason: DownReason) -> None:
        """Pass on, with the reason that the fault means."""
        self._forget(peer)
        reason = self._broken.pop(peer, reason)
        if peer in self._hidden:
            self._hidden.discard(peer)
        else:
            self._receiver.on_peer_down(peer, reason)

    # the rest is the inner transport's

    def peers(self) -> list[PeerId]:
        """See ``Transport.peers``."""
        return [peer for peer in self.inner.peers() if peer not in self._hidden and peer not in self._broken]

    def disconnect(self, peer: PeerId, reason: DownReason = DownReason.STOPPED) -> None:
        """See ``Transport.disconnect``."""
        self.inner.disconnect(peer, reason)

    async def close(self, *, timeout_s: float) -> None:
        """See ``Transport.close``."""
        await self.inner.close(timeout_s=timeout_s)
