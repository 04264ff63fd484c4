"""Credit streams: an async generator at one actor, an async iterator at another.

    consumer ──STREAM_OPEN (credit)──▶ producer            the handler is an async generator
    consumer ◀──STREAM_ITEM 0, 1, 2…── producer            as long as items and bytes of credit are left
    consumer ──CREDIT (items, bytes)─▶ producer            when half of the window has been consumed
    consumer ◀──STREAM_END | ERROR | REFUSED | DOWN──      exactly one of them, on the lane of the items
    consumer ──CANCEL────────────────▶ producer            the consumer left early

Invariants
- Never more than the window is under way: items granted = items sent + credit left. Bytes may be overdrawn by one
  item, so that an item larger than the window can pass.
- Items come in order and without a gap, or the stream ends with StreamDown.
- A consumer waits at most ``timeout_s`` for the next item; a producer waits that long for credit.

Credit is end to end, as in HTTP/2's flow control and Reactive Streams: a socket's own window (TCP's, ZeroMQ's
high-water mark) ends where the frames arrive, and does not know whether the consumer takes them. Credit is granted when
half of the window is consumed: granting for each item would double the messages, granting at the window's end would
stall the producer for a round trip. Items and bytes are both counted, since items differ much in size.
"""

from __future__ import annotations

import asyncio
import types
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Generic, Protocol, TypeVar, cast

import numpy as np

from actors.core.errors import AskError, ConsumerTooSlow, DeadlineExceeded, StreamDown
from actors.core.kernel.answers import Caller
from actors.core.kernel.delivery import Delivery, StreamWindow
from actors.core.kernel.requests import Waiter
from actors.core.message import Message
from actors.core.watch import Gone
from transport.address import ActorAddress
from transport.transport import Lane

T = TypeVar("T", bound=Message)

ITEM_OVERHEAD_BYTES = 64


def size_in_process(item: Message) -> int:
    """Bytes that an item holds, roughly, where nothing is encoded: its arrays and byte strings."""
    size = ITEM_OVERHEAD_BYTES
    for name in item.__struct_fields__:
        value = getattr(item, name)
        if isinstance(value, np.ndarray):
            size += cast("np.ndarray[Any, Any]", value).nbytes
        elif isinstance(value, bytes | str):
            size += len(value)
    return size


class Producer:
    """Counts what one stream has sent and its credit, at the sending end."""

    def __init__(self, delivery: Delivery, caller: Caller, window: StreamWindow) -> None:
        self.delivery = delivery
        self.caller = caller
        self.credit_items = window.items
        self.credit_bytes = window.bytes
        self.timeout_s = window.timeout_s
        self.sent_items = 0
        self.starved_since = 0.0
        self.task: asyncio.Task[None] | None = None
        self._signal: asyncio.Future[None] | None = None

    def grant(self, items: int, size: int) -> None:
        """Note that the consumer has room for more."""
        self.credit_items += items
        self.credit_bytes += size
        if self._signal is not None and not self._signal.done():
            self._signal.set_result(None)

    def cancel(self) -> None:
        self.delivery.abandoned = True
        if self.task is not None:
            self.task.cancel()

    @property
    def starved(self) -> bool:
        return self.credit_items <= 0 or self.credit_bytes <= 0

    def spend(self, size: int) -> int:
        """Account for one item; returns its offset."""
        offset = self.sent_items
        self.sent_items += 1
        self.credit_items -= 1
        self.credit_bytes -= size
        return offset

    async def wait_credit(self) -> None:
        """Wait until something may be sent.

        Raises:
            ConsumerTooSlow: the consumer granted nothing within ``timeout_s``.
        """
        loop = asyncio.get_running_loop()
        began = self.starved_since = loop.time()
        try:
            async with asyncio.timeout_at(began + self.timeout_s):
                while self.starved:
                    self._signal = loop.create_future()
                    await self._signal
        except TimeoutError:
            text = f"item {self.sent_items} of {self.delivery.tag}: no credit within {self.timeout_s:g} s"
            raise ConsumerTooSlow(text) from None
        finally:
            self._signal = None


class StreamHost(Protocol):
    """Opens, credits and leaves streams for their consumers."""

    def open(self, stream: Stream[Any]) -> None: ...
    def grant(self, stream: Stream[Any], items: int, size: int) -> None: ...
    def leave(self, stream: Stream[Any]) -> None: ...


