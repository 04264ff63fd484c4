"""Slots of machines that come and go, divided among the pools of several jobs: the real pools, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from actors.core.errors import NotSent
from configs.limits import Limits
from supervisors.machine.membership.nodes import Node
from supervisors.pool.node_workers import NodeWorkers
from supervisors.pool.slot_shares import SlotShares
from supervisors.tree.child_record import SupervisionEvent
from supervisors.tree.restart_budget import ExitCause
from tests.simulated import run_simulated
from transport.address import ActorAddress, PeerId

LIMITS = Limits(lending_look_s=5.0, lending_stay_s=20.0, restart_max=1, backoff_first_s=0.1)
LEAVING_S = 2.0


class Workers:
    """Who runs where, over all jobs; a worker takes a while to leave."""

    def __init__(self) -> None:
        self.by_place: dict[str, str] = {}
        self.doubled: list[str] = []
        """Places on which a worker was started beside another one."""

    def of(self, job: str) -> Any:
        there, doubled = self.by_place, self.doubled

        class Fake:
            def runs(self, worker: str) -> bool:
                return there.get(worker) == job

            def specs_on(self, worker: str, _: str) -> str:
                return worker

            def start(self, worker: str) -> None:
                if worker in there:
                    doubled.append(worker)
                there[worker] = job

            async def remove(self, worker: str) -> None:
                if there.get(worker) == job:
                    await asyncio.sleep(LEAVING_S)
                    del there[worker]

            async def drain(self, worker: str, _: float) -> bool:
                await self.remove(worker)
                return True

        return Fake()


class Cluster:
    def __init__(self, slots: int = 6) -> None:
        self.nodes = [Node("n", ActorAddress("agent", PeerId("n", 1)), slots, local=False)]
        self.listeners: list[Callable[[], None]] = []
        self.shares = SlotShares(LIMITS)
        self.workers = Workers()
        self.left: dict[str, float] = {}

    def pool(self, job: str, left: float) -> NodeWorkers:
        self.left[job] = left

        async def remaining() -> float:
            if self.left[job] < 0:
                raise NotSent("nobody is there")
            return self.left[job]

        nodes: Any = SimpleNamespace(usable_by=lambda _: self.nodes, subscribe=lambda _: lambda: None)
        news: Any = SimpleNamespace(record=lambda *_, **__: None)
        pool = NodeWorkers(
            nodes, self.workers.of(job), news, job=job, limits=LIMITS, now=asyncio.get_running_loop().time,
            share=self.shares.of(job, remaining),
        )  # fmt: skip
        pool.ready()
        return pool

    def held(self) -> dict[str, int]:
        jobs = list(self.workers.by_place.values())
        return {job: jobs.count(job) for job in sorted(set(jobs))}


def test_a_job_that_is_alone_has_every_slot_at_once() -> None:
    async def scenario() -> None:
        cluster = Cluster()
        cluster.pool("a", left=0.0)
        assert cluster.held() == {"a": 6}
        cluster.shares.stop()

    run_simulated(scenario())


def test_a_second_job_gets_its_part_when_the_workers_have_left_and_all_when_the_first_has_ended() -> None:
    async def scenario() -> None:
        cluster = Cluster()
        first = cluster.pool("a", left=100.0)
        cluster.pool("b", left=100.0)
        await asyncio.sleep(60.0)
        assert cluster.held() == {"a": 3, "b": 3}
        first.stop()
        for worker in sorted(first.workers):  # as the job's tree does when it is taken down
            assert cluster.workers.by_place[worker] == "a", "nobody takes a slot on which a worker is still ending"
            await asyncio.sleep(LEAVING_S)
            del cluster.workers.by_place[worker]
        assert cluster.held() == {"b": 3}
        first.ended()
        await asyncio.sleep(0.1)
        assert cluster.held() == {"b": 6}
        assert not cluster.workers.doubled
        cluster.shares.stop()

    run_simulated(scenario())


def test_slots_follow_the_work_that_is_left_and_a_job_without_any_keeps_none_that_another_can_use() -> None:
    async def scenario() -> None:
        cluster = Cluster()
        cluster.pool("a", left=100.0)
        cluster.pool("b", left=100.0)
        await asyncio.sleep(60.0)
        cluster.left["a"] = 0.0
        await asyncio.sleep(20.0)
        assert cluster.held() == {"b": 6}
        cluster.left |= {"a": 500.0, "b": 100.0}
        await asyncio.sleep(60.0)
        assert cluster.held() == {"a": 5, "b": 1}
        cluster.left["a"] = -1.0  # its scheduler is away
        await asyncio.sleep(60.0)
        assert cluster.held() == {"a": 5, "b": 1}, "it is taken as it was"
        cluster.shares.stop()

    run_simulated(scenario())


def test_a_job_that_has_been_seen_to_rest_only_shortly_keeps_its_slots_in_the_next_rest() -> None:
    async def scenario() -> None:
        cluster = Cluster()
        cluster.pool("a", left=100.0)
        cluster.pool("b", left=100.0)
        await asyncio.sleep(60.0)
        cluster.left["a"] = 0.0
        await asyncio.sleep(12.0)
        cluster.left["a"] = 100.0
        await asyncio.sleep(100.0)
        assert cluster.held() == {"a": 3, "b": 3}
        cluster.left["a"] = 0.0
        await asyncio.sleep(8.0)
        assert cluster.held() == {"a": 3, "b": 3}, "it will be back before a worker has paid for its way"
        await asyncio.sleep(60.0)
        assert cluster.held() == {"b": 6}, "but it was not"
        cluster.shares.stop()

    run_simulated(scenario())


@pytest.mark.parametrize(("most", "held"), [(2, {"a": 2, "b": 4}), (0, {"b": 6})])
def test_slots_that_a_job_does_not_use_are_for_others(most: int, held: dict[str, int]) -> None:
    async def scenario() -> None:
        cluster = Cluster()
        cluster.pool("a", left=500.0).aim(most)
        cluster.pool("b", left=100.0)
        await asyncio.sleep(60.0)
        assert cluster.held() == held
        cluster.shares.stop()

    run_simulated(scenario())


def test_a_slot_that_a_job_has_given_up_on_goes_to_one_that_can_use_it() -> None:
    async def scenario() -> None:
        cluster = Cluster(slots=1)
        first = cluster.pool("a", left=100.0)
        for _ in range(3):
            cluster.workers.by_place.clear()
            for worker in list(first.workers):
                first.child_event(SupervisionEvent("started", "rollout.a", worker, 0.0))
                first.child_event(SupervisionEvent("ended", "rollout.a", worker, 0.0, ExitCause.CRASHED))
            await asyncio.sleep(5.0)
        cluster.workers.by_place.clear()
        cluster.pool("b", left=1.0)
        await asyncio.sleep(20.0)
        assert cluster.held() == {"b": 1}
        cluster.shares.stop()

    run_simulated(scenario())
