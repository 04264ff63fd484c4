"""A pool without parts is a fixed number of workers; a part hears everything, and nobody has to know of its kind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from supervisors.pool.make_pool import make_pool
from supervisors.pool.node_workers import NodeWorkers
from supervisors.pool.pool import Pool, PoolPart
from supervisors.pool.resizing import Resizing
from supervisors.pool.slot_shares import WHOLE
from supervisors.tree.child_record import SupervisionEvent
from tests.smallest_job import smallest_job

EVENT = SupervisionEvent("started", "rollout.j", "rollout-0", 0.0)


class FakeRollout:
    """Workers that are there at once."""

    def __init__(self, *there: str) -> None:
        self.there = list(there)
        self.begun = True
        self.nodes = dict.fromkeys(there, "head")

    def names(self) -> set[str]:
        return set(self.there)

    def on(self, node: str) -> list[str]:
        return [name for name in self.there if self.nodes[name] == node]

    def specs(self, number: int) -> list[str]:
        return [f"rollout-{number}"]

    def start(self, specs: list[str]) -> None:
        self.there += specs

    async def drain(self, name: str) -> bool:
        if name not in self.there:
            return False
        self.there.remove(name)
        return True

    def child_event(self, event: SupervisionEvent) -> None:
        assert event is EVENT


class Noting(PoolPart):
    """Notes what it hears. Its worker is not counted by ``scale``."""

    def __init__(self, name: str, heard: list[str]) -> None:
        self._name, self._heard = name, heard
        self.billed_s = {name: 2.0}

    @property
    def workers(self) -> list[str]:
        return ["rollout-far"]

    def starting(self) -> None:
        self._heard.append(f"{self._name} starting")

    def ready(self) -> None:
        self._heard.append(f"{self._name} ready")

    def stop(self) -> None:
        self._heard.append(f"{self._name} stop")

    def ended(self) -> None:
        self._heard.append(f"{self._name} ended")

    def child_event(self, event: SupervisionEvent) -> None:
        self._heard.append(f"{self._name} {event.kind}")

    def take_bill(self) -> dict[str, float]:
        return {f"{self._name}_s": 1.0}

    def trainer_waits(self) -> tuple[str, float]:
        return ("a node", 3.0) if self._name == "b" else ("", 0.0)


def pool_of(rollout: FakeRollout, said: list[dict[str, Any]], wanted: int = 2) -> Pool:
    news: Any = SimpleNamespace(say=lambda **fields: said.append(fields))
    workers: Any = rollout
    return Pool(workers, news, wanted)


async def test_a_pool_without_parts_is_a_fixed_number_of_workers_that_operators_scale() -> None:
    said: list[dict[str, Any]] = []
    rollout = FakeRollout()
    pool = pool_of(rollout, said)
    assert pool.starting() == ["rollout-0", "rollout-1"]
    rollout.start(["rollout-0", "rollout-1"])
    pool.ready()
    await pool.scale(3)
    assert sorted(rollout.there) == ["rollout-0", "rollout-1", "rollout-2"]
    await pool.scale(1)
    assert rollout.there == ["rollout-0"]
    assert said == [{"workers": 3}, {"workers": 1}]
    assert (pool.take_bill(), pool.billed_s, pool.trainer_waits()) == ({}, {}, ("", 0.0))
    pool.stop()
    pool.ended()


async def test_before_the_workers_are_started_a_number_is_only_noted() -> None:
    said: list[dict[str, Any]] = []
    rollout = FakeRollout()
    rollout.begun = False
    pool = pool_of(rollout, said)
    await pool.scale(3)
    assert (pool.workers_wanted, rollout.there, said) == (3, [], [])
    assert len(pool.starting()) == 3


async def test_workers_move_off_a_node_and_their_number_is_kept() -> None:
    rollout = FakeRollout("rollout-0", "rollout-1")
    rollout.nodes["rollout-1"] = "other"
    pool = pool_of(rollout, [])
    assert await pool.drain_node("other") == 1
    assert sorted(rollout.there) == ["rollout-0", "rollout-1"]
    assert await pool.drain_worker("nobody") is False


async def test_parts_hear_everything_in_their_order_and_stop_in_the_reverse_one() -> None:
    heard: list[str] = []
    rollout = FakeRollout("rollout-0", "rollout-far")
    pool = pool_of(rollout, [])
    pool.add([Noting("a", heard), Noting("b", heard)])
    pool.starting()
    pool.ready()
    pool.child_event(EVENT)
    pool.stop()
    pool.ended()
    said = ["starting", "ready", "started", "stop", "ended"]
    assert heard == [f"{part} {what}" for what in said for part in ("ba" if what == "stop" else "ab")]
    assert pool.take_bill() == {"a_s": 1.0, "b_s": 1.0}
    assert pool.billed_s == {"a": 2.0, "b": 2.0}
    assert pool.trainer_waits() == ("a node", 3.0)
    await pool.scale(0)
    assert rollout.there == ["rollout-far"], "the workers of a part are its own matter"


def parts_of(**sections: Any) -> list[type[PoolPart]]:
    nothing: Any = None
    pool = make_pool(
        smallest_job(**sections), nothing, nothing, nothing, wanted=1, share=WHOLE, functions="", machines="",
        trainer_runs=nothing, restart_trainer=nothing, now=lambda: 0.0,
    )  # fmt: skip
    return [type(part) for part in pool._parts]


def test_a_job_gets_the_parts_that_it_asks_for() -> None:
    assert parts_of() == []
    elastic, balanced = {"place_rollout": "elastic"}, {"workers_max": 4}
    assert parts_of(cluster=elastic) == [NodeWorkers]
    assert parts_of(scheduling=balanced) == [Resizing]
    assert parts_of(cluster=elastic, scheduling=balanced) == [NodeWorkers, Resizing]
    assert parts_of(scheduling={**balanced, "policy": "planned"}) == []
