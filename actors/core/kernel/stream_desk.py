"""Streams of one process, both ends: opening, crediting, producing, leaving. The flow is drawn in ``streams.py``.

Invariants
- The opening carries the first credit and goes on the lane of the items, which so is known to the producer.
- Credit goes on the signal lane: it must not wait behind the bulk that it is to release.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from actors.core.errors import AskError, ConsumerTooSlow, RefusalReason
from actors.core.kernel.answers import Caller, Refusal, error_of
from actors.core.kernel.delivery import Delivery, Window
from actors.core.kernel.streams import Producer, Stream, size_in_process
from actors.core.message import Message, tag_of
from transport.address import ActorAddress, PeerId
from transport.codec import encode_body
from transport.envelope import Envelope, Kind
from transport.transport import Lane, SendOutcome

if TYPE_CHECKING:
    from actors.core.kernel.router import Router

R = TypeVar("R", bound=Message)

_FULL_RETRY_FIRST_S: Final = 0.001
_FULL_RETRY_MAX_S: Final = 0.016


class StreamDesk:
    """Keeps the producers of this process; the consumers are in the table of questions."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self.producers: dict[Caller, Producer] = {}

    # consuming

    def make(
        self,
        owner: ActorAddress | None,
        address: ActorAddress,
        message: Message,
        item: type[R],
        lane: Lane,
        window: Window,
    ) -> Stream[R]:
        """A stream that is not opened yet."""
        router = self._router
        asker = "" if owner is None else owner.name
        return Stream(self, message, router.next_id(), asker, address, tag_of(type(message)), item,
                      since=router.now(), owner=owner, lane=lane, window=window)  # fmt: skip

    def open(self, stream: Stream[Any]) -> None:
        """Ask for the items; what fails is raised by the first ``anext``, what cannot be sent at all at once."""
        router, window = self._router, stream.window
        router.requests.open(stream)
        deadline_at = router.now() + window.timeout_s
        try:
            if stream.target.peer != router.own:
                router.questions.send(stream, Kind.STREAM_OPEN, stream.message, stream.lane, deadline_at,
                                     number=window.items, number_bytes=window.bytes)  # fmt: skip
                return
            caller = Caller(router.own, stream.request_id)
            refusal = router.deliver_local(
                stream.owner, stream.target.name, stream.message, caller, deadline_at, window=window
            )
            if refusal is not None:
                raise error_of(refusal, stream.target, stream.question, stream=True)
        except BaseException as error:
            router.requests.close(stream)
            if not isinstance(error, AskError):
                raise
            stream.fail(error)

    def grant(self, stream: Stream[Any], items: int, size: int) -> None:
        """The consumer has room again."""
        if stream.ended:
            return
        if stream.target.peer == self._router.own:
            self.credit(Caller(self._router.own, stream.request_id), items, size)
        else:
            self._router.post(stream.target.peer, "", Lane.SIGNAL, Kind.CREDIT, None, target=stream.target.name,
                              request_id=stream.request_id, number=items, number_bytes=size, surely=True)  # fmt: skip

    def leave(self, stream: Stream[Any]) -> None:
        """The consumer wants no more."""
        if self._router.requests.get(stream.request_id) is stream:
            self._router.requests.close(stream)
            self._router.questions.cancel(stream, stream.lane)

    def take_item(self, request_id: int, item: Message, offset: int, size: int) -> None:
        """An item has come for a consumer here."""
        stream = self._router.requests.get(request_id)
        if not isinstance(stream, Stream):
            self._router.count("late_items")
        elif not stream.item(item, offset, size):
            self.leave(cast("Stream[Any]", stream))

    def spoil(self, stream: Stream[Any]) -> None:
        """An item that is none has come: the stream ends, at both ends."""
        self._router.settle(stream.request_id, Kind.STREAM_ITEM, None, 0)
        self._router.questions.cancel(stream, stream.lane)

    # producing

    def credit(self, caller: Caller, items: int, size: int) -> None:
        """A consumer has granted credit to a producer here."""
        producer = self.producers.get(caller)
        if producer is not None:
            producer.grant(items, size)

    def cancel(self, caller: Caller) -> None:
        """A consumer has left. Idempotent."""
        producer = self.producers.get(caller)
        if producer is not None:
            producer.cancel()

    def cancel_peer(self, peer: PeerId) -> None:
        """The link to ``peer`` is lost: whatever is produced for it ends."""
        for caller in [caller for caller in self.producers if caller.peer == peer]:
            self.producers[caller].cancel()

    async def produce(self, delivery: Delivery, items: AsyncIterator[Message]) -> None:
        """Send what a stream handler yields, as credit allows, and then the end."""
        assert delivery.caller is not None
        assert delivery.window is not None
        producer = Producer(delivery, delivery.caller, delivery.window)
        producer.task = cast("asyncio.Task[None]", asyncio.current_task())
        try:
            if producer.caller in self.producers:  # credit is granted to an id: two of one could not be told apart
                refusal = Refusal(reason=RefusalReason.NOT_IDEMPOTENT, detail="that stream is open already")
                self._router.answer(delivery, Kind.REFUSED, refusal)
                return
            self.producers[producer.caller] = producer
            try:
                async for item in items:
                    if producer.starved:
                        await producer.wait_credit()
                    await self._send_item(producer, item)
                self._router.answer(delivery, Kind.STREAM_END, None, producer.sent_items)
            finally:
                del self.producers[producer.caller]
        finally:
            await cast(Any, items).aclose()

    async def _send_item(self, producer: Producer, item: Message) -> None:
        caller = producer.caller
        if caller.peer == self._router.own:
            size = size_in_process(item)
            self.take_item(caller.request_id, item, producer.spend(size), size)
            return
        body = encode_body(item)
        size = sum(memoryview(frame).nbytes for frame in body)
        offset = producer.spend(size)
        retry_s = _FULL_RETRY_FIRST_S
        give_up_at = self._router.now() + producer.timeout_s
        while True:
            envelope = Envelope(kind=Kind.STREAM_ITEM, request_id=caller.request_id, number=offset,
                                tag=tag_of(type(item)))  # fmt: skip
            outcome = self._router.links.send(caller.peer, "", producer.delivery.lane, envelope, body)
            if outcome is SendOutcome.QUEUED:
                return
            if outcome is SendOutcome.NO_LINK:
                producer.cancel()
            elif self._router.now() >= give_up_at:
                raise ConsumerTooSlow(f"item {offset} of {producer.delivery.tag}: the lane is full")
            # The transport says nothing when a lane has room again; a few milliseconds of bulk are queued meanwhile.
            await asyncio.sleep(retry_s)
            retry_s = min(retry_s * 2, _FULL_RETRY_MAX_S)
