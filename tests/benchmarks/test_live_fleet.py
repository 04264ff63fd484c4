"""The ledger that ``headrace bench fleet`` measures rounds on is one that a scheduler could have."""

from __future__ import annotations

import pytest

from benchmarks._live_fleet import LiveFleet
from benchmarks.fleet import LIVE, live


@pytest.mark.parametrize("ranking", ["none", "siblings", "learned"])
def test_what_ends_is_replaced_by_as_much_of_the_next_step(ranking: str) -> None:
    fleet = LiveFleet(10, 8, 4, ranking=ranking)
    assert fleet.assign() == 80
    fleet.issue()
    assert fleet.assign() == 0, "nobody has room"
    fleet.say(ending=7)
    assert fleet.assign() == 7
    held = [(worker.in_flight, len(fleet.ledger.in_flight(name))) for name, worker in fleet.workers.by_name.items()]
    assert held == [(8, 8)] * 10


def test_balancing_moves_what_waits_to_workers_that_have_just_come() -> None:
    fleet = LiveFleet(10, 8, 4)
    fleet.assign()
    fleet.runs(4)
    fleet.empty(5)
    balancing = fleet.balancing()
    balancing.look(1.0)
    assert sum(len(move.numbers) for move in balancing._moves) == 5 * 4


def test_every_round_is_measured() -> None:
    figures = live(4)
    assert all(figures[name] > 0 for name in (*LIVE, "live_fill_ms"))
    assert figures["live_round_ms"] == max(figures[name] for name in LIVE)
