"""One socket: what it takes in a turn of the loop, and what it does not take at all."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest
import zmq

from configs.limits import DEFAULT_LIMITS
from transport.transport import Frame, Lane
from transport.zmq.context import new_context
from transport.zmq.options import lane_options
from transport.zmq.socket import Context, Role, Sent, SocketEvent, ZmqSocket

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


FLOODED = """
import asyncio, time, zmq
from dataclasses import replace
from configs.limits import DEFAULT_LIMITS
from transport.transport import Lane
from transport.zmq.context import new_context
from transport.zmq.options import lane_options
from transport.zmq.socket import Role, ZmqSocket

async def main():
    options = lane_options(Lane.SIGNAL, 8, DEFAULT_LIMITS)
    options = replace(options, heartbeat_interval_s=0.02, heartbeat_timeout_s=10.0)
    arrived, context = [], new_context()
    listener = ZmqSocket(context, Role.LISTENER, options, arrived.append)
    endpoint = listener.bind("tcp://127.0.0.1:*")
    theirs = zmq.Context()
    stranger = theirs.socket(zmq.DEALER)
    stranger.connect(endpoint)
    for _ in range(500):
        stranger.send(b"x")
    time.sleep(0.2)
    stranger.close(linger=0)
    theirs.term()
    time.sleep(0.2)  # the loop is busy for ten beats
    while len(arrived) < 500:
        await asyncio.sleep(0.001)
    listener.close(linger_s=0)
    context.term()

asyncio.run(main())
"""


def test_a_peer_that_floods_a_busy_process_and_goes_does_not_abort_it() -> None:
    """libzmq would, at its next heartbeat on a connection that it has stopped reading and that was closed."""
    done = subprocess.run([sys.executable, "-c", FLOODED], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


class FullSocket:
    """A socket whose peer does not read, filled until it says so; it tries again whenever it is told to."""

    def __init__(self, context: Context[Any], role: Role) -> None:
        self.asked = 0
        self._route: list[Frame] = []
        self.socket = ZmqSocket(context, role, replace(OPTIONS, hwm_messages=1), self._heard, None, self._again)
        self._peer = context.socket(zmq.DEALER)
        self._peer.setsockopt(zmq.RCVHWM, 1)
        self._peer.connect(self.socket.bind(f"inproc://full-{role.name}"))

    def _heard(self, frames: list[Frame]) -> None:
        self._route = frames[:1]

    def _again(self) -> None:
        self.asked += 1
        self._try()

    def _try(self) -> Sent:
        return self.socket.try_send([*self._route, b"x"])

    async def fill(self, role: Role) -> None:
        if role is Role.LISTENER:
            self._peer.send(b"hello")
            await until(lambda: self._route)
        while self._try() is Sent.SENT:
            pass
        await turns()
        self.asked = 0

    def read_all(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                self._peer.recv(zmq.DONTWAIT)

    def close(self) -> None:
        self._peer.close(linger=0)
        self.socket.close(linger_s=0)


async def turns() -> None:
    for _ in range(100):
        await asyncio.sleep(0)


@pytest.fixture(params=Role)
async def full(
    request: pytest.FixtureRequest, context: Context[Any], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[FullSocket]:
    monkeypatch.setattr("transport.zmq.socket._FULL_S", 3600.0)
    made = FullSocket(context, request.param)
    await made.fill(request.param)
    yield made
    made.close()


async def test_a_full_socket_is_left_alone_until_something_changes(full: FullSocket) -> None:
    """To ask it in every turn would take a core from libzmq, which needs it to send."""
    await turns()
    assert full.asked == 0


async def test_a_full_socket_is_asked_again_as_soon_as_its_peer_has_read(full: FullSocket) -> None:
    """By its file, not by the clock, which stands at an hour here."""
    full.read_all()
    await until(lambda: full.asked)


@pytest.mark.parametrize("role", Role)
async def test_a_full_socket_is_asked_now_and_then_if_its_file_says_nothing(
    context: Context[Any], monkeypatch: pytest.MonkeyPatch, role: Role
) -> None:
    """A look may have consumed the edge that would have told."""
    monkeypatch.setattr("transport.zmq.socket._FULL_S", 0.0)
    full = FullSocket(context, role)
    await full.fill(role)
    try:
        await until(lambda: full.asked > 2)
    finally:
        full.close()
