"""Links that misbehave on order keep the transport's contract, and end their misbehaviour by themselves."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from configs.limits import DEFAULT_LIMITS, Limits
from tests.contracts.transport_worlds import Recorder
from tests.simulated import run_simulated
from transport.address import PeerId
from transport.errors import LinkTimeout
from transport.link_faults import FaultableTransport, LinkRule, Misbehaviour
from transport.memory_transport import MemoryNetwork, MemoryTransport
from transport.transport import DownReason, Frame, Lane, SendOutcome
from transport.zmq.transport import ZmqTransport

BREAKS_AFTER_S = DEFAULT_LIMITS.heartbeat_timeout_s


class Memory(MemoryTransport):
    """The memory network loses and repeats nothing by itself."""

    def send_again(self, peer: PeerId, lane: Lane, frames: Sequence[Frame]) -> SendOutcome:
        return SendOutcome.QUEUED


class Pair:
    """Two linked peers on the virtual-time loop."""

    def __init__(self) -> None:
        self.network = MemoryNetwork()
        self.seen = {name: Recorder() for name in "ab"}
        self.ends = {
            name: FaultableTransport(Memory(self.network, PeerId(name, 1)), limits=DEFAULT_LIMITS) for name in "ab"
        }

    async def start(self) -> None:
        for name, end in self.ends.items():
            await end.start(self.seen[name])
        await self.ends["a"].connect("memory://b", timeout_s=1)
        await self.seen["b"].until(lambda r: bool(r.ups()))

    def rule(self, kind: Misbehaviour, *, lasts_s: float | None = None, both: bool = False, **fields: Any) -> None:
        for name in "ab" if both else "a":
            self.ends[name].add(LinkRule(kind, **fields), lasts_s=lasts_s)

    def send(self, *texts: str, lane: Lane = Lane.MESSAGE) -> list[SendOutcome]:
        return [self.ends["a"].send(PeerId("b", 1), lane, [text.encode()]) for text in texts]

    def arrived(self, lane: Lane = Lane.MESSAGE) -> list[str]:
        return [frames[0].decode() for frames in self.seen["b"].frames(lane)]

    def downs(self) -> list[list[DownReason]]:
        return [[reason for _, reason in self.seen[name].downs()] for name in "ab"]


def play(scenario: Callable[[Pair], Awaitable[None]]) -> None:
    async def main() -> None:
        pair = Pair()
        await pair.start()
        await scenario(pair)

    run_simulated(main())


def test_a_short_partition_delays_and_loses_nothing() -> None:
    async def scenario(pair: Pair) -> None:
        pair.send("1")
        await asyncio.sleep(0.1)
        pair.rule(Misbehaviour.PARTITION, both=True, lasts_s=BREAKS_AFTER_S / 2)
        pair.send("2", "3")
        await asyncio.sleep(BREAKS_AFTER_S / 4)
        assert pair.arrived() == ["1"]
        await asyncio.sleep(BREAKS_AFTER_S / 2)
        pair.send("4")
        await asyncio.sleep(2 * BREAKS_AFTER_S)
        assert pair.arrived() == ["1", "2", "3", "4"]
        assert pair.downs() == [[], []]
        assert pair.ends["a"]._idle and pair.ends["b"]._idle

    play(scenario)


def test_what_was_under_way_when_the_cut_came_is_held_too() -> None:
    async def scenario(pair: Pair) -> None:
        pair.ends["b"].add(LinkRule(Misbehaviour.PARTITION), lasts_s=0.5)
        pair.send("1", "2")
        await asyncio.sleep(0.4)
        assert pair.arrived() == []
        await asyncio.sleep(0.2)
        assert pair.arrived() == ["1", "2"]

    play(scenario)


def test_a_long_partition_is_unreachable_at_both_ends_and_nobody_comes_through_until_it_heals() -> None:
    async def scenario(pair: Pair) -> None:
        pair.rule(Misbehaviour.PARTITION, both=True, lasts_s=6.0)
        await asyncio.sleep(BREAKS_AFTER_S + 0.1)
        assert pair.downs() == [[DownReason.UNREACHABLE], [DownReason.UNREACHABLE]]
        assert pair.send("lost") == [SendOutcome.NO_LINK]
        with pytest.raises(LinkTimeout):
            await pair.ends["a"].connect("memory://b", timeout_s=1)
        assert pair.ends["a"].peers() == pair.ends["b"].peers() == []
        assert len(pair.seen["b"].ups()) == 1, "an attempt is not to be heard of"
        await asyncio.sleep(6)
        await pair.ends["a"].connect("memory://b", timeout_s=1)
        pair.send("again")
        await asyncio.sleep(0.1)
        assert pair.arrived() == ["again"]

    play(scenario)


def test_a_partition_cuts_off_the_named_peers_only() -> None:
    async def scenario(pair: Pair) -> None:
        pair.rule(Misbehaviour.PARTITION, peers=frozenset({"c"}))
        pair.send("1")
        await asyncio.sleep(2 * BREAKS_AFTER_S)
        assert (pair.arrived(), pair.downs()) == (["1"], [[], []])

    play(scenario)


def test_a_dropped_message_breaks_the_link_at_the_next_one() -> None:
    async def scenario(pair: Pair) -> None:
        pair.send("1")
        pair.rule(Misbehaviour.DROP, lasts_s=0.01)
        assert pair.send("2") == [SendOutcome.QUEUED]
        await asyncio.sleep(0.1)
        assert pair.send("3") == [SendOutcome.NO_LINK]
        await asyncio.sleep(0.1)
        assert pair.arrived() == ["1"]
        assert pair.downs() == [[DownReason.UNREACHABLE], [DownReason.UNREACHABLE]]

    play(scenario)


def test_a_dropped_message_that_nothing_follows_breaks_the_link_by_the_heartbeat() -> None:
    async def scenario(pair: Pair) -> None:
        pair.rule(Misbehaviour.DROP, lane=Lane.SIGNAL)
        pair.send("kept")
        pair.send("dropped", lane=Lane.SIGNAL)
        await asyncio.sleep(BREAKS_AFTER_S - 0.1)
        assert pair.downs() == [[], []]
        await asyncio.sleep(0.2)
        assert pair.downs() == [[DownReason.UNREACHABLE], [DownReason.UNREACHABLE]]
        assert pair.arrived() == ["kept"]

    play(scenario)


def test_delayed_messages_are_late_and_in_order() -> None:
    async def scenario(pair: Pair) -> None:
        pair.rule(Misbehaviour.DELAY, delay_s=0.5, jitter_s=0.3, lasts_s=0.2)
        pair.send(*(str(n) for n in range(20)))
        await asyncio.sleep(0.4)
        pair.send("after the rule")
        assert pair.arrived() == []
        await asyncio.sleep(1)
        assert pair.arrived() == [*(str(n) for n in range(20)), "after the rule"]
        assert pair.ends["a"]._idle

    play(scenario)


def test_messages_behind_a_delayed_one_wait_for_it() -> None:
    async def scenario(pair: Pair) -> None:
        pair.rule(Misbehaviour.DELAY, probability=0.2, delay_s=0.05)
        for number in range(100):
            pair.send(str(number))
            await asyncio.sleep(0.001)
        assert 0 < len(pair.arrived()) < 100
        await asyncio.sleep(1)
        assert pair.arrived() == [str(number) for number in range(100)]

    play(scenario)


@pytest.mark.parametrize("kind", [Misbehaviour.DELAY, Misbehaviour.PARTITION])
def test_what_is_held_back_is_bounded(kind: Misbehaviour) -> None:
    async def scenario(pair: Pair) -> None:
        pair.rule(kind, delay_s=5)
        outcomes = pair.send(*(str(n) for n in range(DEFAULT_LIMITS.signal_queue_frames + 1)), lane=Lane.SIGNAL)
        assert outcomes.count(SendOutcome.QUEUED) == DEFAULT_LIMITS.signal_queue_frames
        assert outcomes[-1] is SendOutcome.FULL

    play(scenario)


def test_a_part_of_the_messages_is_hit_and_equal_seeds_hit_the_same() -> None:
    hits: list[list[str]] = []

    async def scenario(pair: Pair) -> None:
        pair.rule(Misbehaviour.CORRUPT, lane=Lane.BULK, probability=0.3)
        pair.send(*("x" * 20 for _ in range(12)), lane=Lane.BULK)
        await asyncio.sleep(0.1)
        hits.append([frames[0].hex() for frames in pair.seen["b"].frames(Lane.BULK)])

    play(scenario)
    play(scenario)
    assert hits[0] == hits[1]
    assert 0 < sum(text != "78" * 20 for text in hits[0]) < 12


def test_only_what_a_hash_protects_may_be_corrupted() -> None:
    async def scenario(pair: Pair) -> None:
        for lane in (None, Lane.MESSAGE, Lane.SIGNAL):
            with pytest.raises(ValueError, match="only the bulk lane"):
                pair.ends["a"].add(LinkRule(Misbehaviour.CORRUPT, lane=lane))

    play(scenario)


async def test_a_repeated_message_is_noticed_by_the_receiver() -> None:
    """Over ZeroMQ, whose links number their messages."""
    limits = Limits()
    with tempfile.TemporaryDirectory(prefix="hr-") as directory:
        ends: list[FaultableTransport] = []
        seen = [Recorder(), Recorder()]
        for name, recorder in zip("ab", seen, strict=True):
            listen = f"ipc://{Path(directory) / name}"
            inner = ZmqTransport(PeerId(name, 1), listen=listen, cluster="test", limits=limits)
            ends.append(FaultableTransport(inner, limits=limits))
            await ends[-1].start(recorder)
        a, b = ends
        try:
            await a.connect(b.endpoint, timeout_s=5)
            a.add(LinkRule(Misbehaviour.DUPLICATE))
            for number in range(5):
                a.send(b.peer, Lane.MESSAGE, [str(number).encode()])
            await seen[1].until(lambda r: len(r.frames(Lane.MESSAGE)) == 5)
            await asyncio.sleep(0.05)
            assert [frames[0] for frames in seen[1].frames(Lane.MESSAGE)] == [b"0", b"1", b"2", b"3", b"4"]
            inner_b: Any = b.inner
            assert inner_b.counters.duplicates == 5
        finally:
            for end in ends:
                await end.close(timeout_s=0.5)
