"""The pool passes over a node whose workers crash again and again, also if each takes long to start."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from configs.limits import Limits
from supervisors.jobs.elastic_pool import ElasticPool
from supervisors.machine.nodes import Node
from supervisors.tree.restart_budget import ExitCause
from tests.simulated import run_simulated
from transport.address import ActorAddress, PeerId

LIMITS = Limits(restart_max=3, restart_window_s=60.0, restart_healthy_s=100.0, backoff_first_s=0.1, backoff_max_s=0.2)
NODE = Node("n1", ActorAddress("agent", PeerId("n1", 1)), 1, local=False)


class FakeSupervisor:
    """Takes children and forgets them."""

    def running(self, _: str) -> None:
        return None

    def add_children(self, _: object) -> None:
        return None

    async def remove_child(self, _: str, **__: object) -> None:
        return None


def passed_over_after(start_s: float, lived_s: float, cause: ExitCause, lives: int = 40) -> int | None:
    """The number of the life after which the node is passed over; None: it never is."""
    recorded: list[str] = []

    async def scenario() -> int | None:
        loop = asyncio.get_running_loop()
        nodes: Any = SimpleNamespace(present=[NODE], subscribe=lambda _: lambda: None)
        nothing: Any = None
        pool = ElasticPool(
            nodes, cast(Any, FakeSupervisor()), lambda worker, node: nothing, nothing, lambda _: None,
            lambda name, **_: recorded.append(name), limits=LIMITS, now=loop.time,
        )  # fmt: skip
        pool.start()
        (worker,) = pool.workers
        for life in range(1, lives + 1):
            await asyncio.sleep(start_s)
            if lived_s > 0:
                pool.worker_started(worker)
                await asyncio.sleep(lived_s)
            pool.worker_ended(worker, cause)
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
