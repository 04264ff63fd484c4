"""One socket: what it takes in a turn of the loop, and what it does not take at all."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from configs.limits import DEFAULT_LIMITS
from transport.transport import Frame, Lane
from transport.zmq_socket import Context, Role, Sent, SocketEvent, ZmqSocket, lane_options, new_context

OPTIONS = lane_options(Lane.MESSAGE, 4096, DEFAULT_LIMITS)


@pytest.fixture
def context() -> Iterator[Context[Any]]:
    made = new_context()
    yield made
    made.term()


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


async def test_one_turn_of_the_loop_takes_no_more_messages_than_its_bound(context: Context[Any]) -> None:
    """Whoever sends much must not keep the loop from everybody else."""
    taken: list[int] = []
    turn = 0

    def on_message(_: list[Frame]) -> None:
        taken.append(turn)

    options = replace(OPTIONS, drain_max_messages=8, drain_max_ms=10_000.0, hwm_messages=1000)
    listener = ZmqSocket(context, Role.LISTENER, options, on_message)
    dialer = ZmqSocket(context, Role.DIALER, options, lambda _: None)
    try:
        dialer.connect(listener.bind("inproc://turns"))
        assert all(dialer.try_send([b"x"]) is Sent.SENT for _ in range(400))
        async with asyncio.timeout(10):
            while len(taken) < 400:
                turn += 1
                await asyncio.sleep(0)
        assert max(taken.count(number) for number in set(taken)) <= 2 * 8, "its descriptor and its own look, once each"
    finally:
        dialer.close(linger_s=0)
        listener.close(linger_s=0)


async def test_a_frame_larger_than_the_bound_ends_the_connection_and_is_never_held(context: Context[Any]) -> None:
    """libzmq would else put together whatever a stranger sends, whose size is the stranger's word."""
    arrived: list[int] = []
    events: list[SocketEvent] = []
    small = replace(OPTIONS, max_frame_bytes=1 << 16)
    listener = ZmqSocket(context, Role.LISTENER, small, lambda frames: arrived.append(len(frames[-1])))
    dialer = ZmqSocket(context, Role.DIALER, OPTIONS, lambda _: None, events.append)
    try:
        dialer.connect(listener.bind("tcp://127.0.0.1:*"))
        dialer.try_send([bytes(1 << 16)])
        await until(lambda: arrived == [1 << 16])
        dialer.try_send([bytes((1 << 16) + 1)])
        await until(lambda: SocketEvent.DISCONNECTED in events or len(arrived) > 1)
        assert arrived == [1 << 16]
    finally:
        dialer.close(linger_s=0)
        listener.close(linger_s=0)
