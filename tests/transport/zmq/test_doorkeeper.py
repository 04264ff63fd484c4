"""Strangers at a listener with keys: what they send is not kept, few of them wait, and nobody else notices."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import struct
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from configs.limits import DEFAULT_LIMITS, Limits
from transport.address import PeerId, new_peer
from transport.transport import DownReason, Frame, Lane
from transport.zmq import doorkeeper
from transport.zmq.doorkeeper import Doorkeeper
from transport.zmq.security import NodeKeys, generate_keys
from transport.zmq.transport import ZmqTransport

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
DEADLINE_S = 10.0


class Taker:
    def __init__(self) -> None:
        self.taken = 0
        self.downs = 0

    def on_frames(self, peer: PeerId, lane: Lane, frames: list[Frame]) -> None:
        self.taken += sum(len(frame) for frame in frames)

    def on_peer_up(self, peer: PeerId) -> None: ...
    def on_peer_down(self, peer: PeerId, reason: DownReason) -> None:
        self.downs += 1


@asynccontextmanager
async def listener(limits: Limits = DEFAULT_LIMITS) -> AsyncIterator[tuple[ZmqTransport, Taker, list[Doorkeeper]]]:
    """With keys that allow each other's life of the same pair; and its three doorkeepers."""
    made: list[Doorkeeper] = []
    original = Doorkeeper.__init__

    def note(self: Doorkeeper, *, stranger_bytes: int, strangers_max: int) -> None:
        original(self, stranger_bytes=stranger_bytes, strangers_max=strangers_max)
        made.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Doorkeeper, "__init__", note)
        head, taker = transport("head", KEYS, limits), Taker()
        await head.start(taker)
    try:
        yield head, taker, made
    finally:
        await head.close(timeout_s=0.2)


KEYS = generate_keys()


def transport(name: str, keys: NodeKeys, limits: Limits = DEFAULT_LIMITS) -> ZmqTransport:
    return ZmqTransport(new_peer(name), listen="tcp://127.0.0.1:*", cluster="t", limits=limits, keys=keys)


def call(head: ZmqTransport) -> socket.socket:
    port = re.search(r":(\d+)", head.endpoint.removeprefix("tcp://"))
    assert port is not None
    connection = socket.create_connection(("127.0.0.1", int(port[1])))
    connection.setblocking(False)
    return connection


async def until_hung_up(connection: socket.socket, says: bytes, pause_s: float = 0.0) -> int:
    """Say ``says`` again and again until the other end has had enough; how many bytes went out."""
    loop, sent = asyncio.get_running_loop(), 0
    async with asyncio.timeout(DEADLINE_S):
        with contextlib.suppress(OSError):
            while True:
                await loop.sock_sendall(connection, says)
                sent += len(says)
                await asyncio.sleep(pause_s)
    connection.close()
    return sent


async def until(holds: object) -> None:
    assert callable(holds)
    async with asyncio.timeout(DEADLINE_S):
        while not holds():
            await asyncio.sleep(0.005)


async def test_a_stranger_that_says_more_than_a_handshake_takes_is_shown_out_before_it_has_said_much() -> None:
    """It announces a frame of 60 MB, within what a message may have, and is cut off long before the end of it."""
    async with listener() as (head, _, keepers):
        stranger = call(head)
        await asyncio.get_running_loop().sock_sendall(stranger, GREETING + b"\x06" + struct.pack(">Q", 60_000_000))
        sent = await until_hung_up(stranger, bytes(1 << 12), pause_s=0.001)  # so a busy machine does not make it rush
        assert sent < 50_000_000
        assert sum(keeper.shown_out for keeper in keepers) == 1


async def test_strangers_that_only_wait_are_few_and_a_friend_comes_past_them() -> None:
    async with listener(DEFAULT_LIMITS.model_copy(update={"strangers_max": 5})) as (head, _, keepers):
        strangers = [call(head) for _ in range(20)]
        friend = transport("friend", KEYS)
        await friend.start(Taker())
        assert await friend.connect(head.endpoint, timeout_s=DEADLINE_S) == head.peer
        await until(lambda: sum(keeper.shown_out for keeper in keepers) >= 15)
        assert max(keeper.waiting for keeper in keepers) <= 5
        await friend.close(timeout_s=0.2)
        for stranger in strangers:
            stranger.close()


async def test_who_was_let_in_may_say_as_much_as_it_likes() -> None:
    async with listener() as (head, taker, keepers):
        friend = transport("friend", KEYS)
        await friend.start(Taker())
        await friend.connect(head.endpoint, timeout_s=DEADLINE_S)
        for lane in Lane:
            friend.send(head.peer, lane, [bytes(1 << 20)])
        await until(lambda: taker.taken >= len(Lane) << 20)
        await until(lambda: not any(keeper.waiting for keeper in keepers))
        assert not any(keeper.shown_out for keeper in keepers) and taker.downs == 0
        await friend.close(timeout_s=0.2)


