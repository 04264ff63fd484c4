"""The seeding window, its memory and the capacity target: RLBoost's Algorithm 1."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.policies.seeding.offload import Offload, OffloadRules, StepReport, after_step, first, window_s

RULES = OffloadRules(local_engines=4)
OVERLAPPING = OffloadRules(local_engines=4, overlapping=True)


def report(n: float = 2, after: int | None = None, **times: float) -> StepReport:
    known = {"train_idle_s": 0.0, "remote_idle_s": 0.0, "train_s": 400.0, "remote_s": 500.0} | times
    return StepReport(remote_mean=n, remote_next=int(n) if after is None else after, **known)


def test_the_window_grows_by_a_third_of_the_trainers_wait_and_shrinks_by_a_third_of_the_workers() -> None:
    assert after_step(RULES, first(RULES), report(train_idle_s=90)).seed_s == 150 + 30
    assert after_step(RULES, first(RULES), report(remote_idle_s=90)).seed_s == 150 - 30
    assert after_step(RULES, first(RULES), report(train_idle_s=60, remote_idle_s=60)).seed_s == 150


def test_the_window_never_falls_below_its_floor() -> None:
    assert after_step(RULES, first(RULES), report(remote_idle_s=9000)).seed_s == RULES.floor_s


def test_a_window_is_remembered_only_under_a_number_of_workers_that_was_stable() -> None:
    assert after_step(RULES, first(RULES), report(2, train_idle_s=30)).memory == {2: 160}
    assert after_step(RULES, first(RULES), report(1.6, after=2, train_idle_s=30)).memory == {}
    assert after_step(RULES, first(RULES), report(2, after=1, train_idle_s=30)).memory == {}


def test_when_a_number_of_workers_comes_back_so_does_its_window() -> None:
    two = after_step(RULES, first(RULES), report(2, train_idle_s=300))
    assert two.seed_s == 250
    one = after_step(RULES, two, report(1.5, after=1))
    assert one.seed_s == 250, "nothing is known of one worker yet"
    again = after_step(RULES, Offload(400, one.target, one.memory), report(1.5, after=2))
    assert again.seed_s == 250


def test_a_loss_after_the_last_report_is_met_with_the_window_of_those_who_are_left() -> None:
    known = Offload(5, 6, {6: 5.0, 1: 340.0})
    assert window_s(RULES, known, 1) == 340
    assert window_s(RULES, known, 2) == 5, "nothing is known of two"


def test_the_rule_goes_on_from_the_window_that_the_step_was_given() -> None:
    known = Offload(5, 6, {6: 5.0, 1: 340.0})
    given = window_s(RULES, known, 1)
    assert after_step(RULES, known, report(1, train_idle_s=30, seed_s=given)).memory == {6: 5.0, 1: 350}


def test_a_window_that_was_over_early_is_where_the_rule_goes_on_unless_steps_overlap() -> None:
    """There the next step began with what had been generated of it, so an early end says nothing of the next window."""
    early = report(lasted_s=40.0)
    assert after_step(RULES, first(RULES), early).seed_s == 40
    assert after_step(OVERLAPPING, first(RULES), early).seed_s == 150


def test_where_steps_overlap_an_early_end_was_long_enough_and_idle_workers_shorten_it_all_the_same() -> None:
    waited, idle = report(lasted_s=40.0, train_idle_s=90), report(lasted_s=40.0, remote_idle_s=90)
    assert after_step(OVERLAPPING, first(RULES), waited).seed_s == 150
    assert after_step(OVERLAPPING, first(RULES), idle).seed_s == 120
    in_time = report(seed_s=100.0, lasted_s=100.0, train_idle_s=90)
    assert after_step(OVERLAPPING, first(RULES), in_time).seed_s == 130


def test_the_target_counts_what_local_engines_have_generated_and_not_what_they_might_have() -> None:
    now = Offload(seed_s=212, target=4)
    done = after_step(OVERLAPPING, now, report(2, train_s=411, remote_s=400, lasted_s=0.0))
    assert done.target == 2, "800 / 411; with the window of 212 s it would be 5"


def test_the_target_is_what_generates_everything_while_the_trainer_trains_rounded_up() -> None:
    """With the reference's figures of 14B: 2150 engine-seconds of work, 411 s of training."""
    now = Offload(seed_s=212, target=4)
    done = after_step(RULES, now, report(2, train_s=411, remote_s=(2150 - 4 * 212) / 2))
    assert done.target == 6, "2150 / 411 is 5.23"


def test_without_remote_workers_the_window_has_no_end_and_nothing_is_learned() -> None:
    assert window_s(RULES, first(RULES), 0) == math.inf
    assert window_s(RULES, first(RULES), 2) == RULES.first_s
    known = Offload(200, 5, {3: 120.0})
    assert after_step(RULES, known, report(0, after=0, train_idle_s=500)) == known
    assert after_step(RULES, known, report(0, after=3, train_idle_s=500)).seed_s == 120


@given(
    seed_s=st.floats(5, 1000),
    n=st.integers(1, 8),
    after=st.integers(0, 8),
    idle=st.tuples(st.floats(0, 2000), st.floats(0, 2000)),
    remote_s=st.floats(0, 3000),
)
def test_whatever_is_measured_the_window_stays_above_its_floor_and_the_target_at_one_or_more(
    seed_s: float, n: int, after: int, idle: tuple[float, float], remote_s: float
) -> None:
    done = after_step(
        RULES,
        Offload(seed_s, 4),
        report(n, after=after, train_idle_s=idle[0], remote_idle_s=idle[1], remote_s=remote_s),
    )
    assert done.seed_s >= RULES.floor_s
    assert done.target >= 1
    assert (idle[0] > idle[1]) <= (done.seed_s >= seed_s), "the window moves towards balance"


def test_a_fixed_amount_of_work_converges_to_the_window_that_conserves_it() -> None:
    """n (T + t) + 4 T = W: a step's waits follow from the window, and the rule finds the window of the equation."""
    work_s, train_s, n = 2150.0, 420.0, 2
    now = first(RULES)
    for _ in range(60):
        remote_s = max(0.0, work_s - 4 * now.seed_s) / n
        step_s = max(remote_s, now.seed_s + train_s)
        now = after_step(
            RULES, now,
            report(n, train_idle_s=step_s - now.seed_s - train_s, remote_idle_s=step_s - remote_s, train_s=train_s,
                   remote_s=remote_s),
        )  # fmt: skip
    assert now.seed_s == pytest.approx((work_s - n * train_s) / (n + 4), abs=1)


def test_a_window_that_outlasted_what_it_was_given_says_nothing_of_how_many_workers_there_should_be() -> None:
    """The trainer's engines stood in for workers that did not serve yet: their time is no measure of the work."""
    known = after_step(RULES, first(RULES), report(2))
    assert after_step(RULES, known, report(2, lasted_s=known.seed_s + 500)).target == known.target
    assert after_step(RULES, known, report(2, lasted_s=known.seed_s, remote_s=900.0)).target > known.target
