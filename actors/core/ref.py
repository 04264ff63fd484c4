"""A reference to an actor, through which another tells it messages, asks it questions and opens streams.

Invariants
- A ref is cheap and holds no connection: the first use connects, through ``address.endpoint``.
- Every way to wait has a deadline, and ends at once when the target dies.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

from actors.core.kernel.delivery import StreamWindow
from actors.core.kernel.port import Port
from actors.core.kernel.streams import Stream
from actors.core.message import Message
from transport.address import ActorAddress
from transport.transport import Lane, SendOutcome

R = TypeVar("R", bound=Message)


class ActorRef:
    """A ref sends to ``address`` on behalf of ``owner`` (None: code outside of actors)."""

    __slots__ = ("_port", "address", "owner")

    def __init__(self, port: Port, address: ActorAddress, owner: ActorAddress | None = None) -> None:
        self._port = port
        self.address = address
        self.owner = owner

    def __repr__(self) -> str:
        return f"ActorRef({self.address})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ActorRef) and other.address == self.address

    def __hash__(self) -> int:
        return hash(self.address)

    def tell(self, message: Message, lane: Lane = Lane.MESSAGE) -> SendOutcome:
        """Send at most once, in order. QUEUED says that it is on its way, not that it will arrive.

        FULL: the queue to the target, or the local target's mailbox, is at its bound. NO_LINK: no way to the target,
        or no such actor here. Neither has queued anything.
        """
        return self._port.tell(self.owner, self.address, message, lane)

    def ask(
        self, message: Message, reply: type[R], timeout_s: float | None = None, *, lane: Lane = Lane.MESSAGE
    ) -> Coroutine[Any, Any, R]:
        """Ask and wait for the reply, at most ``timeout_s`` (default ``limits.ask_timeout_s``).

        The answer comes on the ``lane`` of the question: on SIGNAL, neither waits behind other messages.

        Raises:
            NotSent: surely not executed.
            SentNoReply: the target or the link died; it may have been executed.
            Refused: the target did not execute it; ``reason`` says why.
            RemoteError: the handler raised.
            DeadlineExceeded: no answer in time.
            WrongReply: the answer is of another type than ``reply``.
        """
        return self._port.ask(self.owner, self.address, message, reply, timeout_s, lane)

    def stream(
        self,
        message: Message,
        item: type[R],
        timeout_s: float | None = None,
        *,
        credit_items: int | None = None,
        credit_bytes: int | None = None,
        lane: Lane = Lane.BULK,
    ) -> Stream[R]:
        """``async with ref.stream(...) as items: async for item in items: ...``

        ``timeout_s`` bounds the wait for each next item (default ``limits.ask_timeout_s``). The window is
        ``credit_items`` and ``credit_bytes``: that much may be under way and unread.

        Raises (while iterating):
            StreamDown: the producer is gone, or the link.
            RemoteError, Refused, DeadlineExceeded: as for ``ask``.
        """
        limits = self._port.limits
        window = StreamWindow(
            limits.stream_credit_items if credit_items is None else credit_items,
            limits.stream_credit_bytes if credit_bytes is None else credit_bytes,
            limits.ask_timeout_s if timeout_s is None else timeout_s,
        )
        return self._port.stream(self.owner, self.address, message, item, lane, window)
