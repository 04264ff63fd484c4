"""Algorithm 1 against looking at every split, and growth that stops where it gains nothing."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.policies.stage_balance import one_centre, resize, should_grow, two_centres

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


def test_of_two_centres_the_slower_side_keeps_all_and_the_faster_what_matches() -> None:
    def time_s(x: int) -> float:
        return 800.0 / x

    fast_gen = two_centres(64, 8, time_s, time_s, unit=8)
    assert (fast_gen.rollout, fast_gen.train, fast_gen.iteration_s) == (8, 8, 100.0)
    fast_train = two_centres(16, 64, lambda x: 2 * time_s(x), time_s, unit=8)
    assert (fast_train.rollout, fast_train.train, fast_train.iteration_s) == (16, 8, 100.0)


def test_the_pool_grows_when_the_gap_is_what_a_unit_gains_and_not_before() -> None:
    """100 s on 32 devices, work that shares out: 8 more gain 20 s."""

    def gen_s(x: int) -> float:
        return 3200.0 / x

    assert not should_grow(119.0, 100.0, rollout=32, unit=8, gen_s=gen_s)
    assert should_grow(120.0, 100.0, rollout=32, unit=8, gen_s=gen_s)


def test_a_unit_that_gains_nothing_is_never_added() -> None:
    assert not should_grow(500.0, 100.0, rollout=32, unit=8, gen_s=lambda x: 100.0)


@pytest.mark.parametrize(("gen", "train", "expected"), [(150.0, 100.0, 40), (110.0, 100.0, 32), (60.0, 100.0, 24)])
def test_the_pool_follows_the_measured_gap_both_ways(gen: float, train: float, expected: int) -> None:
    assert resize(gen, train, rollout=32, unit=8, gen_s=lambda x: 3200.0 / x, most=64) == expected


def test_it_neither_grows_past_the_budget_nor_shrinks_to_nothing() -> None:
    assert resize(900.0, 1.0, rollout=64, unit=8, gen_s=lambda x: 3200.0 / x, most=64) == 64
    assert resize(1.0, 900.0, rollout=8, unit=8, gen_s=lambda x: 3200.0 / x, most=64) == 8


@given(st.floats(50.0, 5000.0), st.floats(50.0, 500.0), st.integers(1, 10))
def test_a_steady_load_is_not_resized_back_and_forth(gen: float, train: float, units: int) -> None:
    """With stages that take what the profile says, the count comes to rest."""
    rollout, seen = units * 8, list[int]()
    for _ in range(40):
        rollout = resize(gen * 8 / rollout, train, rollout=rollout, unit=8, gen_s=lambda x: gen * 8 / x, most=160)
        seen.append(rollout)
    assert len(set(seen[-5:])) == 1
