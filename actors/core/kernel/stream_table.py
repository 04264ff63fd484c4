"""Streams of one process, both ends: opening, crediting, producing, leaving. The flow is drawn in ``streams.py``.

Invariants
- The opening carries the first credit and goes on the lane of the items, which tells the producer that lane.
- Credit goes on the signal lane: it must not wait behind the bulk that it is to release.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final, TypeVar, cast

from actors.core.errors import AskError, ConsumerTooSlow, RefusalReason
from actors.core.kernel.answers import Caller, Refusal, error_of
from actors.core.kernel.delivery import Delivery, StreamWindow
from actors.core.kernel.port import Port
from actors.core.kernel.questions import Questions
from actors.core.kernel.streams import Producer, Stream, size_in_process
from actors.core.message import Message, tag_of
from transport.address import ActorAddress, PeerId
from transport.codec import encode_body
from transport.envelope import Envelope, Kind
from transport.transport import Lane, SendOutcome

R = TypeVar("R", bound=Message)

_FULL_RETRY_FIRST_S: Final = 0.001
_FULL_RETRY_MAX_S: Final = 0.016


class StreamTable:
    """Does the work of ``ActorRef.stream`` and of stream handlers; consumers are kept in ``Requests``."""

    def __init__(self, port: Port, questions: Questions) -> None:
        self._port = port
        self._questions = questions

    def make(
        self,
        owner: ActorAddress | None,
        address: ActorAddress,
        message: Message,
        item: type[R],
        lane: Lane,
        window: StreamWindow,
    ) -> Stream[R]:
        port = self._port
        asker = "" if owner is None else owner.name
        return Stream(self, message, port.next_id(), asker, address, tag_of(type(message)), item,
                      since=port.now(), owner=owner, lane=lane, window=window)  # fmt: skip

    def open(self, stream: Stream[Any]) -> None:
        """Ask for the items. The first ``anext`` raises a refusal; a message that cannot be encoded raises here."""
        port, window = self._port, stream.window
        port.requests.open(stream)
        deadline_at = port.now() + window.timeout_s
        try:
            if stream.target.peer != port.own:
                self._questions.send(stream, Kind.STREAM_OPEN, stream.message, stream.lane, deadline_at,
                                     number=window.items, number_bytes=window.bytes)  # fmt: skip
                return
            caller = Caller(port.own, stream.request_id)
            refusal = port.deliver_local(
                stream.owner, stream.target.name, stream.message, caller, deadline_at, window=window
            )
            if refusal is not None:
                raise error_of(refusal, stream.target, stream.question, stream=True)
        except BaseException as error:
            port.requests.close(stream)
            if not isinstance(error, AskError):
                raise
            stream.fail(error)

    def grant(self, stream: Stream[Any], items: int, size: int) -> None:
        """Grant the producer credit: the consumer has room again."""
        if stream.ended:
            return
        if stream.target.peer == self._port.own:
            self.credit(Caller(self._port.own, stream.request_id), items, size)
        else:
            self._port.post(stream.target.peer, "", Lane.SIGNAL, Kind.CREDIT, None, target=stream.target.name,
                              request_id=stream.request_id, number=items, number_bytes=size, surely=True)  # fmt: skip

    def leave(self, stream: Stream[Any]) -> None:
        if self._port.requests.get(stream.request_id) is stream:
            self._port.requests.close(stream)
            self._questions.cancel(stream, stream.lane)

    def take_item(self, request_id: int, item: Message, offset: int, size: int) -> None:
        """Give an item that has arrived to its consumer in this process."""
        stream = self._port.requests.get(request_id)
        if not isinstance(stream, Stream):
            self._port.count("late_items")
        elif not stream.item(item, offset, size):
            self.leave(cast("Stream[Any]", stream))

    def spoil(self, stream: Stream[Any]) -> None:
        """End the stream at both ends: something has arrived that is no item of it."""
        self._port.settle(stream.request_id, Kind.STREAM_ITEM, None, 0)
        self._questions.cancel(stream, stream.lane)

    def credit(self, caller: Caller, items: int, size: int) -> None:
        """Note the credit that a consumer has granted to a producer in this process."""
        producer = self._port.producers.get(caller)
        if producer is not None:
            producer.grant(items, size)

    def cancel(self, caller: Caller) -> None:
        producer = self._port.producers.get(caller)
        if producer is not None:
            producer.cancel()

    def cancel_peer(self, peer: PeerId) -> None:
        """End all producers that serve ``peer``: the link to it is lost."""
        for caller in [caller for caller in self._port.producers if caller.peer == peer]:
            self._port.producers[caller].cancel()

    async def produce(self, delivery: Delivery, items: AsyncIterator[Message]) -> None:
        """Send what a stream handler yields, as credit allows, and then the end."""
        assert delivery.caller is not None
        assert delivery.window is not None
        producer = Producer(delivery, delivery.caller, delivery.window)
        producer.task = cast("asyncio.Task[None]", asyncio.current_task())
        try:
            if producer.caller in self._port.producers:  # credit names only the id: two would be mixed up
                refusal = Refusal(reason=RefusalReason.NOT_IDEMPOTENT, detail="that stream is open already")
                self._port.answer(delivery, Kind.REFUSED, refusal)
                return
            self._port.producers[producer.caller] = producer
            try:
                async for item in items:
                    if producer.starved:
                        await producer.wait_credit()
                    await self._send_item(producer, item)
                self._port.answer(delivery, Kind.STREAM_END, None, producer.sent_items)
            finally:
                del self._port.producers[producer.caller]
        finally:
            await cast(Any, items).aclose()

    async def _send_item(self, producer: Producer, item: Message) -> None:
        caller = producer.caller
        if caller.peer == self._port.own:
            size = size_in_process(item)
            self.take_item(caller.request_id, item, producer.spend(size), size)
            return
        body = encode_body(item)
        size = sum(memoryview(frame).nbytes for frame in body)
        offset = producer.spend(size)
        retry_s = _FULL_RETRY_FIRST_S
        give_up_at = self._port.now() + producer.timeout_s
        while True:
            envelope = Envelope(kind=Kind.STREAM_ITEM, request_id=caller.request_id, number=offset,
                                tag=tag_of(type(item)))  # fmt: skip
            outcome = self._port.links.send(caller.peer, "", producer.delivery.lane, envelope, body)
            if outcome is SendOutcome.QUEUED:
                return
            if outcome is SendOutcome.NO_LINK:
                producer.cancel()
            elif self._port.now() >= give_up_at:
                raise ConsumerTooSlow(f"item {offset} of {producer.delivery.tag}: the lane is full")
            # The transport does not say when a lane has room again; a few milliseconds of bulk are queued meanwhile.
            await asyncio.sleep(retry_s)
            retry_s = min(retry_s * 2, _FULL_RETRY_MAX_S)
