"""The pool passes over a node whose workers crash again and again, also if each takes long to start."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from actors.policies.pool.sizing import Prices
from configs.limits import Limits
from supervisors.machine.membership.nodes import Node
from supervisors.pool.node_workers import NodeWorkers, prices_of
from supervisors.tree.child_record import SupervisionEvent
from supervisors.tree.restart_budget import ExitCause
from tests.simulated import run_simulated
from transport.address import ActorAddress, PeerId

LIMITS = Limits(restart_max=3, restart_window_s=60.0, restart_healthy_s=100.0, backoff_first_s=0.1, backoff_max_s=0.2)
NODE = Node("n1", ActorAddress("agent", PeerId("n1", 1)), 1, local=False)


class FakeRollout:
    """Takes workers and forgets them."""

    def runs(self, _: str) -> bool:
        return False

    def specs_on(self, worker: str, _: str) -> str:
        return worker

    def start(self, _: object) -> None:
        return None

    async def remove(self, _: str) -> None:
        return None


def event(kind: str, worker: str, cause: ExitCause | None = None) -> SupervisionEvent:
    return SupervisionEvent(kind, "rollout.j", worker, 0.0, cause)


def passed_over_after(start_s: float, lived_s: float, cause: ExitCause, lives: int = 40) -> int | None:
    """The number of the life after which the node is passed over; None: it never is."""
    recorded: list[str] = []

    async def scenario() -> int | None:
        loop = asyncio.get_running_loop()
        nodes: Any = SimpleNamespace(usable_by=lambda _: [NODE], subscribe=lambda _: lambda: None)
        news: Any = SimpleNamespace(record=lambda name, **_: recorded.append(name))
        pool = NodeWorkers(nodes, cast(Any, FakeRollout()), news, job="j", limits=LIMITS, now=loop.time)
        pool.ready()
        (worker,) = pool.workers
        for life in range(1, lives + 1):
            await asyncio.sleep(start_s)
            if lived_s > 0:
                pool.child_event(event("started", worker))
                await asyncio.sleep(lived_s)
            pool.child_event(event("ended", worker, cause))
            if "node_passed_over" in recorded:
                return life
            await asyncio.sleep(1.0)
        pool.stop()
        return None

    return run_simulated(scenario())


@pytest.mark.parametrize("start_s", [0.1, 300.0])
@pytest.mark.parametrize("lived_s", [0.0, 5.0])
def test_a_node_whose_workers_crash_is_passed_over_however_long_they_take_to_start(
    start_s: float, lived_s: float
) -> None:
    assert passed_over_after(start_s, lived_s, ExitCause.CRASHED) == LIMITS.restart_max + 1


def test_a_node_whose_workers_live_long_between_their_crashes_stays() -> None:
    assert passed_over_after(10.0, 200.0, ExitCause.CRASHED) is None


def test_preemptions_pass_nobody_over() -> None:
    assert passed_over_after(0.1, 1.0, ExitCause.PREEMPTED) is None


def test_a_worker_costs_its_part_of_the_dearest_machine_that_comes_and_goes() -> None:
    there = [
        Node("head", NODE.agent, slots=2, local=True),
        Node("a", NODE.agent, slots=4, local=False, kind="spot"),
        Node("b", NODE.agent, slots=2, local=False, kind="spot"),
    ]
    assert prices_of(there, {"reserved": 8.0, "spot": 2.0}) == Prices(reserved=8.0, worker=1.0, present=12.0)
    assert prices_of(there, {}) is None
    assert prices_of(there[:1], {"reserved": 8.0, "spot": 2.0}) is None
