"""Packs: what goes in comes out, and what does not fit to the last byte is refused as a whole."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.limits import DEFAULT_LIMITS
from transport.address import PeerId, new_peer
from transport.errors import MalformedInput
from transport.transport import DownReason, Frame, Lane, SendOutcome
from transport.zmq.handshake import HEAD, Mark
from transport.zmq.lane import LaneOut
from transport.zmq.packing import MESSAGE_MAX_BYTES, PACK_MAX_MESSAGES, pack, packed, unpack
from transport.zmq.socket import Sent
from transport.zmq.transport import ZmqTransport

messages = st.lists(st.lists(st.binary(max_size=40), max_size=8), max_size=PACK_MAX_MESSAGES)


@given(messages, st.integers(min_value=0, max_value=(1 << 64) - 1))
def test_a_pack_gives_back_every_frame_of_every_message_under_the_number_of_the_first(
    sent: list[list[bytes]], first: int
) -> None:
    frame = pack(first, [packed(frames) or b"" for frames in sent])
    assert HEAD.unpack_from(frame) == (Mark.PACK, first)
    assert unpack(frame) == sent


@given(messages.filter(lambda sent: len(sent) > 0), st.data())
def test_a_pack_that_was_cut_short_is_malformed(sent: list[list[bytes]], data: st.DataObject) -> None:
    whole = [packed(frames) or b"" for frames in sent]
    last = data.draw(st.integers(min_value=1, max_value=len(whole[-1])))
    frame = pack(1, whole)[:-last]
    if last == len(whole[-1]):
        assert unpack(frame) == sent[:-1]
    else:
        with pytest.raises(MalformedInput, match=r"of a pack|middle of a message"):
            unpack(frame)


@given(st.binary(max_size=200))
def test_noise_is_read_or_malformed_and_nothing_else(noise: bytes) -> None:
    try:
        found = unpack(HEAD.pack(Mark.PACK, 1) + noise)
    except MalformedInput:
        return
    assert b"".join(packed(frames) or b"" for frames in found) == noise


def test_a_large_message_and_one_of_many_frames_travel_in_frames_of_their_own() -> None:
    edge: list[Frame] = [b"x" * 10, memoryview(bytes(MESSAGE_MAX_BYTES - 10))]
    assert packed(edge) is not None
    assert packed([*edge, b"y"]) is None
    assert packed([b""] * 9) is None
    with pytest.raises(MalformedInput):
        unpack(pack(1, [packed([b"x"]) or b""] * (PACK_MAX_MESSAGES + 1)))


class Collector:
    def __init__(self) -> None:
        self.frames: list[list[bytes]] = []
        self.changed = asyncio.Event()

    def on_frames(self, peer: PeerId, lane: Lane, frames: list[Frame]) -> None:
        self.frames.append([bytes(frame) for frame in frames])
        self.changed.set()

    def on_peer_up(self, peer: PeerId) -> None: ...
    def on_peer_down(self, peer: PeerId, reason: DownReason) -> None: ...


async def test_small_and_large_messages_of_one_turn_arrive_in_order_and_as_they_were_when_they_were_sent() -> None:
    one, other = (
        ZmqTransport(new_peer(name), listen="tcp://127.0.0.1:*", unguarded=True, cluster="t", limits=DEFAULT_LIMITS)
        for name in "ab"
    )
    seen = Collector()
    await one.start(Collector())
    await other.start(seen)
    await one.connect(other.endpoint, timeout_s=5)
    sent: list[list[bytes]] = []
    scratch = bytearray(8)
    for number in range(300):
        scratch[:] = number.to_bytes(8, "little")
        large = [b"L" * 5000] if number % 7 == 0 else []
        assert one.send(other.peer, Lane.MESSAGE, [scratch, *large]) is SendOutcome.QUEUED
        sent.append([bytes(scratch), *large])
    scratch[:] = b"changed!"
    async with asyncio.timeout(10):
        while len(seen.frames) < len(sent):
            seen.changed.clear()
            await seen.changed.wait()
    assert seen.frames == sent
    await one.close(timeout_s=0.5)
    await other.close(timeout_s=0.5)


class FullSocket:
    """libzmq takes nothing any more; the turn of the loop never ends."""

    def try_send(self, frames: list[Frame]) -> Sent:
        return Sent.FULL

    def at_turn_end(self, callback: object) -> None:
        pass


@pytest.mark.parametrize("bound", [1, 2, 5, PACK_MAX_MESSAGES + 3])
def test_a_lane_takes_no_more_than_its_bound_packed_or_queued(bound: int) -> None:
    lane = LaneOut([FullSocket()], None, bound)  # type: ignore[list-item]
    taken = [lane.offer([b"x"]) for _ in range(3 * bound)]
    assert taken == [SendOutcome.QUEUED] * bound + [SendOutcome.FULL] * 2 * bound


class TurningSocket:
    """Takes everything; the test says when a turn of the loop ends."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self._at_end: list[Callable[[], None]] = []

    def try_send(self, frames: list[Frame]) -> Sent:
        self.frames += frames
        return Sent.SENT

    def at_turn_end(self, callback: Callable[[], None]) -> None:
        self._at_end.append(callback)

    def end_turn(self) -> None:
        callbacks, self._at_end = self._at_end, []
        for callback in callbacks:
            callback()


def test_a_message_goes_at_once_unless_the_turn_before_had_more_than_one() -> None:
    """Alone nothing may delay it; among many a frame of its own would cost more than it saves."""
    socket = TurningSocket()
    lane = LaneOut([socket], None, 64)  # type: ignore[list-item]
    at_once: list[int] = []
    in_all: list[int] = []
    for messages in (1, 3, 3, 1, 1, 2):
        before = len(socket.frames)
        for _ in range(messages):
            assert lane.offer([b"x"]) is SendOutcome.QUEUED
        at_once.append(len(socket.frames) - before)
        socket.end_turn()
        in_all.append(len(socket.frames) - before)
        assert lane.idle, "nothing is kept beyond its turn"
    assert at_once == [1, 1, 0, 0, 1, 1]
    assert in_all == [1, 2, 1, 1, 1, 2]
    numbers = [HEAD.unpack_from(frame)[1] + i for frame in socket.frames for i in range(len(unpack(frame)))]
    assert numbers == list(range(1, 12)), "in order, each once"
