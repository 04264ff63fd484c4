"""One link over ZeroMQ: three lanes to one life of one peer, numbered, bounded, ended once.

Life-cycle
    LIVE ──▶ ENDING   we said goodbye behind what is queued; nothing new is accepted
      │         └────▶ DOWN
      ├──────▶ DYING   the connection broke or the peer said goodbye; what has arrived is still delivered
      │         └────▶ DOWN
      └──────────────▶ DOWN

Sending
    the first small message of a turn ─▶ libzmq at once             alone, it must not wait
    those behind it                   ─▶ pack ─▶ libzmq, at the end of the turn or when the pack is full
    large messages                    ─▶ behind the pack, in frames of their own
    libzmq is full                    ─▶ queue ─▶ libzmq, when it says that it takes more

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
from transport.packing import PACK_MAX_BYTES, PACK_MAX_MESSAGES, pack, packed, unpack
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


class LaneOut:
    """The outbound half of a lane: a pack that grows during one turn, and a bounded queue before libzmq's own."""

    def __init__(self, socket: ZmqSocket, route: bytes | None, bound: int) -> None:
        self.socket = socket
        self.bound = bound
        self.queue: deque[tuple[list[Frame], int]] = deque()
        """Each with the number of messages that it holds."""
        self.sent_seq = 0
        self.on_stuck: Callable[[], None] = lambda: None
        """Called whenever something had to be queued."""
        self.on_gone: Callable[[], None] = lambda: None
        """Called when the connection is found gone after ``offer`` has said QUEUED."""
        self._route: list[Frame] = [] if route is None else [route]
        self._queued = 0
        self._pack: list[bytes] = []
        self._pack_bytes = 0
        self._pack_max = min(PACK_MAX_MESSAGES, bound)
        self._in_turn = False
        """Something has been sent in this turn of the loop."""

    @property
    def idle(self) -> bool:
        """Nothing waits here."""
        return not self.queue and not self._pack

    def offer(self, frames: Sequence[Frame]) -> SendOutcome:
        """Send, pack or queue one message of data."""
        if self._queued + len(self._pack) >= self.bound:
            return SendOutcome.FULL
        message = packed(frames)
        if message is None:
            self._close_pack()
        self.sent_seq += 1
        if message is None:
            return self._hand_over([*self._route, HEAD.pack(Mark.DATA, self.sent_seq), *frames], 1)
        if not self._in_turn:
            self._in_turn = True
            self.socket.at_turn_end(self._end_turn)
            return self._hand_over([*self._route, pack(self.sent_seq, (message,))], 1)
        self._pack.append(message)
        self._pack_bytes += len(message)
        if self._pack_bytes >= PACK_MAX_BYTES or len(self._pack) >= self._pack_max:
            return self._close_pack()
        return SendOutcome.QUEUED

    def _end_turn(self) -> None:
        self._in_turn = False
        if self._close_pack() is SendOutcome.NO_LINK:
            self.on_gone()

    def _close_pack(self) -> SendOutcome:
        if not self._pack:
            return SendOutcome.QUEUED
        count = len(self._pack)
        message = [*self._route, pack(self.sent_seq - count + 1, self._pack)]
        self._pack = []
        self._pack_bytes = 0
        return self._hand_over(message, count)

    def _hand_over(self, message: list[Frame], count: int) -> SendOutcome:
        if not self.queue:
            sent = self.socket.try_send(message)
            if sent is Sent.SENT:
                return SendOutcome.QUEUED
            if sent is Sent.GONE:
                return SendOutcome.NO_LINK
        self._enqueue(message, count)
        return SendOutcome.QUEUED

    def _enqueue(self, message: list[Frame], count: int) -> None:
        self.queue.append((message, count))
        self._queued += count
        self.on_stuck()

    def repeat(self, frames: Sequence[Frame]) -> SendOutcome:
        """Send a message once more under the number of the last one; the receiver has to notice. Fault injection."""
        self.push([HEAD.pack(Mark.DATA, self.sent_seq), *frames])
        return SendOutcome.QUEUED

    def push(self, frames: list[Frame]) -> None:
        """Queue a control message behind the data."""
        self._close_pack()
        self._enqueue([*self._route, *frames], 1)
        self.flush()

    def probe(self) -> bool:
        """Whether the connection still exists, as far as libzmq knows."""
        return self.socket.try_send([*self._route, *control(Mark.PROBE)]) is not Sent.GONE

    def flush(self) -> bool:
        """Send what can be sent now; False if the connection is gone."""
        while self.queue:
            message, count = self.queue[0]
            sent = self.socket.try_send(message)
            if sent is Sent.FULL:
                return True
            if sent is Sent.GONE:
                return False
            self.queue.popleft()
            self._queued -= count
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

    def __post_init__(self) -> None:
        for out in self.outs.values():
            out.on_gone = self._gone

    def _gone(self) -> None:
        if self.state is LinkState.LIVE:
            self.on_broken(self)

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
        first = frames[0]
        if len(frames) == 1 and len(first) > HEAD.size and first[0] == Mark.PACK:
            seq = HEAD.unpack_from(first)[1]
            for number, message in enumerate(unpack(first), seq):
                self._data(lane, number, message)
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
        return all(out.idle for out in self.outs.values())
