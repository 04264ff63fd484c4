"""A transport whose links can be made to misbehave for a while: fault injection inside processes of real runs.

    send ─▶ rules? ─none─▶ inner.send            inner ─▶ cut off? ─no─▶ receiver
               └─ hold, drop, delay, repeat, flip a bit      └─ hold until it heals, or the link breaks

It wraps a transport that numbers its own messages; without a rule it passes all messages on.

Invariants
- The contract of ``transport.py`` holds under every rule: held messages stay in order and bounded, and a dropped one
  breaks the link, at the next message of its lane or after the heartbeat time-out. No gap is silent.
- A partition that lasts longer than ``limits.heartbeat_timeout_s`` is UNREACHABLE at both ends, and until it heals no
  link between them comes up. Set it at both ends: an end without it would keep dialing, and log each failure.
- A rule can end by its own timer, since nobody may be able to reach us to end it.
- Only bulk messages are corrupted: they carry chunks whose hash is checked. Nothing else on the wire has one.
"""

from __future__ import annotations

import asyncio
import enum
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from configs.limits import Limits
from transport.address import PeerId
from transport.errors import LinkTimeout
from transport.transport import DownReason, Frame, Lane, Receiver, SendOutcome, Transport, queue_bounds

_POLL_S = 0.02


class Misbehaviour(enum.Enum):
    """Says what a rule does to messages."""

    PARTITION = "partition"
    DROP = "drop"
    DELAY = "delay"
    DUPLICATE = "duplicate"
    CORRUPT = "corrupt"


@dataclass
class LinkRule:
    """Says what happens to messages that this end of a link sends; a partition also stops incoming ones."""

    kind: Misbehaviour
    peers: frozenset[str] = frozenset()
    """Names of the peers at the other end; empty: all."""
    lane: Lane | None = None
    probability: float = 1.0
    delay_s: float = 0.0
    jitter_s: float = 0.0

    def names(self, peer: PeerId) -> bool:
        return not self.peers or peer.name in self.peers

    def covers(self, peer: PeerId, lane: Lane) -> bool:
        return self.names(peer) and self.lane in (None, lane)


class Repeating(Transport, Protocol):
    """Transport that can also repeat a message."""

    def send_again(self, peer: PeerId, lane: Lane, frames: Sequence[Frame]) -> SendOutcome:
        """Send ``frames`` under the number of the last message of the lane, as a network that repeats it would."""
        ...


@dataclass
class _Lane:
    """Holds back messages on one lane to one peer."""

    waiting: deque[tuple[float, list[Frame]]] = field(default_factory=lambda: deque[tuple[float, list[Frame]]]())
    """Messages with the loop times from which they may leave; infinite while the peer is cut off."""
    gap: bool = False
    """Flag that a message has been dropped; then the next one breaks the link."""


