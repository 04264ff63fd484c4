"""Algorithm 1 against looking at every split."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.papers.cluster.splits import one_centre, should_grow

work = st.floats(1.0, 1e4)


@given(work, work, st.floats(0.0, 500.0), st.integers(2, 20), st.sampled_from([1, 4, 8]))
def test_no_split_of_whole_units_is_faster(gen: float, train: float, tail_s: float, units: int, unit: int) -> None:
    def gen_s(x: int) -> float:
        return tail_s + gen / x

    def train_s(y: int) -> float:
        return train / y

    best = one_centre(units * unit, gen_s, train_s, unit=unit)
    assert best.rollout % unit == best.train % unit == 0
    assert best.rollout + best.train == units * unit
    counts = range(unit, units * unit, unit)
    every = [max(gen_s(x), train_s(y)) for x, y in itertools.product(counts, counts) if x + y <= units * unit]
    assert best.iteration_s == pytest.approx(min(every))


def test_equal_splits_leave_more_to_training() -> None:
    assert one_centre(32, lambda x: 100.0, lambda y: 10.0, unit=8).rollout == 8


def test_too_few_devices_for_two_stages_are_refused() -> None:
    with pytest.raises(ValueError, match="two stages of at least 8 devices each; found 8 devices"):
        one_centre(8, lambda x: 1.0, lambda y: 1.0, unit=8)


def test_the_pool_grows_when_the_gap_is_what_a_unit_gains_and_not_before() -> None:
    """100 s on 32 devices, work that shares out: 8 more gain 20 s."""

    def gen_s(x: int) -> float:
        return 3200.0 / x

    assert not should_grow(119.0, 100.0, rollout=32, unit=8, gen_s=gen_s)
    assert should_grow(120.0, 100.0, rollout=32, unit=8, gen_s=gen_s)


def test_a_unit_that_gains_nothing_is_never_added() -> None:
    assert not should_grow(500.0, 100.0, rollout=32, unit=8, gen_s=lambda x: 100.0)
