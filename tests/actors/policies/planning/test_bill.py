"""Bills by the life, and by what was decoded; and when the next lives begin."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.policies.planning.bill import BilledLife, BillingRule, bill, compute_only
from actors.policies.planning.prewarm import Prewarm, PrewarmView, decide

SPANS = st.lists(
    st.tuples(st.floats(0, 1e6), st.floats(0, 1e4), st.floats(0, 1), st.floats(0, 1)).map(
        lambda s: BilledLife(s[0], s[0] + s[1], asleep_s=s[1] * s[2], works_s=s[1] * (1 - s[2]) * s[3])
    ),
    max_size=8,
)


def test_a_life_is_charged_from_its_order_to_its_end_rounded_up_and_less_while_asleep() -> None:
    lives = [BilledLife(10.0, 14.2, asleep_s=2.0, works_s=1.5), BilledLife(20.0, 23.0, works_s=3.0)]
    assert bill(lives, BillingRule()) == pytest.approx(7.2)
    assert bill(lives, BillingRule(rounding_s=1.0)) == pytest.approx(5 + 3)
    assert bill(lives, BillingRule(rounding_s=1.0, asleep_price=0.1)) == pytest.approx(8 - 0.9 * 2)
    assert compute_only(lives) == pytest.approx(4.5)


def test_a_whole_number_of_units_is_not_rounded_up_for_its_last_bit() -> None:
    assert BillingRule(rounding_s=0.1).rounded(0.1 + 0.2) == pytest.approx(0.3)


@given(SPANS, st.floats(0, 60), st.floats(0, 1))
def test_the_bill_is_at_least_what_was_decoded_and_rounding_adds_less_than_a_unit_a_life(
    lives: list[BilledLife], rounding_s: float, asleep_price: float
) -> None:
    exact = bill(lives, BillingRule(0.0, asleep_price))
    assert exact >= compute_only(lives) * (1 - 1e-9) - 1e-6
    rounded = bill(lives, BillingRule(rounding_s, asleep_price))
    assert exact - 1e-4 <= rounded <= exact + rounding_s * len(lives) + 1e-4


def view(**more: object) -> PrewarmView:
    values = {
        "ended_s": 100.0,
        "gaps_s": [30.0, 20.0],
        "starts_s": [4.0, 6.0],
        "buffer_s": 0.5,
        "wanted": 5,
        "ready": 2,
    }
    return PrewarmView(**{**values, **more})  # pyright: ignore[reportArgumentType]


def test_starts_are_ordered_so_that_the_slowest_is_ready_at_the_earliest_plan() -> None:
    assert decide(view(), now=100.0) == Prewarm(100 + 20 - 6 - 0.5, 3)


def test_a_start_that_is_late_already_is_ordered_now() -> None:
    assert decide(view(starts_s=[60.0]), now=101.0) == Prewarm(101.0, 3)


def test_nothing_is_ordered_that_is_there_or_of_which_nothing_has_been_measured() -> None:
    assert decide(view(ready=5), now=100.0) is None
    assert decide(view(gaps_s=[]), now=100.0) is None
    assert decide(view(starts_s=[]), now=100.0) is None
