"""Whose turn it is, by table and over drawn arrivals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.sampling.turns import TurnChoice, TurnView, next_turn

LIMIT_S = 2.0
GOES_ON, CLOSED = TurnChoice(admits=True), TurnChoice(admits=False)


@pytest.mark.parametrize(
    ("asking", "runs", "began_s", "expected"),
    [
        ({}, False, 0.0, GOES_ON),
        ({0: 9.0}, True, 0.0, GOES_ON),
        ({1: 9.0}, True, 0.0, GOES_ON),
        ({1: 7.0}, True, 0.0, CLOSED),
        ({1: 7.0}, True, 9.0, GOES_ON),
        ({1: 9.0}, False, 0.0, TurnChoice(load=1)),
        ({0: 9.0, 1: 9.0}, False, 0.0, GOES_ON),
        ({0: 9.0, 1: 7.0}, False, 0.0, TurnChoice(load=1)),
        ({0: 1.0, 2: 7.0, 1: 6.0}, False, 0.0, TurnChoice(load=1)),
        ({0: 1.0, 2: 6.0, 1: 6.0}, False, 0.0, TurnChoice(load=1)),
    ],
)
def test_a_turn_goes_on_until_others_have_waited_too_long_or_nothing_is_left(
    asking: dict[int, float], runs: bool, began_s: float, expected: TurnChoice
) -> None:
    """Snapshot 0 is loaded, and it is 10 seconds past zero."""
    assert next_turn(TurnView(0, began_s, runs, True, asking), LIMIT_S, 10.0) == expected


def test_a_turn_serves_something_before_it_is_closed_however_long_others_have_waited() -> None:
    assert next_turn(TurnView(0, 0.0, False, False, {0: 1.0, 1: 0.5}), 0.0, 10.0) == GOES_ON
    assert next_turn(TurnView(0, 0.0, False, False, {1: 0.5}), 0.0, 10.0) == TurnChoice(load=1)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 30)), min_size=1, max_size=60),
    st.integers(1, 5),
    st.sampled_from([0.0, 0.5, 3.0]),
)
def test_each_request_is_served_after_one_turn_at_most_of_each_snapshot_that_asked_before(
    arrivals: list[tuple[int, int]], work_s: int, limit_s: float
) -> None:
    """Arrivals of (snapshot, second); each takes ``work_s`` once it is admitted, however many run."""
    waiting = sorted((since, snapshot) for snapshot, since in arrivals)
    present, began, free_at, now, has_served, loads = 0, 0, 0, 0, False, 0
    while waiting:
        asking = {snapshot: float(since) for since, snapshot in reversed(waiting) if since <= now}
        choice = next_turn(TurnView(present, began, free_at > now, has_served, asking), limit_s, now)
        if choice.load is not None:
            assert free_at <= now
            present, began, has_served, loads = choice.load, now, False, loads + 1
            assert loads <= len(arrivals), "each turn serves something"
            continue
        served = [one for one in waiting if choice.admits and one[0] <= now and one[1] == present]
        for since, _ in served:
            assert now - since <= 5 * (limit_s + 1 + work_s)
        waiting = [one for one in waiting if one not in served]
        free_at, has_served = (now + work_s, True) if served else (free_at, has_served)
        now += 1
