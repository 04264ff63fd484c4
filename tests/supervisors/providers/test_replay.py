"""A trace on a provider: who is started, told to go and taken away, under virtual time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine
from typing import Any

import pytest

from benchmarks.papers.trace_generator import Market, generate
from supervisors.providers.base import BookedProvider
from supervisors.providers.replay import Replay
from supervisors.providers.traces import Trace, TraceEvent, in_order
from supervisors.tree.errors import ProviderError
from transport.sim.loop import SimulatedLoop


class Recorded(BookedProvider):
    """Machines are rows of a list. Those that are told to go need a second."""

    _close_window_s = 5.0

    def __init__(self) -> None:
        super().__init__()
        self.said: list[tuple[float, str, str]] = []
        self.cannot: set[str] = set()

    def _say(self, what: str, node: str) -> None:
        self.said.append((round(asyncio.get_running_loop().time(), 3), what, node))

    def _begin(self, node: str, kind: str) -> None:
        if node in self.cannot:
            raise ProviderError(f"{node} cannot be had")
        self._say("start", node)

    def _tell_to_go(self, node: str) -> None:
        self._say("go", node)
        asyncio.get_running_loop().call_later(1.0, lambda: node in self.running and self._ended(node))

    def _take_away(self, node: str) -> None:
        if node in self.running:
            self._say("kill", node)
            self._ended(node)


def trace(*rows: tuple[float, str, str]) -> Trace:
    events = [TraceEvent(at_s, node, what) for at_s, what, node in rows]  # type: ignore[arg-type]
    return Trace("test", in_order(events), max(event.at_s for event in events))


def run(work: Coroutine[Any, Any, None]) -> None:
    loop = SimulatedLoop(0)
    try:
        loop.run_until_complete(work)
    finally:
        loop.dismantle()


def test_machines_come_and_go_when_the_trace_says_so() -> None:
    async def main() -> None:
        provider = Recorded()
        replay = Replay(trace((0, "up", "a"), (5, "up", "b"), (8, "notice", "a"), (20, "kill", "a"), (30, "kill", "b")),
                        provider)  # fmt: skip
        await replay.run()
        assert provider.said == [(0, "start", "a"), (5, "start", "b"), (8, "go", "a"), (30, "kill", "b")]
        assert replay.counts() == {"started": 2, "noticed": 1, "killed": 1, "failed": 0, "returned": 0}

    run(main())


def test_a_machine_that_does_not_go_is_taken_away_at_the_end_of_its_notice() -> None:
    async def main() -> None:
        provider = Recorded()
        await Replay(trace((0, "up", "a"), (8, "notice", "a"), (8.5, "kill", "a")), provider).run()
        assert provider.said == [(0, "start", "a"), (8, "go", "a"), (8.5, "kill", "a")]

    run(main())


def test_never_more_machines_than_the_target_and_the_next_one_offered_takes_a_free_place_at_once() -> None:
    async def main() -> None:
        provider = Recorded()
        rows = [(0.0, "up", "a"), (1.0, "up", "b"), (2.0, "up", "c"), (3.0, "up", "d")]
        rows += [(4.0, "kill", "c"), (10.0, "notice", "a"), (20.0, "kill", "a"), (30.0, "kill", "b")]
        replay = Replay(trace(*rows), provider, target=2)
        await replay.run()
        assert provider.said == [
            (0, "start", "a"), (1, "start", "b"), (10, "go", "a"), (10, "start", "d"), (30, "kill", "b"),
        ]  # fmt: skip
        assert replay.counts()["started"] == 3

    run(main())


def test_a_higher_target_takes_what_is_offered_at_once_and_a_lower_one_gives_the_youngest_back_with_notice() -> None:
    async def main() -> None:
        provider = Recorded()
        rows = [(0.0, "up", "a"), (0.0, "up", "b"), (0.0, "up", "c"), (12.0, "notice", "c"), (50.0, "kill", "a")]
        replay = Replay(trace(*rows), provider, target=1, return_window_s=3.0)
        task = asyncio.create_task(replay.run())
        await asyncio.sleep(10)
        replay.aim(3)
        assert sorted(provider.running) == ["a", "b", "c"]
        replay.aim(1)
        await task
        assert provider.said[3:] == [(10, "go", "b"), (10, "go", "c"), (50, "kill", "a")]
        assert replay.counts() == {"started": 3, "noticed": 0, "killed": 1, "failed": 0, "returned": 2}

    run(main())


def test_machines_that_are_in_use_are_given_back_last() -> None:
    async def main() -> None:
        provider = Recorded()
        replay = Replay(trace((0.0, "up", "a"), (0.0, "up", "b"), (0.0, "up", "c"), (50.0, "kill", "b")), provider)
        task = asyncio.create_task(replay.run())
        await asyncio.sleep(10)
        replay.aim(1, keep=["b"])
        await task
        assert {row for row in provider.said[3:] if row[1] == "go"} == {(10, "go", "a"), (10, "go", "c")}

    run(main())


def test_a_machine_that_cannot_be_had_is_counted_and_the_replay_goes_on() -> None:
    async def main() -> None:
        provider = Recorded()
        provider.cannot.add("a")
        replay = Replay(trace((0, "up", "a"), (1, "up", "b"), (9, "kill", "a")), provider)
        await replay.run()
        assert provider.said == [(1, "start", "b")]
        assert replay.counts()["failed"] == 1

    run(main())


def test_one_that_cannot_be_had_leaves_its_place_to_the_next_one_on_offer_until_none_is_left() -> None:
    async def main() -> None:
        provider = Recorded()
        provider.cannot |= {"b", "c", "e"}
        rows = [(0.0, "up", "a"), (1.0, "up", "b"), (2.0, "up", "c"), (3.0, "up", "d"), (4.0, "up", "e")]
        replay = Replay(trace(*rows, (10.0, "kill", "a"), (20.0, "kill", "d")), provider, target=1)
        await replay.run()
        assert provider.said == [(0, "start", "a"), (10, "kill", "a"), (10, "start", "d"), (20, "kill", "d")]
        assert replay.counts() == {"started": 2, "noticed": 0, "killed": 2, "failed": 3, "returned": 0}

    run(main())


def test_a_machine_that_ends_by_itself_leaves_its_place_to_the_next_one_on_offer_at_once() -> None:
    async def main() -> None:
        provider = Recorded()
        provider.cannot.add("b")
        rows = [(0.0, "up", "a"), (0.0, "up", "b"), (0.0, "up", "c"), (0.0, "up", "d"), (50.0, "kill", "c")]
        replay = Replay(trace(*rows), provider, target=1)
        task = asyncio.create_task(replay.run())
        await asyncio.sleep(10)
        provider._ended("a")
        assert provider.said == [(0, "start", "a"), (10, "start", "c")]
        await task
        assert provider.said[2:] == [(50, "kill", "c"), (50, "start", "d")]
        assert replay.counts() == {"started": 3, "noticed": 0, "killed": 1, "failed": 2, "returned": 0}

    run(main())


def test_machines_that_end_as_the_provider_is_closed_are_not_replaced() -> None:
    async def main() -> None:
        provider = Recorded()
        replay = Replay(trace((0.0, "up", "a"), (0.0, "up", "b"), (0.0, "up", "c")), provider, target=2)
        await replay.run()
        closing = asyncio.create_task(provider.close())
        await asyncio.sleep(0.5)
        provider._ended("a")
        await closing
        assert not provider.running
        assert [what for _, what, _ in provider.said] == ["start", "start", "go", "go"]
        assert replay.counts()["failed"] == 0

    run(main())


def noticed(trace: Trace, alive: set[str], now_s: float) -> int:
    """How many of ``alive`` have been told to go."""
    return len({e.node for e in trace.events if e.what == "notice" and e.at_s <= now_s} & alive)


@pytest.mark.parametrize("target", [1, 3, None])
def test_what_the_trace_takes_away_never_runs_on(target: int | None) -> None:
    async def main() -> None:
        provider = Recorded()
        made = generate(Market(nodes_max=5, notice_s=30), 50_000, 2)
        task = asyncio.create_task(Replay(made, provider, target=target).run())
        alive: set[str] = set()
        for at_s, events in itertools.groupby(made.events, key=lambda event: event.at_s):
            await asyncio.sleep(at_s + 0.001 - asyncio.get_running_loop().time())
            for event in events:
                if event.what == "up":
                    alive.add(event.node)
                elif event.what == "kill":
                    alive.discard(event.node)
            assert set(provider.running) <= alive
            assert target is None or len(provider.running) <= target + noticed(made, alive, at_s)
        await task

    run(main())
