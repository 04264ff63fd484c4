"""Credit streams: order, windows, the one end, and leaving early; in process and over a transport."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from actors.core.actor import Actor, concurrent, handles
from actors.core.errors import DeadlineExceeded, RefusalReason, Refused, RemoteError, ReplyError, StreamDown
from actors.core.message import Done, Message, message
from actors.core.system import ActorSystem
from tests.broken_links import break_link
from transport.transport import Lane

Pair = tuple[ActorSystem, ActorSystem]


@message("test_stream.count")
class Count(Message):
    to: int
    fail_at: int = -1
    declared: bool = False
    hold_at: int = -1


@message("test_stream.block")
class Block(Message):
    blocks: int
    size_bytes: int


@message("test_stream.item")
class Item(Message):
    index: int
    data: np.ndarray | None = None


@message("test_stream.ask")
class Ask(Message):
    pass


class TooFar(ReplyError):
    pass


class Source(Actor):
    def __init__(self) -> None:
        self.made = 0
        self.closed = 0
        self.gate = asyncio.Event()
        self.held = asyncio.Event()

    @handles(Count)
    @concurrent
    async def count(self, message: Count) -> AsyncIterator[Item]:
        try:
            for index in range(message.to):
                if index == message.fail_at:
                    raise TooFar("no further") if message.declared else ValueError("a bug")
                if index == message.hold_at:
                    self.held.set()
                    await self.gate.wait()
                self.made += 1
                yield Item(index=index)
        finally:
            self.closed += 1

    @handles(Block)
    async def blocks(self, message: Block) -> AsyncIterator[Item]:
        for index in range(message.blocks):
            self.made += 1
            yield Item(index=index, data=np.full(message.size_bytes, index, np.uint8))

    @handles(Ask)
    async def ask(self, message: Ask) -> None:
        return


async def start(pair: Pair) -> tuple[Source, Any]:
    source = Source()
    ref = await pair[1].spawn("source", source)
    return source, pair[0].ref(ref.address)


async def test_all_items_come_in_order_and_then_the_end(pair: Pair) -> None:
    _, ref = await start(pair)
    async with ref.stream(Count(to=1000), Item, credit_items=8) as items:
        assert [item.index async for item in items] == list(range(1000))
    assert len(pair[0]._router.requests) == 0
    assert len(pair[1]._router.producers) == 0


async def test_no_more_than_the_window_is_made_before_anything_is_read(pair: Pair) -> None:
    source, ref = await start(pair)
    async with ref.stream(Count(to=100), Item, credit_items=4) as items:
        assert (await anext(items)).index == 0
        for _ in range(20):
            await asyncio.sleep(0)
        # One read item is less than half of the window, so nothing new was granted; the fifth waits unsent.
        assert source.made == 5


async def test_the_byte_window_holds_back_large_items(pair: Pair) -> None:
    source, ref = await start(pair)
    async with ref.stream(Block(blocks=50, size_bytes=1000), Item, credit_bytes=2500, credit_items=1000) as items:
        first = await anext(items)
        assert first.data is not None
        assert first.data.nbytes == 1000
        for _ in range(20):
            await asyncio.sleep(0)
        assert source.made <= 4
        assert [item.index async for item in items] == list(range(1, 50))


async def test_an_item_larger_than_the_window_passes(pair: Pair) -> None:
    _, ref = await start(pair)
    async with ref.stream(Block(blocks=3, size_bytes=100_000), Item, credit_bytes=10) as items:
        assert [item.index async for item in items] == [0, 1, 2]


async def test_a_bug_in_the_producer_ends_the_stream_after_what_it_sent(pair: Pair) -> None:
    _, ref = await start(pair)
    seen: list[int] = []
    with pytest.raises(RemoteError) as caught:
        async with ref.stream(Count(to=10, fail_at=3), Item) as items:
            async for item in items:
                seen.append(item.index)  # noqa: PERF401
    assert seen == [0, 1, 2]
    assert caught.value.error_type == "ValueError"
    assert (await pair[1].wait_stopped("source", timeout_s=5)).reason == "crashed"


async def test_a_declared_error_ends_the_stream_and_the_producer_lives_on(pair: Pair) -> None:
    _, ref = await start(pair)
    with pytest.raises(RemoteError) as caught:
        async with ref.stream(Count(to=10, fail_at=0, declared=True), Item) as items:
            await anext(items)
    assert caught.value.declared
    await ref.ask(Ask(), Done)


async def test_the_death_of_the_producer_ends_the_stream(pair: Pair) -> None:
    source, ref = await start(pair)
    async with ref.stream(Count(to=10, hold_at=2), Item, timeout_s=60) as items:
        await source.held.wait()
        stopping = asyncio.ensure_future(pair[1].stop_actor("source"))
        assert [(await anext(items)).index, (await anext(items)).index] == [0, 1]
        with pytest.raises(StreamDown) as caught:
            await anext(items)
        assert caught.value.reason == "stopped"
        await stopping


async def test_a_lost_link_ends_the_stream_at_both_ends(make_system: Any, network: Any) -> None:
    pair = await make_system("near"), await make_system("far")
    source, ref = await start(pair)
    async with ref.stream(Count(to=10, hold_at=2), Item, timeout_s=60) as items:
        await source.held.wait()
        break_link(network, "near", "far")
        with pytest.raises(StreamDown):
            _ = [item async for item in items]
    await ref.ask(Ask(), Done)
    assert source.closed == 1


async def test_leaving_early_closes_the_generator(pair: Pair) -> None:
    source, ref = await start(pair)
    async with ref.stream(Count(to=100, hold_at=1), Item) as items:
        await anext(items)
        await source.held.wait()
    await ref.ask(Ask(), Done)
    await ref.ask(Ask(), Done)
    assert source.closed == 1
    assert len(pair[1]._router.producers) == 0


async def test_leaving_a_stream_that_occupies_the_actor_frees_it(pair: Pair) -> None:
    _, ref = await start(pair)
    async with ref.stream(Block(blocks=100, size_bytes=10), Item, credit_items=1) as items:
        await anext(items)
    assert await ref.ask(Ask(), Done, timeout_s=5) == Done()


async def test_a_silent_producer_ends_at_the_deadline(pair: Pair) -> None:
    _, ref = await start(pair)
    async with ref.stream(Count(to=10, hold_at=0), Item, timeout_s=0.02) as items:
        with pytest.raises(DeadlineExceeded):
            await anext(items)


async def test_a_consumer_that_takes_nothing_is_told_so_and_the_producer_lives_on(pair: Pair) -> None:
    _, ref = await start(pair)
    async with ref.stream(Count(to=10), Item, timeout_s=0.05, credit_items=1) as items:
        await asyncio.sleep(0.15)
        assert (await anext(items)).index == 0
        with pytest.raises(RemoteError) as caught:
            _ = [item async for item in items]
        assert caught.value.error_type == "ConsumerTooSlow"
    await ref.ask(Ask(), Done)


async def test_a_stream_of_what_is_no_stream_is_refused_and_the_other_way_round(pair: Pair) -> None:
    _, ref = await start(pair)
    with pytest.raises(Refused) as refused:
        async with ref.stream(Ask(), Item) as items:
            await anext(items)
    assert refused.value.reason is RefusalReason.NO_HANDLER
    with pytest.raises(Refused):
        await ref.ask(Count(to=1), Item)


async def test_a_full_lane_delays_a_stream_and_loses_nothing(make_system: Any) -> None:
    pair = await make_system("near"), await make_system("far")
    _, ref = await start(pair)
    async with ref.stream(Block(blocks=200, size_bytes=600), Item, credit_items=200, lane=Lane.BULK) as items:
        assert [item.index async for item in items] == list(range(200))
    assert pair[1].limits.bulk_queue_frames < 200, "else this test shows nothing"


async def test_an_item_of_another_type_ends_the_stream(pair: Pair) -> None:
    source, ref = await start(pair)
    async with ref.stream(Count(to=5, hold_at=3), Done) as items:
        with pytest.raises(Exception, match="expected"):
            await anext(items)
    await ref.ask(Ask(), Done)
    assert source.closed == 1


async def test_however_long_a_stream_is_no_more_than_the_window_is_made_ahead_of_the_reader(pair: Pair) -> None:
    """Credit is conserved from the first item to the last: granted is used and outstanding."""
    source, ref = await start(pair)
    ahead: list[int] = []
    async with ref.stream(Count(to=200), Item, credit_items=8) as items:
        async for item in items:
            for _ in range(10):
                await asyncio.sleep(0)
            ahead.append(source.made - item.index - 1)
    assert max(ahead) <= 8 + 1, "one item more is made, and waits for credit"


async def test_a_stream_with_a_gap_ends_instead_of_going_on_without_the_item(pair: Pair) -> None:
    source, ref = await start(pair)
    seen: list[int] = []
    with pytest.raises(StreamDown, match="item 2"):
        async with ref.stream(Count(to=5, hold_at=2), Item, timeout_s=60) as items:
            async for item in items:
                seen.append(item.index)
                if item.index == 1:
                    [stream] = list(pair[0]._router.requests)
                    pair[0]._router.streams.take_item(stream.request_id, Item(index=3), 3, 64)
    assert seen == [0, 1]
    await ref.ask(Ask(), Done)
    assert source.closed == 1


async def test_while_a_stream_that_is_not_concurrent_is_open_the_actor_takes_no_other_message(pair: Pair) -> None:
    _, ref = await start(pair)
    async with ref.stream(Block(blocks=5, size_bytes=10), Item, credit_items=1) as items:
        await anext(items)
        with pytest.raises(DeadlineExceeded):
            await ref.ask(Ask(), Done, timeout_s=0.02)
        assert [item.index async for item in items] == [1, 2, 3, 4]
    await ref.ask(Ask(), Done)
