"""How many remote workers a seeding job is to have: what the trainer has use for, and with prices what is worth it."""

from __future__ import annotations

from typing import Any

from actors.policies.worth_having import STEPS
from supervisors.jobs.capacity_target import CapacityTarget, Prices, prices_of
from supervisors.machine.nodes import Node
from transport.address import ActorAddress, PeerId

NOBODY = ActorAddress("", PeerId("", 0))


def row(step: int, target: int, **changes: Any) -> dict[str, Any]:
    """Two engines beside a trainer that takes 10 s; 100 engine seconds of generation."""
    measured = {"seconds": 20.0, "trainer_idle_fraction": 0.5, "seeding_engine_s": 100.0}
    return {"step": step, "seeding_target": target} | measured | changes


def aims(*rows: dict[str, Any], prices: Prices | None = None) -> list[int]:
    told: list[int] = []
    target = CapacityTarget(told.append, lambda *_, **__: None, 2, lambda: prices)
    for one in rows:
        target.hear(one)
    return told


def steps(target: int, **changes: Any) -> list[dict[str, Any]]:
    return [row(step, target, **changes) for step in range(STEPS)]


def test_without_prices_it_is_the_greatest_target_of_the_last_steps() -> None:
    assert aims(*steps(7)) == [7]
    assert aims(row(0, 7), row(1, 9), row(2, 5), row(3, 5)) == [9]
    assert aims(row(0, 7), row(1, 5)) == [], "too few to know"
    assert aims({"message": "hello"}, *steps(7)) == [7]


def test_machines_that_cost_more_than_the_time_they_save_are_not_kept() -> None:
    """(100 + 2 · 10) / (2 + n) seconds a step: at n = 10 training is the slower stage."""
    assert aims(*steps(10), prices=Prices(reserved=10.0, worker=0.1)) == [10]
    assert aims(*steps(10), prices=Prices(reserved=1.0, worker=10.0)) == [0]
    assert aims(*steps(4), prices=Prices(reserved=10.0, worker=0.1)) == [4], "prices only lower it"


def test_a_step_of_which_nothing_was_measured_says_nothing_of_prices() -> None:
    dear = Prices(reserved=1.0, worker=10.0)
    assert aims(*steps(6, seeding_engine_s=0.0), prices=dear) == [6]
    assert aims(*steps(6, trainer_idle_fraction=1.0), prices=dear) == [6]


def test_the_price_of_machines_that_have_gone_is_remembered() -> None:
    told: list[int] = []
    known: list[Prices | None] = [Prices(1.0, 10.0), None, None]
    target = CapacityTarget(told.append, lambda *_, **__: None, 2, lambda: known.pop(0))
    for one in steps(10):
        target.hear(one)
    assert told == [0]


def test_a_worker_costs_its_part_of_the_dearest_machine_that_comes_and_goes() -> None:
    nodes = [
        Node("head", NOBODY, slots=2, local=True),
        Node("a", NOBODY, slots=4, local=False, kind="spot"),
        Node("b", NOBODY, slots=2, local=False, kind="spot"),
    ]
    assert prices_of(nodes, {"reserved": 8.0, "spot": 2.0}) == Prices(reserved=8.0, worker=1.0)
    assert prices_of(nodes[:1], {"reserved": 8.0, "spot": 2.0}) is None
    assert prices_of(nodes, {}) is None
