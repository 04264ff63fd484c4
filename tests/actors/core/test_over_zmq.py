"""The same kernel over real sockets: one walk through everything that crosses a process boundary."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from actors.core.actor import Actor, concurrent, handles
from actors.core.errors import RemoteError, StreamDown
from actors.core.message import Message, message
from actors.core.system import ActorSystem
from actors.core.watch import Down, Gone
from configs.limits import DEFAULT_LIMITS
from transport.address import PeerId
from transport.zmq.transport import ZmqTransport


@message("test_zmq.blocks")
class Blocks(Message):
    blocks: int
    size_bytes: int


@message("test_zmq.block")
class Block(Message):
    index: int
    data: np.ndarray


@message("test_zmq.fail")
class Fail(Message):
    pass


class Server(Actor):
    @handles(Block)
    async def echo(self, message: Block) -> Block:
        return message

    @handles(Fail)
    async def fail(self, message: Fail) -> None:
        raise ValueError("boom")

    @handles(Blocks)
    @concurrent
    async def blocks(self, message: Blocks) -> AsyncIterator[Block]:
        for index in range(message.blocks):
            yield Block(index=index, data=np.full(message.size_bytes, index, np.uint8))


class Watcher(Actor):
    def __init__(self, target: ActorSystem) -> None:
        self.target = target
        self.down: asyncio.Future[Gone] = asyncio.get_running_loop().create_future()

    async def on_start(self) -> None:
        self.ctx.watch(self.target.address("server"))

    @handles(Down)
    async def on_down(self, message: Down) -> None:
        self.down.set_result(message.reason)


@pytest.fixture
async def pair() -> AsyncIterator[tuple[ActorSystem, ActorSystem]]:
    systems = [
        ActorSystem(ZmqTransport(PeerId(name, incarnation), listen="ipc://*", cluster="test", limits=DEFAULT_LIMITS))
        for name, incarnation in (("near", 11), ("far", 22))
    ]
    for system in systems:
        await system.start()
    await systems[1].spawn("server", Server())
    yield systems[0], systems[1]
    for system in systems:
        await system.stop()


async def test_questions_and_arrays_cross_sockets(pair: tuple[ActorSystem, ActorSystem]) -> None:
    ref = pair[0].ref(pair[1].address("server"))
    for size in (0, 10, 100_000):
        sent = Block(index=size, data=np.arange(size, dtype=np.int64))
        reply = await ref.ask(sent, Block)
        np.testing.assert_array_equal(reply.data, sent.data)


async def test_megabytes_stream_past_the_bound_of_the_lane(pair: tuple[ActorSystem, ActorSystem]) -> None:
    ref = pair[0].ref(pair[1].address("server"))
    async with ref.stream(Blocks(blocks=60, size_bytes=1 << 20), Block, credit_bytes=64 << 20) as blocks:
        assert [(block.index, int(block.data[-1])) async for block in blocks] == [(n, n) for n in range(60)]


async def test_a_crash_is_told_to_the_asker_and_to_the_watcher(pair: tuple[ActorSystem, ActorSystem]) -> None:
    watcher = Watcher(pair[1])
    await pair[0].spawn("watcher", watcher)
    async with asyncio.timeout(10):  # the watch has a lane of its own: the question below may be there before it
        while not pair[1]._router.deaths.watchers:
            await asyncio.sleep(0.001)
    with pytest.raises(RemoteError):
        await pair[0].ref(pair[1].address("server")).ask(Fail(), Block)
    async with asyncio.timeout(10):
        assert await watcher.down is Gone.CRASHED


async def test_a_system_that_leaves_ends_streams_and_watches(pair: tuple[ActorSystem, ActorSystem]) -> None:
    watcher = Watcher(pair[1])
    await pair[0].spawn("watcher", watcher)
    ref = pair[0].ref(pair[1].address("server"))
    async with ref.stream(Blocks(blocks=1000, size_bytes=10), Block, credit_items=2) as blocks:
        await anext(blocks)
        await pair[1].stop()
        with pytest.raises(StreamDown):
            _ = [block async for block in blocks]
    async with asyncio.timeout(10):
        assert await watcher.down is Gone.STOPPED