async def test_what_is_no_connection_of_this_listener_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A descriptor may have become something else's by the time it is looked at."""
    keeper = Doorkeeper(stranger_bytes=1, strangers_max=1)
    keeper.port = 1
    one, other = socket.socketpair()
    for descriptor in (one.fileno(), other.fileno(), 1_000_000):
        keeper.accepted(descriptor)
    await until(lambda: keeper.waiting == 0)
    one.send(b"still there")
    assert other.recv(64) == b"still there" and keeper.shown_out == 0
    monkeypatch.setattr(doorkeeper, "_TCP_INFO", None)
    keeper.accepted(one.fileno())
    assert keeper.waiting == 0, "without a kernel to ask nobody is watched"
    keeper.close()
    one.close()
    other.close()


async def test_a_crowd_at_the_door_leaves_the_loop_its_turns() -> None:
    """Four hundred come at once; between two of the loop's turns few of their events are taken."""
    limits = DEFAULT_LIMITS.model_copy(update={"strangers_max": 5, "drain_max_messages": 8})
    async with listener(limits) as (head, _, keepers):
        strangers = [call(head) for _ in range(400)]
        shown_out, most = 0, 0
        async with asyncio.timeout(DEADLINE_S):
            while shown_out < 395:
                await asyncio.sleep(0)
                now = sum(keeper.shown_out for keeper in keepers)
                shown_out, most = now, max(most, now - shown_out)
        assert most <= 3 * 8, "a turn of the loop takes 8 events of each of three monitors"
        for stranger in strangers:
            stranger.close()


def keeper_of(port: int) -> Doorkeeper:
    """One that shows out whoever has said anything."""
    keeper = Doorkeeper(stranger_bytes=0, strangers_max=9)
    keeper.port = port
    return keeper


@contextlib.contextmanager
def strangers(count: int) -> Iterator[tuple[Doorkeeper, list[socket.socket], list[int]]]:
    """They have come and said something; a keeper of their door, their ends, and the descriptors of ours."""
    with contextlib.ExitStack() as stack:
        door = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        ends: list[socket.socket] = []
        descriptors: list[int] = []
        for _ in range(count):
            ends.append(stack.enter_context(socket.create_connection(door.getsockname())))
            ours, _ = door.accept()
            descriptors.append(ours.detach())
            ends[-1].send(b"hm")
            ends[-1].settimeout(DEADLINE_S)
        keeper = keeper_of(door.getsockname()[1])
        stack.callback(keeper.close)
        yield keeper, ends, descriptors
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def after_the_question(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], object]) -> None:
    """Let something happen once, between the first question to the kernel and what comes of it."""
    ask, left = Doorkeeper._ask, [happens]

    def asked(*of: Any) -> Any:
        told = ask(*of)
        while left:
            left.pop()()
        return told

    monkeypatch.setattr(Doorkeeper, "_ask", asked)


def descriptors_of(file: os.stat_result) -> list[int]:
    found: list[int] = []
    for descriptor in map(int, os.listdir("/dev/fd")):
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(descriptor), file):
                found.append(descriptor)
    return found


async def test_looking_at_what_is_no_socket_any_more_keeps_no_descriptor() -> None:
    keeper = keeper_of(1)
    with tempfile.TemporaryFile() as file:
        keeper.accepted(file.fileno())
        await until(lambda: keeper.waiting == 0)
        assert descriptors_of(os.fstat(file.fileno())) == [file.fileno()]


async def test_a_stranger_that_hangs_up_while_it_is_looked_at_does_not_end_the_looking(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with strangers(2) as (keeper, ends, descriptors):
        after_the_question(monkeypatch, lambda: os.close(descriptors[0]))
        for descriptor in descriptors:
            keeper.accepted(descriptor)
        await until(lambda: keeper.waiting == 0)
        assert [end.recv(1) for end in ends] == [b"", b""]


async def test_what_a_descriptor_becomes_while_it_is_looked_at_is_not_shown_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, other = socket.socketpair()
    with one, other, strangers(1) as (keeper, ends, descriptors):
        after_the_question(monkeypatch, lambda: os.dup2(one.fileno(), descriptors[0]))
        keeper.accepted(descriptors[0])
        await until(lambda: keeper.waiting == 0)
        one.send(b"still there")
        assert other.recv(64) == b"still there"
        assert ends[0].recv(1) == b"" and keeper.shown_out == 1


async def test_a_look_that_fails_is_not_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RuntimeError("a bug")

    errors: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["exception"]))
    with strangers(1) as (keeper, ends, descriptors):
        after_the_question(monkeypatch, fails)
        keeper.accepted(descriptors[0])
        await until(lambda: keeper.waiting == 0)
        assert ends[0].recv(1) == b"" and len(errors) == 1
