"""Growth that stops where it gains nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.policies.stage_balance import resize, should_grow


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
