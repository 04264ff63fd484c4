"""A link over ZeroMQ: three numbered, bounded lanes to one life of one peer, ended once.

Life-cycle
    LIVE ──▶ ENDING   we queued a goodbye behind the data; nothing new is accepted
      │         └────▶ DOWN
      ├──────▶ DYING   the connection broke or the peer said goodbye; arrived messages are still delivered
      │         └────▶ DOWN
      └──────────────▶ DOWN

Invariants
- Sequence numbers start at 1 on each lane; a gap breaks the link, a repeat is dropped and counted.
- The messages of a lane with several sockets are put in order here: an early one waits for those on their way on
  another socket. It is a gap when too many wait.
- DOWN is entered once, and nothing is delivered afterwards.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from transport.address import PeerId
from transport.errors import MalformedInput
from transport.transport import DownReason, Frame, Lane, SendOutcome
from transport.zmq.handshake import HEAD, Goodbye, Mark, control, read_control, read_head
from transport.zmq.lane import LaneOut, lane_of
from transport.zmq.packing import unpack
from transport.zmq.socket import ZmqSocket


class LinkState(enum.Enum):
    """The states of a link; the module's docstring draws them."""

    LIVE = "live"
    ENDING = "ending"
    DYING = "dying"
    DOWN = "down"


@dataclass
class Counters:
    """Counts the failures that a transport has seen since it started."""

    malformed: int = 0
    """Number of unreadable messages, from linked peers and strangers."""
    gaps: int = 0
    duplicates: int = 0
    refused: int = 0
    """Number of handshakes that we refused."""
    cut_off: int = 0
    """Number of links ended for too many malformed messages."""
    broken: int = 0
    """Number of links that went down as UNREACHABLE."""


@dataclass
class Link:
    """Holds one link, and tells its transport of events through callbacks."""

    peer: PeerId
    dial: int
    dialed_here: bool
    outs: dict[Lane, LaneOut]
    counters: Counters
    early_max: int
    """Limit of messages, for each socket of a lane, that may wait out of order."""
    deliver: Callable[[PeerId, Lane, list[Frame]], None]
    on_broken: Callable[[Link], None]
    """Callback when the link must go down; the reason, if known, is in ``reason``."""
    on_malformed: Callable[[Link], None]
    """Callback when ``malformed`` has grown."""
    release: Callable[[Link], None] = lambda _: None
    """Callback that gives back sockets or routes; set by the link's maker."""
    endpoints: set[str] = field(default_factory=lambda: set[str]())
    state: LinkState = LinkState.LIVE
    reason: DownReason = DownReason.UNREACHABLE
    malformed: int = 0
    _received: dict[Lane, int] = field(default_factory=lambda: dict.fromkeys(Lane, 0))
    _early: dict[tuple[Lane, int], list[Frame]] = field(default_factory=dict[tuple[Lane, int], list[Frame]])
    """Messages that came before earlier ones on another socket of their lane, by lane and number."""
    _goodbyes: set[int] = field(default_factory=lambda: set[int]())
    """Numbers of sockets on which a goodbye has come."""

    def __post_init__(self) -> None:
        for out in self.outs.values():
            out.on_gone = self._gone

    def _gone(self) -> None:
        if self.state is LinkState.LIVE:
            self.on_broken(self)

    def send(self, lane: Lane, frames: Sequence[Frame]) -> SendOutcome:
        if self.state is not LinkState.LIVE:
            return SendOutcome.NO_LINK
        outcome = self.outs[lane].offer(frames)
        if outcome is SendOutcome.NO_LINK:
            self.on_broken(self)
        return outcome

    def send_again(self, lane: Lane, frames: Sequence[Frame]) -> SendOutcome:
        """Repeat the last message of the lane, as a network might."""
        return self.outs[lane].repeat(frames) if self.state is LinkState.LIVE else SendOutcome.NO_LINK

    @property
    def sockets(self) -> list[ZmqSocket]:
        """Sockets of all lanes, in the order of their numbers."""
        return [out.socket for lane in Lane for out in self.outs[lane].outs]

    def receive(self, socket: int, frames: list[Frame]) -> None:
        """Take one message, head first, from the link's socket of that number.

        Raises:
            MalformedInput: a linked peer may not send such a message.
        """
        if self.state is LinkState.DOWN:
            return
        first = frames[0]
        if len(frames) == 1 and len(first) > HEAD.size and first[0] == Mark.PACK:
            seq = HEAD.unpack_from(first)[1]
            for number, message in enumerate(unpack(first), seq):
                self._data(socket, number, message)
            return
        mark, seq = read_head(frames)
        if mark == Mark.DATA:
            self._data(socket, seq, frames[1:])
        elif mark == Mark.GOODBYE:
            self._goodbye(socket, read_control(Goodbye, frames).reason)
        elif mark not in (Mark.PROBE, Mark.READY):
            raise MalformedInput(f"a message of kind {mark} on a live link")

    def _data(self, socket: int, seq: int, frames: list[Frame]) -> None:
        lane = lane_of(socket)
        expected = self._received[lane] + 1
        if seq == expected:
            if self.state is not LinkState.DYING or socket not in self._goodbyes:
                self._next(lane, seq, frames)
                while self._early and (waiting := self._early.pop((lane, self._received[lane] + 1), None)) is not None:
                    self._next(lane, self._received[lane] + 1, waiting)
        elif seq < expected or (lane, seq) in self._early:
            self.counters.duplicates += 1
        else:
            self._comes_early(lane, seq, frames)

    def _next(self, lane: Lane, seq: int, frames: list[Frame]) -> None:
        self._received[lane] = seq
        self.deliver(self.peer, lane, frames)

    def _comes_early(self, lane: Lane, seq: int, frames: list[Frame]) -> None:
        sockets = len(self.outs[lane].outs)
        if sockets > 1 and len(self._early) < self.early_max * sockets:
            self._early[lane, seq] = frames
            return
        self.counters.gaps += self.state is LinkState.LIVE
        self.end(DownReason.UNREACHABLE)
        self.on_broken(self)

    def _goodbye(self, socket: int, reason: DownReason) -> None:
        self.reason = reason
        self._goodbyes.add(socket)
        if len(self._goodbyes) == len(self.sockets):
            self.on_broken(self)

    def end(self, reason: DownReason) -> None:
        """Queue a goodbye behind the data; the peer sees ``reason``, and so do we."""
        if self.state is not LinkState.LIVE:
            return
        self.state = LinkState.ENDING
        self.reason = reason
        for out in self.outs.values():
            out.push(control(Mark.GOODBYE, Goodbye(reason)))

    def flush(self) -> None:
        """Try again to send the queued messages."""
        if self.state not in (LinkState.LIVE, LinkState.ENDING):
            return
        for out in self.outs.values():
            if out.queued and not out.flush():
                self.on_broken(self)

    @property
    def flushed(self) -> bool:
        return all(out.idle for out in self.outs.values())
