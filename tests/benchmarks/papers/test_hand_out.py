"""RLBoost's capped join-shortest-queue, over engines of the combined cluster."""

from __future__ import annotations

from actors.policies.assigning.generation_time import Instance
from benchmarks.papers.cluster.costs import DecodePace
from benchmarks.papers.cluster.moving_engine import MovingEngine, Sample
from benchmarks.papers.cluster.overlapping.hand_out import shortest
from benchmarks.papers.cluster.overlapping.pool import Engine


def engine(pending: int, running: int = 0) -> Engine:
    one = MovingEngine("e", Instance(DecodePace(1.0, 0.5, 0.1, 0.2, 0.01), places=64))
    one.pending.extend(Sample(i, i, 10, 100) for i in range(pending))
    one.running.update({i: Sample(i, i, 10, 100) for i in range(100, 100 + running)})
    return Engine(one, local=False, version=0)


def test_a_sample_joins_the_shortest_queue_and_among_equals_the_engine_that_runs_least() -> None:
    three, one, two = engine(3), engine(1), engine(2)
    assert shortest([three, one, two], cap=8) is one
    full, empty = engine(1, 60), engine(1, 10)
    assert shortest([full, empty], cap=8) is empty


def test_a_sample_is_held_back_while_every_queue_has_reached_the_cap() -> None:
    assert shortest([engine(8), engine(9)], cap=8) is None
    assert shortest([], cap=8) is None
    almost = engine(7)
    assert shortest([engine(8), almost], cap=8) is almost