class Stream(Waiter, Generic[T]):
    """Is the consuming end of a stream: enter it to open it, iterate, leave it to cancel what is left.

    async with ref.stream(GetChunks(...), Chunk, credit_items=8) as chunks:      # STREAM_OPEN, credit of 8
        async for chunk in chunks:                                               # each fourth one grants 4 more
            if enough:
                break                                                            # leaving: CANCEL
    # raised while iterating: StreamDown (a gap, or the producer is gone), RemoteError (it raised), DeadlineExceeded
    """

    def __init__(
        self,
        host: StreamHost,
        message: Message,
        request_id: int,
        asker: str,
        target: ActorAddress,
        question: str,
        item_kind: type[T],
        *,
        since: float,
        owner: ActorAddress | None,
        lane: Lane,
        window: StreamWindow,
    ) -> None:
        super().__init__(request_id, asker, target, question, item_kind, since)
        self.message = message
        self.owner = owner
        self.lane = lane
        self.window = window
        self.received = 0
        self._host = host
        self._items: deque[tuple[T, int]] = deque()
        self._consumed_items = 0
        self._consumed_bytes = 0
        self._error: AskError | None = None
        self._timer: asyncio.TimerHandle | None = None
        """Timer that rings when an item may be overdue: at the deadline of the wait in which it was set."""
        self.ended = False

    @property
    def is_stream(self) -> bool:
        return True

    def item(self, item: Message, offset: int, size: int) -> bool:
        """Take an item that has come; False if one is missing before it, or its type is wrong: the stream is over."""
        if self.ended:
            return False
        if offset != self.received or not isinstance(item, self.reply_kind):
            why = f"item {self.received} of type {self.reply_kind.__name__} expected, got {offset}"
            self.fail(StreamDown(f"{Gone.UNREACHABLE}: {why}", target=self.target, question=self.question))
            return False
        self.received += 1
        self._items.append((cast(T, item), size))
        self._wake()
        return True

    def end(self, sent_items: int) -> None:
        if not self.ended and sent_items != self.received:
            why = f"{sent_items} items were sent, {self.received} arrived"
            self.fail(StreamDown(f"{Gone.UNREACHABLE}: {why}", target=self.target, question=self.question))
        self.ended = True
        self._wake()

    def fail(self, error: AskError) -> None:
        """Break the stream: what has arrived can still be read, then ``error`` is raised."""
        if not self.ended:
            self.ended = True
            self._error = error
            self._wake()

    def lost(self, why: str, gone: str) -> AskError:
        return StreamDown(gone, target=self.target, question=self.question)

    def _wake(self) -> None:
        if self.future is not None and not self.future.done():
            self.future.set_result(None)

    async def __aenter__(self) -> AsyncIterator[T]:
        self._host.open(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        self._host.leave(self)
        self.ended = True
        self._items.clear()
        if self._timer is not None:
            self._timer.cancel()

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        while not self._items:
            if self.ended:
                error, self._error = self._error, None
                if error is not None:
                    raise error
                raise StopAsyncIteration
            await self._wait()
        item, size = self._items.popleft()
        self._consumed_items += 1
        self._consumed_bytes += size
        if self._consumed_items * 2 >= self.window.items or self._consumed_bytes * 2 >= self.window.bytes:
            self._host.grant(self, self._consumed_items, self._consumed_bytes)
            self._consumed_items = self._consumed_bytes = 0
        return item

    async def _wait(self) -> None:
        """Wait until something comes, or ``_look`` finds that nothing has for too long."""
        loop = asyncio.get_running_loop()
        self.future = loop.create_future()
        self.since = loop.time()
        if self._timer is None:
            self._timer = loop.call_at(self.since + self.window.timeout_s, self._look)
        try:
            await self.future
        finally:
            self.future = None

    def _look(self) -> None:
        """Fail the stream if no item has come in time. One timer serves many waits: it is set anew when it rings."""
        self._timer, loop = None, asyncio.get_running_loop()
        if self.future is None:
            return
        over_at = self.since + self.window.timeout_s
        if loop.time() < over_at:
            self._timer = loop.call_at(over_at, self._look)
            return
        text = f"{self.question} to {self.target}: no item {self.received} within {self.window.timeout_s:g} s"
        self.fail(DeadlineExceeded(text, target=self.target, question=self.question))
