"""Whose turn it is among several sources: even shares, in any stretch, known at any ordinal at once."""

from __future__ import annotations

from collections import Counter

import pytest

from configs.data_mix import Mix

WEIGHTS = [[1.0], [1.0, 1.0], [0.7, 0.3], [5.0, 2.0, 1.0, 0.25], [1e-3, 1.0, 1e3]]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_what_is_computed_of_the_prompts_before_one_is_what_counting_them_gives(weights: list[float]) -> None:
    mix, counted = Mix(weights, 7), [0] * len(weights)
    for ordinal in range(3000):
        assert mix.before(ordinal) == counted
        counted[mix.source_of(ordinal)] += 1


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("seed", range(5))
def test_every_stretch_has_each_source_by_its_weight_up_to_a_few(weights: list[float], seed: int) -> None:
    mix, total = Mix(weights, seed), sum(weights)
    for begin in (0, 17, 10**12):
        for length in (32, 500):
            drawn = Counter(mix.source_of(begin + i) for i in range(length))
            for source, weight in enumerate(weights):
                assert abs(drawn[source] - length * weight / total) < 4


def test_seeds_begin_elsewhere_and_equal_seeds_alike() -> None:
    def first(seed: int) -> list[int]:
        mix = Mix([2.0, 1.0, 1.0], seed)
        return [mix.source_of(ordinal) for ordinal in range(64)]

    assert first(1) == first(1)
    assert len({tuple(first(seed)) for seed in range(8)}) > 4


def test_a_run_goes_on_at_a_late_ordinal_at_once() -> None:
    assert sum(Mix([3.0, 1.0], 0).before(10**15)) == 10**15  # one by one they would take weeks
