"""The outbound half of a lane over ZeroMQ, and the division of a link's sockets among lanes.

    the first small message of a turn ─▶ libzmq at once             it may be alone, and must not wait
    those behind it                   ─▶ pack ─▶ libzmq, at the end of the turn or when the pack is full
    the first, after a turn with many ─▶ pack                       most likely it is not alone
    large messages                    ─▶ behind the pack, in frames of their own
    libzmq is full                    ─▶ queue ─▶ libzmq, when it takes more again

A lane with several sockets gives them its messages in turn; the receiver (``link.py``) puts them in order:

    1 2 3 4 5 6 ─┬─▶ 1 3 5 ─┬─▶ 1 2 3 4 5 6         each socket keeps its own in order, and loses none
                 └─▶ 2 4 6 ─┘

Invariants
- The queues of a lane together hold at most its bound, apart from one goodbye for each socket.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from transport.transport import Frame, Lane, SendOutcome
from transport.zmq.handshake import HEAD, Mark, control
from transport.zmq.packing import PACK_MAX_BYTES, PACK_MAX_MESSAGES, pack, packed
from transport.zmq.socket import Sent, ZmqSocket

_LANES: Final = tuple(Lane)  # calling the enum for each message would take half a microsecond


def lane_of(number: int) -> Lane:
    """The lane of a link's socket: number 0 is signal, 1 is message, all further ones are bulk."""
    return _LANES[number] if number < len(_LANES) else Lane.BULK


class SocketOut:
    """Queues entries that one of a lane's sockets has yet to take, each with the number of messages in it."""

    def __init__(self, socket: ZmqSocket) -> None:
        self.socket = socket
        self.queue: deque[tuple[list[Frame], int]] = deque()


class LaneOut:
    """Sends a lane's messages through a pack that grows during one turn, and bounded queues before libzmq's own."""

    def __init__(self, sockets: Sequence[ZmqSocket], route: bytes | None, bound: int) -> None:
        self.outs = [SocketOut(socket) for socket in sockets]
        self.bound = bound
        self.sent_seq = 0
        self._next = 0
        """Index in ``outs`` of the socket that gets the next message."""
        self.on_stuck: Callable[[], None] = lambda: None
        """Callback whenever a message had to be queued."""
        self.on_gone: Callable[[], None] = lambda: None
        """Callback when the connection is found gone after ``offer`` has returned QUEUED."""
        self._route: list[Frame] = [] if route is None else [route]
        self._queued = 0
        self._pack: list[bytes] = []
        self._pack_bytes = 0
        self._pack_max = min(PACK_MAX_MESSAGES, bound)
        self._in_turn = False
        """Flag that a small message has been sent in this turn of the loop."""
        self._before_turn = 0
        """Value of ``sent_seq`` before that message."""
        self._crowded = False
        """Flag that the last such turn sent several messages: then the next turn's first one waits for the rest."""

    @property
    def idle(self) -> bool:
        return not self.queued and not self._pack

    @property
    def queued(self) -> bool:
        return any(out.queue for out in self.outs)

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
            self._before_turn = self.sent_seq - 1
            self.outs[0].socket.at_turn_end(self._end_turn)
            if not self._crowded:
                return self._hand_over([*self._route, pack(self.sent_seq, (message,))], 1)
        self._pack.append(message)
        self._pack_bytes += len(message)
        if self._pack_bytes >= PACK_MAX_BYTES or len(self._pack) >= self._pack_max:
            return self._close_pack()
        return SendOutcome.QUEUED

    def _end_turn(self) -> None:
        self._in_turn = False
        self._crowded = self.sent_seq - self._before_turn > 1
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
        out = self.outs[self._next]
        self._next = (self._next + 1) % len(self.outs)
        if not out.queue:
            sent = out.socket.try_send(message)
            if sent is Sent.SENT:
                return SendOutcome.QUEUED
            if sent is Sent.GONE:
                return SendOutcome.NO_LINK
        self._enqueue(out, message, count)
        return SendOutcome.QUEUED

    def _enqueue(self, out: SocketOut, message: list[Frame], count: int) -> None:
        out.queue.append((message, count))
        self._queued += count
        self.on_stuck()

    def repeat(self, frames: Sequence[Frame]) -> SendOutcome:
        """Send a message under the number of the last one, for fault injection; the receiver must drop it."""
        self._close_pack()
        last = self.outs[self._next - 1]
        self._enqueue(last, [*self._route, HEAD.pack(Mark.DATA, self.sent_seq), *frames], 1)
        self.flush()
        return SendOutcome.QUEUED

    def push(self, frames: list[Frame]) -> None:
        """Queue a control message behind the data, on every socket."""
        self._close_pack()
        for out in self.outs:
            self._enqueue(out, [*self._route, *frames], 1)
        self.flush()

    def probe(self) -> bool:
        """Whether the lane's connections still exist, as far as libzmq knows."""
        probe = [*self._route, *control(Mark.PROBE)]
        return all(out.socket.try_send(probe) is not Sent.GONE for out in self.outs)

    def flush(self) -> bool:
        """Send as much of the queues as possible now; False if a connection is gone."""
        return all(self._flushed(out) for out in self.outs)

    def _flushed(self, out: SocketOut) -> bool:
        while out.queue:
            message, count = out.queue[0]
            sent = out.socket.try_send(message)
            if sent is Sent.FULL:
                return True
            if sent is Sent.GONE:
                return False
            out.queue.popleft()
            self._queued -= count
        return True


def lanes_out(sockets: Mapping[int, ZmqSocket], route: bytes | None, bounds: Mapping[Lane, int]) -> dict[Lane, LaneOut]:
    """The outbound halves of a link whose sockets, by number, are ``sockets``."""
    of_lane = {lane: [socket for number, socket in sockets.items() if lane_of(number) is lane] for lane in Lane}
    return {lane: LaneOut(of_lane[lane], route, bounds[lane]) for lane in Lane}
