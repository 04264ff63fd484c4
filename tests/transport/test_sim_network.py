"""Latency, loss, repeats and partitions keep the transport's promises, and equal seeds give equal histories."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from configs.limits import DEFAULT_LIMITS
from tests.simulated import run_simulated
from transport.address import PeerId
from transport.errors import LinkTimeout
from transport.memory_transport import MemoryTransport
from transport.sim.network import Cut, Disturbance, SimNetwork, Weather
from transport.transport import DownReason, Frame, Lane, SendOutcome

HEARTBEAT_S = DEFAULT_LIMITS.heartbeat_timeout_s
PARTED, PARTED_ONE_WAY = Cut("a".__eq__, "b".__eq__), Cut("a".__eq__, "b".__eq__, one_way=True)


class Log:
    """Everything that a peer hears, with the time."""

    def __init__(self, name: str, log: list[tuple[Any, ...]]) -> None:
        self._name = name
        self._log = log

    def on_frames(self, peer: PeerId, lane: Lane, frames: list[Frame]) -> None:
        self._add("frames", peer.name, int(lane), bytes(frames[0]))

    def on_peer_up(self, peer: PeerId) -> None:
        self._add("up", peer.name)

    def on_peer_down(self, peer: PeerId, reason: DownReason) -> None:
        self._add("down", peer.name, reason.value)

    def _add(self, *event: Any) -> None:
        self._log.append((asyncio.get_running_loop().time(), self._name, *event))


class Pair:
    """Two linked peers, ``a`` and ``b``, and all that they hear."""

    def __init__(self, weather: Weather | None = None, seed: int = 0) -> None:
        self.network = SimNetwork(seed, weather)
        self.log: list[tuple[Any, ...]] = []
        self.a, self.b = (MemoryTransport(self.network, PeerId(name, n)) for n, name in enumerate("ab", 1))

    async def link(self) -> Pair:
        await self.a.start(Log("a", self.log))
        await self.b.start(Log("b", self.log))
        await self.a.connect("memory://b", timeout_s=5)
        await asyncio.sleep(0)
        return self

    def heard(self, name: str, what: str) -> list[Any]:
        return [event[-1] for event in self.log if event[1:3] == (name, what)]

    def send(self, number: int, lane: Lane = Lane.MESSAGE) -> SendOutcome:
        return self.a.send(self.b.peer, lane, [str(number).encode()])


def simulate(pair: Pair, scenario: Callable[[Pair], Coroutine[Any, Any, None]], seed: int = 0) -> Pair:
    async def main() -> None:
        await scenario(await pair.link())

    run_simulated(main(), seed=seed)
    return pair


async def chatter(pair: Pair) -> None:
    for number in range(300):
        pair.send(number)
        pair.b.send(pair.a.peer, Lane.SIGNAL, [str(number).encode()])
        await asyncio.sleep(0.0001)
    await asyncio.sleep(5)


def test_latency_and_bandwidth_take_virtual_time() -> None:
    async def scenario(pair: Pair) -> None:
        started = asyncio.get_running_loop().time()
        pair.a.send(pair.b.peer, Lane.BULK, [bytes(1_000_000)])
        await asyncio.sleep(10)
        assert pair.log[-1][0] - started == pytest.approx(1.0 + 0.25, rel=0.01)

    simulate(Pair(Weather(latency_s=0.25, jitter_s=0, bandwidth_bytes_s=1e6)), scenario)


def test_jitter_reorders_nothing_and_repeats_are_dropped() -> None:
    pair = simulate(Pair(Weather(latency_s=0.001, jitter_s=0.05, duplicate=0.3)), chatter)
    assert pair.heard("b", "frames") == [str(n).encode() for n in range(300)]


@pytest.mark.parametrize("seed", range(5))
def test_equal_seeds_give_equal_histories(seed: int) -> None:
    weather = Weather(jitter_s=0.01, duplicate=0.1, loss=0.002)
    histories = [simulate(Pair(weather, seed), chatter, seed).log for _ in range(2)]
    assert histories[0] == histories[1]
    assert histories[0] != simulate(Pair(weather, seed + 1), chatter, seed).log


@pytest.mark.parametrize("seed", range(10))
def test_a_lost_message_is_never_a_silent_gap(seed: int) -> None:
    pair = simulate(Pair(Weather(loss=0.02), seed), chatter, seed)
    got = pair.heard("b", "frames")
    assert got == [str(n).encode() for n in range(len(got))]
    assert pair.network.lost > 0
    assert pair.heard("a", "down") == pair.heard("b", "down") == ["unreachable"]


def test_a_lost_last_message_is_noticed_by_the_heartbeat() -> None:
    async def scenario(pair: Pair) -> None:
        pair.network.disturb(Disturbance("a".__eq__, "b".__eq__, loss=1.0))
        pair.send(1)
        await asyncio.sleep(HEARTBEAT_S + 0.1)

    assert simulate(Pair(), scenario).heard("b", "down") == ["unreachable"]


def test_a_short_partition_delays_and_a_long_one_is_unreachable_at_both_ends() -> None:
    async def short(pair: Pair) -> None:
        pair.network.cut(PARTED)
        pair.send(1)
        await asyncio.sleep(HEARTBEAT_S / 2)
        assert pair.heard("b", "frames") == []
        pair.network.mend(PARTED)
        await asyncio.sleep(HEARTBEAT_S * 2)
        assert pair.heard("b", "frames") == [b"1"]
        assert pair.heard("b", "down") == []

    async def long(pair: Pair) -> None:
        pair.network.cut(PARTED_ONE_WAY)
        await asyncio.sleep(HEARTBEAT_S + 0.01)
        assert pair.heard("a", "down") == pair.heard("b", "down") == ["unreachable"]
        assert pair.send(1) is SendOutcome.NO_LINK
        with pytest.raises(LinkTimeout):
            await pair.a.connect("memory://b", timeout_s=1)
        pair.network.mend(PARTED_ONE_WAY)
        await pair.a.connect("memory://b", timeout_s=1)
        pair.send(2)
        await asyncio.sleep(1)
        assert pair.heard("b", "frames") == [b"2"]

    simulate(Pair(), short)
    simulate(Pair(), long)


def test_who_stops_behind_a_partition_is_unreachable_and_not_stopped() -> None:
    async def scenario(pair: Pair) -> None:
        pair.network.cut(PARTED)
        await pair.a.close(timeout_s=0.1)
        await asyncio.sleep(5)

    assert simulate(Pair(), scenario).heard("b", "down") == ["unreachable"]