class FaultableTransport:
    """Passes everything on to ``inner``, except where a rule says otherwise."""

    def __init__(self, inner: Repeating, *, limits: Limits, seed: int = 0) -> None:
        self.inner = inner
        self.rules: list[LinkRule] = []
        self._limits = limits
        self._bounds = queue_bounds(limits)
        self._rng = random.Random(f"link faults/{inner.peer.name}/{seed}")
        self._lanes: dict[tuple[PeerId, Lane], _Lane] = {}
        self._inbound: dict[PeerId, deque[tuple[Lane, list[Frame]]]] = {}
        self._up: set[PeerId] = set()
        """Peers that are linked, and reported to the receiver."""
        self._hidden: set[PeerId] = set()
        """Peers that are linked but not reported to the receiver: they linked while they were cut off."""
        self._idle = True
        self._loop: asyncio.AbstractEventLoop
        self._receiver: Receiver

    def add(self, rule: LinkRule, lasts_s: float | None = None) -> LinkRule:
        """Let ``rule`` apply from now on, for ``lasts_s`` seconds or until ``remove``.

        Raises:
            ValueError: it would corrupt messages that no hash protects.
        """
        if rule.kind is Misbehaviour.CORRUPT and rule.lane is not Lane.BULK:
            raise ValueError("only the bulk lane may be corrupted: nothing else on the wire has a hash")
        self.rules.append(rule)
        self._idle = False
        if lasts_s is not None:
            self._loop.call_later(lasts_s, self.remove, rule)
        if rule.kind is Misbehaviour.PARTITION:
            self._loop.call_later(self._limits.heartbeat_timeout_s, self._heartbeat_missed, rule)
        return rule

    def remove(self, rule: LinkRule) -> None:
        """End a rule, and release the messages that it held back. Idempotent."""
        if rule not in self.rules:
            return
        self.rules.remove(rule)
        for (peer, lane), state in list(self._lanes.items()):
            state.waiting = deque((0.0 if due_s == math.inf else due_s, m) for due_s, m in state.waiting)
            self._release(peer, lane, state)
        for peer in [peer for peer in self._inbound if not self._cut(peer)]:
            for lane, frames in self._inbound.pop(peer):
                self._receiver.on_frames(peer, lane, frames)
        self._rest()

    def _rest(self) -> None:
        self._idle = not self.rules and not self._lanes and not self._inbound and not self._hidden

    def _cut(self, peer: PeerId) -> bool:
        return any(rule.kind is Misbehaviour.PARTITION and rule.names(peer) for rule in self.rules)

    def _heartbeat_missed(self, rule: LinkRule) -> None:
        if rule in self.rules:
            for peer in self.inner.peers():
                if rule.names(peer):
                    self._break(peer)

    def _break(self, peer: PeerId) -> None:
        self._forget(peer)
        self.inner.disconnect(peer, DownReason.UNREACHABLE)

    def _forget(self, peer: PeerId) -> None:
        for lane in Lane:
            self._lanes.pop((peer, lane), None)
        self._inbound.pop(peer, None)

    @property
    def peer(self) -> PeerId:
        return self.inner.peer

    @property
    def endpoint(self) -> str:
        return self.inner.endpoint

    async def start(self, receiver: Receiver) -> None:
        self._loop = asyncio.get_running_loop()
        self._receiver = receiver
        await self.inner.start(self)

    async def connect(self, endpoint: str, *, timeout_s: float) -> PeerId:
        """See ``Transport.connect``; a peer that is cut off does not answer."""
        if self._idle:
            return await self.inner.connect(endpoint, timeout_s=timeout_s)
        until_s, left_s = self._loop.time() + timeout_s, timeout_s
        while left_s > 0.0:
            peer = await self.inner.connect(endpoint, timeout_s=left_s)
            if peer in self._up and not self._cut(peer):  # ``on_peer_up`` may come a loop turn later
                return peer
            await asyncio.sleep(_POLL_S)
            left_s = until_s - self._loop.time()
        raise LinkTimeout(f"nobody answered at {endpoint} within {timeout_s} s")

    def send(self, peer: PeerId, lane: Lane, frames: Sequence[Frame]) -> SendOutcome:
        if self._idle:
            return self.inner.send(peer, lane, frames)
        if peer not in self._up:
            return SendOutcome.NO_LINK
        state = self._lanes.setdefault((peer, lane), _Lane())
        if state.gap:
            self._break(peer)
            return SendOutcome.NO_LINK
        if len(state.waiting) >= self._bounds[lane]:
            return SendOutcome.FULL
        hit = {rule.kind: rule for rule in self.rules if rule.covers(peer, lane) and self._drawn(rule)}
        if Misbehaviour.PARTITION in hit:
            state.waiting.append((math.inf, list(frames)))
            return SendOutcome.QUEUED
        if Misbehaviour.DROP in hit:
            state.gap = True
            self._loop.call_later(self._limits.heartbeat_timeout_s, self._break_if, peer, lane, state)
            return SendOutcome.QUEUED
        message = self._corrupted(frames) if Misbehaviour.CORRUPT in hit else list(frames)
        late = hit.get(Misbehaviour.DELAY)
        if late is not None or state.waiting:
            delay_s = late.delay_s + self._rng.uniform(0.0, late.jitter_s) if late is not None else 0.0
            state.waiting.append((self._loop.time() + delay_s, message))
            self._loop.call_later(delay_s, self._release, peer, lane, state)
            return SendOutcome.QUEUED
        outcome = self.inner.send(peer, lane, message)
        if outcome is SendOutcome.QUEUED and Misbehaviour.DUPLICATE in hit:
            self.inner.send_again(peer, lane, message)
        return outcome

    def _drawn(self, rule: LinkRule) -> bool:
        return rule.probability == 1.0 or self._rng.random() < rule.probability

    def _release(self, peer: PeerId, lane: Lane, state: _Lane) -> None:
        """Send the messages that may leave now, in order."""
        while state.waiting and self._lanes.get((peer, lane)) is state and not self._cut(peer):
            due_s, message = state.waiting[0]
            if due_s > self._loop.time() + 1e-6:
                if due_s != math.inf:
                    self._loop.call_at(due_s, self._release, peer, lane, state)
                return
            if self.inner.send(peer, lane, message) is not SendOutcome.QUEUED:
                self._loop.call_later(_POLL_S, self._release, peer, lane, state)
                return
            state.waiting.popleft()
        if not state.waiting and not state.gap and self._lanes.get((peer, lane)) is state:
            del self._lanes[peer, lane]
        self._rest()

    def _break_if(self, peer: PeerId, lane: Lane, state: _Lane) -> None:
        if self._lanes.get((peer, lane)) is state:
            self._break(peer)

    def _corrupted(self, frames: Sequence[Frame]) -> list[Frame]:
        """A copy with one bit of the largest frame flipped: in a chunk, the frame of its data."""
        copies = [bytes(frame) for frame in frames]
        at = max(range(len(copies)), key=lambda index: len(copies[index]))
        victim = bytearray(copies[at])
        if victim:
            victim[self._rng.randrange(len(victim))] ^= 1 << self._rng.randrange(8)
            copies[at] = bytes(victim)
        return list(copies)

    def on_frames(self, peer: PeerId, lane: Lane, frames: list[Frame]) -> None:
        """Pass a message on, or hold it while the peer is cut off."""
        if self._idle:
            self._receiver.on_frames(peer, lane, frames)
        elif peer in self._hidden:
            return
        elif self._cut(peer):
            held = self._inbound.setdefault(peer, deque())
            if len(held) >= self._bounds[lane]:
                self._break(peer)
            else:
                held.append((lane, frames))
        else:
            self._receiver.on_frames(peer, lane, frames)

    def on_peer_up(self, peer: PeerId) -> None:
        """Tell the receiver, unless the peer is cut off: then drop the link silently."""
        self._forget(peer)
        if self._cut(peer):
            self._hidden.add(peer)
            self._loop.call_soon(self.inner.disconnect, peer, DownReason.UNREACHABLE)
        else:
            self._up.add(peer)
            self._receiver.on_peer_up(peer)

    def on_peer_down(self, peer: PeerId, reason: DownReason) -> None:
        """Tell the receiver, if it was told that the peer was up."""
        self._forget(peer)
        if peer in self._hidden:
            self._hidden.discard(peer)
        else:
            self._up.discard(peer)
            self._receiver.on_peer_down(peer, reason)
        self._rest()

    # the rest is the inner transport's

    def peers(self) -> list[PeerId]:
        return self.inner.peers() if self._idle else [peer for peer in self.inner.peers() if peer in self._up]

    def disconnect(self, peer: PeerId, reason: DownReason = DownReason.STOPPED) -> None:
        self.inner.disconnect(peer, reason)

    async def close(self, *, timeout_s: float) -> None:
        await self.inner.close(timeout_s=timeout_s)
