"""Machines are kept: how many, when a new one is asked for, and what is said of it, under virtual time."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from configs.limits import Limits
from configs.run_files import MACHINES
from supervisors.providers.base import BookedProvider
from supervisors.providers.keeper import Keeper
from supervisors.providers.ownership import Ownership
from supervisors.providers.provider import How
from supervisors.tree.errors import ProviderError
from transport.sim.loop import SimulatedLoop

LIMITS = Limits(
    stop_timeout_s=5.0, machine_retry_s=10.0, machine_retry_max_s=35.0, restart_window_s=60.0, machine_join_s=100.0
)


class Cluster(BookedProvider):
    """Machines are rows of a list, and run at once. Those that are told to go need a second."""

    _close_window_s = 5.0

    def __init__(self) -> None:
        super().__init__()
        self.said: list[tuple[int, str, str]] = []
        self.refuses = ""

    async def open(self) -> None: ...

    def _say(self, what: str, node: str) -> None:
        self.said.append((round(asyncio.get_running_loop().time()), what, node))

    def _begin(self, node: str, kind: str) -> None:
        if self.refuses:
            self._say("refuse", node)
            raise ProviderError(self.refuses)
        self._say("start", node)
        asyncio.get_running_loop().call_soon(self._up, node)

    def _tell_to_go(self, node: str) -> None:
        self._say("go", node)
        asyncio.get_running_loop().call_later(1.0, lambda: node in self.running and self._ended(node))

    def _take_away(self, node: str) -> None:
        if node in self.running:
            self._ended(node, words="its log ends: hello")

    def end(self, node: str, how: How, words: str = "") -> None:
        self._ended(node, how, words)


class Kept:
    """A keeper of a cluster, and what it told. ``join``: whether machines that run join the head."""

    def __init__(self, target: int, *, join: bool = True) -> None:
        self.cluster, self.told = Cluster(), list[str]()
        numbers = itertools.count(1)
        self.keeper = Keeper(
            self.cluster,
            lambda: f"m{next(numbers)}",
            "spot",
            target=target,
            window_s=9.0,
            limits=LIMITS,
            tell=self.told.append,
        )
        runs = self.cluster.on_runs

        def joins(node: str) -> None:
            runs(node)
            self.keeper.joined(self.running)

        if join:
            self.cluster.on_runs = joins
        self.keeper.begin()

    @property
    def running(self) -> list[str]:
        return sorted(self.cluster.running)

    def tries(self) -> list[int]:
        """When something was started or refused."""
        return [at_s for at_s, what, _ in self.cluster.said if what != "go"]


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    loop = SimulatedLoop(0)
    try:
        loop.run_until_complete(work())
    finally:
        loop.dismantle()


def test_as_many_as_the_aim_says_and_those_in_use_are_given_back_last() -> None:
    async def main() -> None:
        kept = Kept(2)
        assert kept.running == ["m1", "m2"]
        kept.keeper.aim(4)
        assert kept.running == ["m1", "m2", "m3", "m4"]
        kept.keeper.aim(1, keep=["m3"])
        assert [row for row in kept.cluster.said if row[1] == "go"] == [(0, "go", node) for node in ("m1", "m2", "m4")]
        kept.keeper.aim(2, keep=["m3"])
        assert kept.running == ["m1", "m2", "m3", "m4", "m5"], "one that leaves is not counted and does not come back"
        await asyncio.sleep(2)
        assert kept.running == ["m3", "m5"]
        assert (kept.keeper.returned, kept.keeper.failed) == (3, 0)

    run(main)


def test_what_the_cluster_takes_back_is_replaced_at_once_under_another_name_and_its_words_are_told() -> None:
    async def main() -> None:
        kept = Kept(2)
        await asyncio.sleep(15)
        kept.cluster.end("m1", "taken", "preempted by job 77")
        assert kept.running == ["m2", "m3"]
        assert kept.tries() == [0, 0, 15]
        assert kept.told[0] == "m1: preempted by job 77"

    run(main)


def test_after_failures_it_waits_longer_and_longer_and_starts_afresh_after_a_long_life() -> None:
    async def main() -> None:
        kept = Kept(2)
        for _ in range(4):
            for node in kept.running:
                kept.cluster.end(node, "failed", "image not found")
            kept.keeper.aim(2)
            assert not kept.running, "a pause is kept, also if the aim is said again"
            before = len(kept.cluster.said)
            while len(kept.cluster.said) == before:
                await asyncio.sleep(0.5)
        gaps = [b - a for a, b in itertools.pairwise(sorted(set(kept.tries())))]
        for gap, nominal in zip(gaps, [10, 20, 35, 35], strict=True):
            assert 0.75 * nominal <= gap <= 1.25 * nominal, "two that end at the same time are one failure"
        assert [line for line in kept.told if "failed (image not found)" in line] == [
            line for line in kept.told if "is tried in" in line
        ]
        await asyncio.sleep(LIMITS.restart_window_s)
        kept.cluster.end(kept.running[0], "failed", "out of memory")
        assert "is tried in" in kept.told[-1]
        await asyncio.sleep(12.5)
        assert len(kept.running) == 2

    run(main)


def test_a_cluster_that_takes_each_machine_back_at_once_is_asked_ever_more_seldom() -> None:
    """As a node with too little disk does, which evicts whatever comes."""

    async def main() -> None:
        kept = Kept(1)
        for _ in range(60):
            for node in kept.running:
                kept.cluster.end(node, "taken", "Evicted: the node was low on resource")
            await asyncio.sleep(2)
        assert len(kept.tries()) <= 6
        assert "low on resource" in kept.told[1]
        assert kept.keeper.taken == kept.keeper.failed == len(kept.tries())

    run(main)


def test_a_machine_that_runs_and_never_joins_is_ended_with_a_sentence_and_the_next_ones_come_ever_more_seldom() -> None:
    async def main() -> None:
        kept = Kept(1, join=False)
        await asyncio.sleep(LIMITS.machine_join_s - 1)
        assert kept.running == ["m1"]
        await asyncio.sleep(2)
        assert not kept.running
        said = "m1 failed (it has run for 100 s and not joined the head; its log ends: hello); the next one is tried"
        assert kept.told[-1].startswith(said)
        await asyncio.sleep(1000)
        gaps = [b - a - 100 for a, b in itertools.pairwise(kept.tries())]
        for gap, nominal in zip(gaps, [10, 20, 35, 35, 35, 35], strict=False):
            assert 0.75 * nominal <= gap <= 1.25 * nominal + 1, "so long a life for nothing is none"
        assert kept.keeper.failed >= 6

    run(main)


def test_a_machine_that_the_head_has_is_kept_and_one_that_it_has_no_more_is_ended_after_a_while() -> None:
    """A head that comes back has none at first, until they have found it."""

    async def main() -> None:
        kept = Kept(2)
        await asyncio.sleep(150)
        kept.keeper.joined(())
        await asyncio.sleep(50)
        kept.keeper.joined(["m1", "elsewhere"])
        await asyncio.sleep(49)
        assert kept.running == ["m1", "m2"]
        await asyncio.sleep(2)
        assert kept.running == ["m1"]
        assert "m2 failed (it runs, and the head has missed it for 100 s" in kept.told[-1]
        await asyncio.sleep(14)
        assert kept.running == ["m1", "m3"], "it had lived long"

    run(main)


def test_one_that_waits_in_its_clusters_queue_is_waited_for_and_one_that_is_given_back_is_not_given_up() -> None:
    async def main() -> None:
        kept = Kept(0, join=False)
        up = kept.cluster._up
        kept.cluster._up = lambda node: None  # type: ignore[method-assign]
        kept.keeper.aim(1)
        await asyncio.sleep(1000)
        assert kept.running == ["m1"]
        up("m1")
        await asyncio.sleep(99.5)
        kept.keeper.aim(0)
        await asyncio.sleep(10)
        assert (kept.running, kept.told, kept.keeper.failed) == ([], ["m1 is given back"], 0)

    run(main)


def test_one_that_cannot_be_had_at_all_is_tried_again_with_what_the_cluster_says() -> None:
    async def main() -> None:
        kept = Kept(0)
        kept.cluster.refuses = "quota is full"
        kept.keeper.aim(3)
        assert [what for _, what, _ in kept.cluster.said] == ["refuse"], "no second question within the pause"
        assert "quota is full" in kept.told[-1]
        kept.cluster.refuses = ""
        await asyncio.sleep(12.5)
        assert len(kept.running) == 3

    run(main)


def test_nothing_is_started_once_it_closes() -> None:
    async def main() -> None:
        kept = Kept(3)
        kept.cluster.end("m1", "failed", "broken")
        closing = asyncio.create_task(kept.keeper.close())
        await asyncio.sleep(0.5)
        kept.cluster.end("m2", "taken", "preempted")
        kept.keeper.aim(9)
        await closing
        await asyncio.sleep(100)
        assert not kept.running
        assert [node for _, what, node in kept.cluster.said if what == "start"] == ["m1", "m2", "m3"]

    run(main)


def test_names_and_the_mark_outlive_a_life_of_the_run_but_not_its_copy(tmp_path: Path) -> None:
    first = Ownership("My_Job.v2", tmp_path / "a")
    (tmp_path / "a").mkdir()
    assert [first.next_name(), first.next_name()] == ["my-job-v2-1", "my-job-v2-2"]
    again = Ownership("My_Job.v2", tmp_path / "a")
    assert again.mark == first.mark
    assert again.next_name() == "my-job-v2-3"
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    copied = Ownership("My_Job.v2", tmp_path / "b")
    assert copied.mark != first.mark
    assert copied.next_name() == "my-job-v2-1"
    (tmp_path / "a" / MACHINES).write_text("{")
    assert Ownership("My_Job.v2", tmp_path / "a").mark not in (first.mark, copied.mark)
    with pytest.raises(ProviderError, match="cannot be written"):
        Ownership("x", tmp_path / "gone").next_name()
