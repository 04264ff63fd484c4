"""One link over ZeroMQ: three lanes to one life of one peer, numbered, bounded, ended once.

Life-cycle
    LIVE ──▶ ENDING   we said goodbye behind what is queued; nothing new is accepted
      │         └────▶ DOWN
      ├──────▶ DYING   the connection broke or the peer said goodbye; what has arrived is still delivered
      │         └────▶ DOWN
      └──────────────▶ DOWN

Invariants
- Sequence numbers start at 1 on each lane; a gap breaks the link, a repeat is dropped and counted.
- The queue of a lane holds at most its bound; goodbyes alone may exceed it, by one.
- DOWN is entered once, and nothing is delivered afterwards.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from transport.address import PeerId
from transport.errors import MalformedInput
from transport.handshake import HEAD, Goodbye, Mark, control, read_control, read_head
from transport.transport import DownReason, Frame, Lane, SendOutcome
from transport.zmq_socket import Sent, ZmqSocket


class LinkState(enum.Enum):
    LIVE = "live"
    ENDING = "ending"
    DYING = "dying"
    DOWN = "down"


@dataclass
class Counters:
    """What a transport has seen go wrong since it started."""

    malformed: int = 0
    """Messages that could not be read, from linked peers and strangers."""
    gaps: int = 0
    duplicates: int = 0
    refused: int = 0
    """Handshakes that we refused."""
    cut_off: int = 0
    """Links ended for too many malformed messages."""
    broken: int = 0
    """Connections lost without a goodbye."""
    callback_errors: int = 0


class LaneOut:
    """The outbound half of a lane: a bounded queue before libzmq's own."""

    def __init__(self, socket: ZmqSocket, route: bytes | None, bound: int) -> None:
        self.socket = socket
        self.bound = bound
        self.queue: deque[list[Frame]] = deque()
        self.sent_seq = 0
        self.on_stuck: Callable[[], None] = lambda: None
        """Called whenever something had to be queued."""
        self._route: list[Frame] = [] if route is None else [route]

    def offer(self, frames: Sequence[Frame]) -> SendOutcome:
        """Send or queue one message of data."""
        if len(self.queue) >= self.bound:
            return SendOutcome.FULL
        self.sent_seq += 1
        message = [*self._route, HEAD.pack(Mark.DATA, self.sent_seq), *frames]
        if self.queue:
            self.queue.append(message)
            return SendOutcome.QUEUED
        match self.socket.try_send(message):
            case Sent.SENT:
                return SendOutcome.QUEUED
            case Sent.FULL:
                self.queue.append(message)
                self.on_stuck()
                return SendOutcome.QUEUED
            case Sent.GONE:
                return SendOutcome.NO_LINK

    def repeat(self, frames: Sequence[Frame]) -> SendOutcome:
        """Send a message once more under the number of the last one; the receiver has to notice. Fault injection."""
        self.push([HEAD.pack(Mark.DATA, self.sent_seq), *frames])
        return SendOutcome.QUEUED

    def push(self, frames: list[Frame]) -> None:
        """Queue a control message behind the data."""
        self.queue.append([*self._route, *frames])
        self.flush()
        if self.queue:
            self.on_stuck()

    def probe(self) -> bool:
        """Whether the connection still exists, as far as libzmq knows."""
        return self.socket.try_send([*self._route, *control(Mark.PROBE)]) is not Sent.GONE

    def flush(self) -> bool:
        """Send what can be sent now; False if the connection is gone."""
        while self.queue:
            sent = self.socket.try_send(self.queue[0])
            if sent is Sent.FULL:
                return True
            if sent is Sent.GONE:
                return False
            self.queue.popleft()
        return True


@dataclass
class Link:
    """One link. The transport owns it and is told through the callbacks."""

    peer: PeerId
    dial: int
    dialed_here: bool
    outs: dict[Lane, LaneOut]
    counters: Counters
    deliver: Callable[[PeerId, Lane, list[Frame]], None]
    on_broken: Callable[[Link], None]
    """The link must die; the reason, if known, is in ``reason``."""
    on_malformed: Callable[[Link], None]
    """``malformed`` has grown."""
    release: Callable[[Link], None] = lambda _: None
    """Give back sockets or routes; set by whoever made the link."""
    endpoints: set[str] = field(default_factory=lambda: set[str]())
    state: LinkState = LinkState.LIVE
    reason: DownReason = DownReason.UNREACHABLE
    malformed: int = 0
    _received: dict[Lane, int] = field(default_factory=lambda: dict.fromkeys(Lane, 0))
    _goodbyes: set[Lane] = field(default_factory=lambda: set[Lane]())

    def send(self, lane: Lane, frames: Sequence[Frame]) -> SendOutcome:
        """See ``Transport.send``."""
        if self.state is not LinkState.LIVE:
            return SendOutcome.NO_LINK
        outcome = self.outs[lane].offer(frames)
        if outcome is SendOutcome.NO_LINK:
            self.on_broken(self)
        return outcome

    def send_again(self, lane: Lane, frames: Sequence[Frame]) -> SendOutcome:
        """Repeat the last message of the lane, as a network might."""
        return self.outs[lane].repeat(frames) if self.state is LinkState.LIVE else SendOutcome.NO_LINK

    def receive(self, lane: Lane, frames: list[Frame]) -> None:
        """Take one message, head first.

        Raises:
            MalformedInput: it is none that a linked peer may send.
        """
        if self.state is LinkState.DOWN:
            return
        mark, seq = read_head(frames)
        if mark == Mark.DATA:
            self._data(lane, seq, frames[1:])
        elif mark == Mark.GOODBYE:
            self._goodbye(lane, read_control(Goodbye, frames).reason)
        elif mark not in (Mark.PROBE, Mark.READY):
            raise MalformedInput(f"a message of kind {mark} on a live link")

    def _data(self, lane: Lane, seq: int, frames: list[Frame]) -> None:
        expected = self._received[lane] + 1
        if seq < expected:
            self.counters.duplicates += 1
        elif seq > expected:
            self.counters.gaps += self.state is LinkState.LIVE
            self.end(DownReason.UNREACHABLE)
            self.on_broken(self)
        elif self.state is not LinkState.DYING or lane not in self._goodbyes:
            self._received[lane] = seq
            self.deliver(self.peer, lane, frames)

    def _goodbye(self, lane: Lane, reason: DownReason) -> None:
        self.reason = reason
        self._goodbyes.add(lane)
        if len(self._goodbyes) == len(Lane):
            self.on_broken(self)

    def end(self, reason: DownReason) -> None:
        """Say goodbye behind what is queued; the peer sees ``reason``, and so do we."""
        if self.state is not LinkState.LIVE:
            return
        self.state = LinkState.ENDING
        self.reason = reason
        for out in self.outs.values():
            out.push(control(Mark.GOODBYE, Goodbye(reason)))

    def flush(self) -> None:
        """Try again to send what is queued."""
        if self.state not in (LinkState.LIVE, LinkState.ENDING):
            return
        for out in self.outs.values():
            if out.queue and not out.flush():
                self.on_broken(self)

    @property
    def flushed(self) -> bool:
        """Nothing is queued on our side."""
        return not any(out.queue for out in self.outs.values())
