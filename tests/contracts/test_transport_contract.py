"""What every transport promises (``transport/transport.py``), on every kind of network and on both event loops."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from configs.limits import DEFAULT_LIMITS
from transport.errors import HandshakeRefused, LinkTimeout
from transport.transport import DownReason, Lane, SendOutcome

_spec = importlib.util.spec_from_file_location("transport_worlds", Path(__file__).with_name("transport_worlds.py"))
assert _spec is not None and _spec.loader is not None
worlds: Any = importlib.util.module_from_spec(_spec)
sys.modules["transport_worlds"] = worlds
_spec.loader.exec_module(worlds)
World, WAIT_S = worlds.World, worlds.WAIT_S


@pytest.fixture(params=worlds.KINDS)
def world(request: pytest.FixtureRequest) -> Any:
    return World(request.param)


def test_connect_returns_the_peer_and_both_ends_hear_of_it_once(world: Any) -> None:
    async def scenario(world: Any) -> None:
        a, seen_a, b, seen_b = await world.pair()
        assert await a.connect(b.endpoint, timeout_s=WAIT_S) == b.peer
        assert (a.peers(), b.peers()) == ([b.peer], [a.peer])
        assert (seen_a.ups(), seen_b.ups()) == ([b.peer], [a.peer])

    world.run(scenario)


def test_frames_of_every_type_and_size_arrive_unchanged_on_every_lane_in_both_directions(world: Any) -> None:
    frames = [b"", b"x", bytearray(b"y" * 100), memoryview(b"z" * 70_000), bytes(1 << 20)]

    async def scenario(world: Any) -> None:
        a, seen_a, b, seen_b = await world.pair()
        for lane in Lane:
            assert a.send(b.peer, lane, frames) is SendOutcome.QUEUED
            assert b.send(a.peer, lane, frames) is SendOutcome.QUEUED
        for seen in (seen_a, seen_b):
            await seen.until(lambda r: all(len(r.frames(lane)) == 1 for lane in Lane))
            for lane in Lane:
                assert seen.frames(lane) == [[bytes(frame) for frame in frames]]

    world.run(scenario)


def test_each_lane_is_first_in_first_out_and_without_gaps(world: Any) -> None:
    async def scenario(world: Any) -> None:
        a, _, b, seen_b = await world.pair()
        sent = dict.fromkeys(Lane, 0)
        for number in range(1500):
            for lane in (Lane.SIGNAL, Lane.MESSAGE):
                while a.send(b.peer, lane, [str(number).encode()]) is SendOutcome.FULL:
                    await asyncio.sleep(0.001)
                sent[lane] += 1
        await seen_b.until(lambda r: len(r.frames(Lane.MESSAGE)) == 1500 and len(r.frames(Lane.SIGNAL)) == 1500)
        for lane in (Lane.SIGNAL, Lane.MESSAGE):
            assert seen_b.frames(lane) == [[str(number).encode()] for number in range(1500)]

    world.run(scenario)


def test_send_never_delivers_before_it_returns(world: Any) -> None:
    async def scenario(world: Any) -> None:
        a, _, b, seen_b = await world.pair()
        before = len(seen_b.events)
        a.send(b.peer, Lane.MESSAGE, [b"x"])
        assert len(seen_b.events) == before
        await seen_b.until(lambda r: len(r.frames(Lane.MESSAGE)) == 1)

    world.run(scenario)


@pytest.mark.parametrize("dialer_sends", [True, False])
def test_a_lane_at_its_bound_says_full_and_loses_nothing_that_it_has_queued(world: Any, dialer_sends: bool) -> None:
    payload = bytes(1 << 20)

    async def scenario(world: Any) -> None:
        a, seen_a, b, seen_b = await world.pair()
        if not dialer_sends:
            a, b, seen_b = b, a, seen_a
        queued = 0
        # one loop runs both ends, so nobody reads while this loop does not yield
        while (outcome := a.send(b.peer, Lane.BULK, [str(queued).encode(), payload])) is SendOutcome.QUEUED:
            queued += 1
            assert queued < 200, "the bound was never met"
        assert outcome is SendOutcome.FULL
        assert queued >= DEFAULT_LIMITS.bulk_queue_frames
        await seen_b.until(lambda r: len(r.frames(Lane.BULK)) == queued, 20)
        assert [frames[0] for frames in seen_b.frames(Lane.BULK)] == [str(n).encode() for n in range(queued)]
        assert a.send(b.peer, Lane.BULK, [b"room again"]) is SendOutcome.QUEUED

    world.run(scenario)


def test_a_signal_overtakes_bulk_that_was_queued_before_it(world: Any) -> None:
    async def scenario(world: Any) -> None:
        a, _, b, seen_b = await world.pair()
        payload = bytes(2 << 20)
        queued = 0
        while a.send(b.peer, Lane.BULK, [payload]) is SendOutcome.QUEUED:
            queued += 1
        a.send(b.peer, Lane.SIGNAL, [b"down"])
        await seen_b.until(lambda r: len(r.frames(Lane.BULK)) == queued, 20)
        lanes = [event[2] for event in seen_b.events if event[0] == "frames"]
        assert lanes.index(Lane.SIGNAL) < len(lanes) - 1

    world.run(scenario)


def test_sending_without_a_link_says_so(world: Any) -> None:
    async def scenario(world: Any) -> None:
        a, _ = await world.peer("a")
        b, _ = await world.peer("b")
        assert a.send(b.peer, Lane.MESSAGE, [b"x"]) is SendOutcome.NO_LINK
        assert a.peers() == []

    world.run(scenario)


def test_who_closes_is_seen_stopped_once_after_all_that_it_has_sent(world: Any) -> None:
    async def scenario(world: Any) -> None:
        a, seen_a, b, seen_b = await world.pair()
        for number in range(200):
            assert a.send(b.peer, Lane.MESSAGE, [str(number).encode()]) is SendOutcome.QUEUED
        await a.close(timeout_s=2)
        await seen_b.until(lambda r: bool(r.downs()))
        assert seen_b.downs() == [(a.peer, DownReason.STOPPED)]
        assert len(seen_b.frames(Lane.MESSAGE)) == 200
        assert seen_b.events[-1][0] == "down"
        assert seen_a.downs() == []
        assert b.peers() == []

    world.run(scenario)


def test_the_listening_end_may_close_too(world: Any) -> None:
    async def scenario(world: Any) -> None:
        a, seen_a, b, _ = await world.pair()
        for number in range(200):
            b.send(a.peer, Lane.MESSAGE, [str(number).encode()])
        await b.close(timeout_s=2)
        await seen_a.until(lambda r: bool(r.downs()))
        assert seen_a.downs() == [(b.peer, DownReason.STOPPED)]
        assert len(seen_a.frames(Lane.MESSAGE)) == 200
        assert a.send(b.peer, Lane.MESSAGE, [b"late"]) is SendOutcome.NO_LINK

    world.run(scenario)


@pytest.mark.parametrize("dialer_disconnects", [True, False])
def test_disconnecting_is_seen_as_stopped_at_both_ends_and_may_be_undone(world: Any, dialer_disconnects: bool) -> None:
    async def scenario(world: Any) -> None:
        a, seen_a, b, seen_b = await world.pair()
        here, there = (a, b) if dialer_disconnects else (b, a)
        here.disconnect(there.peer)
        assert here.send(there.peer, Lane.MESSAGE, [b"x"]) is SendOutcome.NO_LINK
        for seen, other in ((seen_a, b), (seen_b, a)):
            await seen.until(lambda r: bool(r.downs()))
            assert seen.downs() == [(other.peer, DownReason.STOPPED)]
        await a.connect(b.endpoint, timeout_s=WAIT_S)
        await seen_b.until(lambda r: len(r.ups()) == 2)
        a.send(b.peer, Lane.MESSAGE, [b"again"])
        await seen_b.until(lambda r: r.frames(Lane.MESSAGE) == [[b"again"]])

    world.run(scenario)


@pytest.mark.parametrize("dialer_crashes", [True, False])
def test_who_crashes_is_seen_unreachable_once_and_after_what_it_had_delivered(world: Any, dialer_crashes: bool) -> None:
    async def scenario(world: Any) -> None:
        a, seen_a, b, seen_b = await world.pair()
        victim, survivor, seen = (a, b, seen_b) if dialer_crashes else (b, a, seen_a)
        victim.send(survivor.peer, Lane.MESSAGE, [b"last words"])
        await seen.until(lambda r: len(r.frames(Lane.MESSAGE)) == 1)
        world.crash(victim)
        await seen.until(lambda r: bool(r.downs()), 2)
        assert survivor.send(victim.peer, Lane.MESSAGE, [b"x"]) is SendOutcome.NO_LINK
        await asyncio.sleep(0.2)
        assert seen.downs() == [(victim.peer, DownReason.UNREACHABLE)]
        assert seen.events[-1][0] == "down"

    world.run(scenario)


@pytest.mark.parametrize("dialer_crashes", [True, False])
def test_a_crash_is_seen_at_once_however_seldom_the_heartbeat(world: Any, dialer_crashes: bool) -> None:
    seldom = DEFAULT_LIMITS.model_copy(update={"heartbeat_interval_s": 30.0, "heartbeat_timeout_s": 90.0})

    async def scenario(world: Any) -> None:
        a, seen_a, b, seen_b = await world.pair(seldom)
        victim, seen = (a, seen_b) if dialer_crashes else (b, seen_a)
        world.crash(victim)
        await seen.until(lambda r: bool(r.downs()), 1.0)
        assert seen.downs() == [(victim.peer, DownReason.UNREACHABLE)]

    world.run(scenario)


def test_a_new_life_replaces_the_old_one_which_is_fenced(world: Any) -> None:
    async def scenario(world: Any) -> None:
        head, seen = await world.peer("head")
        old, seen_old = await world.peer("worker")
        await old.connect(head.endpoint, timeout_s=WAIT_S)
        new, _ = await world.peer("worker")
        await new.connect(head.endpoint, timeout_s=WAIT_S)
        await seen.until(lambda r: len(r.ups()) == 2)
        assert [event[:2] for event in seen.events] == [("up", old.peer), ("down", old.peer), ("up", new.peer)] or [
            event[:2] for event in seen.events
        ] == [("up", old.peer), ("up", new.peer), ("down", old.peer)]
        assert seen.downs() == [(old.peer, DownReason.REPLACED)]
        await seen_old.until(lambda r: bool(r.downs()))
        assert seen_old.downs() == [(head.peer, DownReason.REPLACED)]
        assert head.peers() == [new.peer]
        with pytest.raises(HandshakeRefused, match="fenced"):
            await old.connect(head.endpoint, timeout_s=WAIT_S)

    world.run(scenario)


def test_another_cluster_is_refused_with_both_names(world: Any) -> None:
    async def scenario(world: Any) -> None:
        a, seen_a = await world.peer("a", cluster="blue")
        b, seen_b = await world.peer("b", cluster="green")
        with pytest.raises(HandshakeRefused, match=r"green.*blue"):
            await a.connect(b.endpoint, timeout_s=WAIT_S)
        assert seen_a.events == seen_b.events == []

    world.run(scenario)


def test_nobody_there_is_a_time_out(world: Any) -> None:
    async def scenario(world: Any) -> None:
        a, seen = await world.peer("a")
        started = asyncio.get_running_loop().time()
        with pytest.raises(LinkTimeout, match=r"0\.3 s"):
            await a.connect(world.endpoint("nobody"), timeout_s=0.3)
        assert 0.25 < asyncio.get_running_loop().time() - started < 1.5
        assert seen.events == []

    world.run(scenario)


def test_connect_waits_for_a_listener_that_starts_later(world: Any) -> None:
    async def scenario(world: Any) -> None:
        a, _ = await world.peer("a")
        connecting = asyncio.ensure_future(a.connect(world.endpoint("late"), timeout_s=WAIT_S))
        await asyncio.sleep(0.1)
        late, _ = await world.peer("late", fixed=True)
        assert await connecting == late.peer

    world.run(scenario)


def test_both_ends_connecting_at_once_get_one_link(world: Any) -> None:
    async def scenario(world: Any) -> None:
        for round_number in range(5):
            a, seen_a = await world.peer(f"a{round_number}")
            b, seen_b = await world.peer(f"b{round_number}")
            dials = [a.connect(b.endpoint, timeout_s=WAIT_S), b.connect(a.endpoint, timeout_s=WAIT_S)]
            assert await asyncio.gather(*dials) == [b.peer, a.peer]
            await asyncio.sleep(0.05)
            assert (seen_a.ups(), seen_b.ups()) == ([b.peer], [a.peer])
            assert seen_a.downs() == seen_b.downs() == []
            assert a.send(b.peer, Lane.MESSAGE, [b"x"]) is SendOutcome.QUEUED
            assert b.send(a.peer, Lane.MESSAGE, [b"y"]) is SendOutcome.QUEUED
            await seen_b.until(lambda r: r.frames(Lane.MESSAGE) == [[b"x"]])
            await seen_a.until(lambda r: r.frames(Lane.MESSAGE) == [[b"y"]])

    world.run(scenario)


def test_many_callers_share_one_dial(world: Any) -> None:
    async def scenario(world: Any) -> None:
        a, seen_a = await world.peer("a")
        b, seen_b = await world.peer("b")
        peers = await asyncio.gather(*[a.connect(b.endpoint, timeout_s=WAIT_S) for _ in range(20)])
        assert peers == [b.peer] * 20
        await seen_b.until(lambda r: bool(r.ups()))
        assert len(seen_a.ups()) == len(seen_b.ups()) == 1

    world.run(scenario)


def test_a_process_does_not_link_to_itself(world: Any) -> None:
    async def scenario(world: Any) -> None:
        a, _ = await world.peer("a")
        with pytest.raises(HandshakeRefused, match="itself"):
            await a.connect(a.endpoint, timeout_s=WAIT_S)

    world.run(scenario)


def test_a_star_of_peers_keeps_every_pair_in_order(world: Any) -> None:
    async def scenario(world: Any) -> None:
        hub, seen = await world.peer("hub")
        spokes = [(await world.peer(f"spoke{n}"))[0] for n in range(6)]
        await asyncio.gather(*[spoke.connect(hub.endpoint, timeout_s=WAIT_S) for spoke in spokes])
        for number in range(300):
            for spoke in spokes:
                assert spoke.send(hub.peer, Lane.MESSAGE, [str(number).encode()]) is SendOutcome.QUEUED
        await seen.until(lambda r: len(r.frames(Lane.MESSAGE)) == 1800)
        for spoke in spokes:
            got = [event[3][0] for event in seen.events if event[0] == "frames" and event[1] == spoke.peer]
            assert got == [str(number).encode() for number in range(300)]

    world.run(scenario)
