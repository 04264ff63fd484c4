"""The ledger that ``headrace bench fleet`` measures rounds on is one that a scheduler could have."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from actors.policies.assigning.latency_table import StepShape
from benchmarks.decisions._live_fleet import LiveFleet
from benchmarks.decisions.fleet import LIVE, live


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
    balancing.handed_out(1.0)
    assert sum(len(numbers) for _, numbers in fleet.moved) == 5 * 4
    for worker, numbers in fleet.moved:
        held = np.sort(fleet.ledger.in_flight(worker))
        assert sorted(numbers.tolist()) == held[-4:].tolist(), "the last in line, each from who holds it"


def test_of_what_runs_those_with_the_fewest_tokens_are_moved_each_from_who_runs_it() -> None:
    """The first sample of each worker was begun before the others; four more run than a worker's plateau."""
    fleet = LiveFleet(4, 16, 4)
    fleet.assign()
    fleet.empty(2)
    fleet.say(ending=0)
    for batch in fleet.ledger.batches.values():
        batch.length[::4] += 50
    fleet.runs(16)
    for worker in fleet.workers.by_name.values():
        for sequences in (8, 16):
            shape = StepShape(sequences, sequences, sequences * 400, prefilled=False)
            for _ in range(200):
                worker.latency.add(0.01 * max(1, sequences / 8), shape, 400)
    fleet.balancing().handed_out(1.0)
    assert {worker for worker, _ in fleet.moved} == {"rollout-2", "rollout-3"}
    for worker, numbers in fleet.moved:
        assert len(fleet.ledger.live(worker, numbers)) == len(numbers) > 0
        assert all(tokens < 50 for tokens in _tokens(fleet, numbers))


def _tokens(fleet: LiveFleet, numbers: np.ndarray) -> list[int]:
    found = [batch.length[np.isin(batch.assignment, numbers)] for batch in fleet.ledger.batches.values()]
    return np.concatenate(found).tolist()


@pytest.mark.long
def test_every_round_is_measured() -> None:
    figures = live(4)
    assert all(figures[name] > 0 for name in (*LIVE, "live_fill_ms"))
    assert figures["live_round_ms"] == max(figures[name] for name in LIVE)


def test_relief_takes_nothing_from_a_worker_that_loads_a_version_and_nothing_twice() -> None:
    fleet = LiveFleet(6, 20, 4)
    fleet.assign()
    fleet.empty(3)
    fleet.say(ending=0)
    fleet.runs(20)
    fleet.workers.by_name["rollout-5"].pulling_version = 1
    balancing = fleet.balancing(relief=True)
    balancing.handed_out(1.0)
    taken = Counter[str]()
    for worker, numbers in fleet.moved:
        taken[worker] += len(numbers)
    assert taken == {"rollout-3": 12, "rollout-4": 12}, "as many as makes those five equally full, of both alike"
    balancing.handed_out(2.0)
    assert {worker for worker, _ in fleet.moved} == {"rollout-3", "rollout-4"}
    numbers = np.concatenate([numbers for _, numbers in fleet.moved])
    assert len(np.unique(numbers)) == len(numbers)
    for worker, ended in fleet.moved:
        assert len(fleet.ledger.live(worker, ended)) == len(ended), "of those that it holds"
