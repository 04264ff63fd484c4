"""What a combined cluster learns of its own estimates, and in which order it feeds a trainer that waits."""

from __future__ import annotations

from benchmarks.papers.cluster.overlapping.sides import lean_s
from benchmarks.papers.cluster.overlapping.steps import feeding_order


def test_an_estimate_that_is_always_too_high_by_as_much_is_learned() -> None:
    assert lean_s([]) == 0.0
    assert lean_s([40.0]) == 40.0
    assert lean_s([-9.0, 38.0, 40.0, 42.0]) == 40.0, "the newest three"
    assert lean_s([38.0, 42.0, 400.0]) == 42.0, "one step that went another way says nothing of the next"


def test_the_trainer_is_fed_with_what_gives_most_training_for_its_tokens() -> None:
    assert feeding_order({0: 100.0, 1: 10.0, 2: 50.0}, {0: 10.0, 1: 2.0, 2: 1.0}) == [1, 0, 2]
