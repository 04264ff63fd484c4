"""One link over ZeroMQ: three lanes to one life of one peer, numbered, bounded, ended once.

Life-cycle
    LIVE ──▶ ENDING   we said goodbye behind what is queued; nothing new is accepted
      │         └────▶ DOWN
      ├──────▶ DYING   the connection broke or the peer said goodbye; what has arrived is still delivered
      │         └────▶ DOWN
      └──────────────▶ DOWN

Invariants
- Sequence numbers start at 1 on each lane; a gap breaks the link, a repeat is dropped and counted.
- A lane with several sockets is put in order again here: what comes early waits for what is on its way on another
  socket. It is a gap when too many wait.
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
    """A link is in one of these states; the module's docstring draws them."""

    LIVE = "live"
    ENDING = "ending"
    DYING = "dying"
    DOWN = "down"


@dataclass
class Counters:
    """The counters say what a transport has seen go wrong since it started."""

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


@dataclass
class Link:
    """A link is owned by its transport, which is told through the callbacks."""

    peer: PeerId
    dial: int
    dialed_here: bool
    outs: dict[Lane, LaneOut]
    counters: Counters
    early_max: int
    """Messages that may come before their turn, for each socket of a lane."""
    deliver: Callable[[PeerId, Lane, list[Frame]], None]
    on_broken: Callable[[Link], None]
    """Callback when the link must die; the reason, if known, is in ``reason``."""
    on_malformed: Callable[[Link], None]
    """Callback when ``malformed`` has grown."""
    release: Callable[[Link], None] = lambda _: None
    """Callback that gives back sockets or routes; set by whoever made the link."""
    endpoints: set[str] = field(default_factory=lambda: set[str]())
    state: LinkState = LinkState.LIVE
    reason: DownReason = DownReason.UNREACHABLE
    malformed: int = 0
    _received: dict[Lane, int] = field(default_factory=lambda: dict.fromkeys(Lane, 0))
    _early: dict[tuple[Lane, int], list[Frame]] = field(default_factory=dict[tuple[Lane, int], list[Frame]])
    """Messages that have come before others on another socket of their lane, by number."""
    _goodbyes: set[int] = field(default_factory=lambda: set[int]())
    """Sockets on which nothing more comes."""

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
        """Take one message, head first, that has come on the link's socket of that number.

        Raises:
            MalformedInput: it is none that a linked peer may send.
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
            if out.queued and not out.flush():
                self.on_broken(self)

    @property
    def flushed(self) -> bool:
        return all(out.idle for out in self.outs.values())
