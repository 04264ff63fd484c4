"""The exit-cause table, the budget's window and the backoff."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisors.tree.restart_budget import (
    Backoff,
    BackoffPolicy,
    CrashLoop,
    ExitCause,
    RestartBudget,
    RestartPolicy,
    counts,
    is_restarted,
)

P, T, X = RestartPolicy.PERMANENT, RestartPolicy.TRANSIENT, RestartPolicy.TEMPORARY


@pytest.mark.parametrize(
    ("cause", "permanent", "transient", "counted"),
    [
        (ExitCause.COMPLETED, True, False, False),
        (ExitCause.STOPPED, False, False, False),
        (ExitCause.PREEMPTED, True, True, False),
        (ExitCause.CRASHED, True, True, True),
        (ExitCause.KILLED, True, True, True),
        (ExitCause.UNREACHABLE, True, True, True),
    ],
)
def test_each_exit_cause_does_what_the_table_says(cause, permanent, transient, counted):
    assert is_restarted(P, cause) is permanent
    assert is_restarted(T, cause) is transient
    assert not is_restarted(X, cause)
    assert counts(cause) is counted


def test_the_budget_allows_its_maximum_and_refuses_the_next():
    budget = RestartBudget(restarts_max=3, window_s=10)
    assert [budget.spend(ExitCause.CRASHED, float(t)) for t in range(4)] == [True, True, True, False]


def test_exits_leave_the_window_after_its_length():
    budget = RestartBudget(restarts_max=1, window_s=10)
    assert budget.spend(ExitCause.CRASHED, 0.0)
    assert budget.spend(ExitCause.CRASHED, 10.0)
    assert not budget.spend(ExitCause.CRASHED, 19.9)


def test_a_thousand_preemptions_cost_nothing():
    budget = RestartBudget(restarts_max=0, window_s=10)
    assert all(budget.spend(ExitCause.PREEMPTED, 0.001 * t) for t in range(1000))


def test_the_loss_of_a_node_counts_once_for_all_its_children():
    budget = RestartBudget(restarts_max=1, window_s=10)
    assert all(budget.spend(ExitCause.UNREACHABLE, 1.0, node="a") for _ in range(8))
    assert budget.spent(1.0) == 1
    assert not budget.spend(ExitCause.UNREACHABLE, 2.0, node="b")


def test_the_backoff_doubles_up_to_its_bound_and_stays_within_the_jitter():
    policy = BackoffPolicy(first_s=0.1, max_s=2.0, quiet_s=60.0, jitter=0.2)
    rng = random.Random(7)
    for failures, base_s in enumerate([0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0], start=1):
        for _ in range(50):
            assert base_s * 0.8 <= policy.delay_s(failures, rng) <= base_s * 1.2
    assert policy.delay_s(10_000, rng) <= 2.4


def test_children_that_fail_together_do_not_start_again_together():
    policy = BackoffPolicy(first_s=1.0, max_s=64.0, quiet_s=60.0, jitter=0.2)
    delays_s = [policy.delay_s(1, random.Random(seed)) for seed in range(50)]
    assert max(delays_s) - min(delays_s) > 0.2


def test_the_backoff_starts_anew_after_a_quiet_life_and_skips_preemptions():
    backoff = Backoff(BackoffPolicy(first_s=1.0, max_s=64.0, jitter=0.0, quiet_s=60.0))
    rng = random.Random(1)
    assert backoff.after(ExitCause.CRASHED, lived_s=1, rng=rng) == 1.0
    assert backoff.after(ExitCause.PREEMPTED, lived_s=1, rng=rng) == 0.0
    assert backoff.after(ExitCause.CRASHED, lived_s=1, rng=rng) == 2.0
    assert backoff.after(ExitCause.KILLED, lived_s=61, rng=rng) == 1.0


def test_equal_generators_give_equal_delays():
    policy = BackoffPolicy(first_s=0.1, max_s=9.0, quiet_s=60.0)
    one, two = random.Random(3), random.Random(3)
    assert [policy.delay_s(n, one) for n in range(1, 9)] == [policy.delay_s(n, two) for n in range(1, 9)]


OWN = [ExitCause.CRASHED, ExitCause.KILLED]
FREE = [cause for cause in ExitCause if cause not in OWN]


def crash_loop() -> CrashLoop:
    return CrashLoop(restarts_max=3, healthy_s=60.0, lives_max=7)


@given(st.lists(st.tuples(st.sampled_from(OWN), st.floats(0, 1e6)), min_size=8, max_size=20))
def test_every_crash_loop_ends_however_long_its_lives_are(lives):
    loop = crash_loop()
    verdicts = [loop.ended(cause, lived_s=lived_s) for cause, lived_s in lives]
    assert False in verdicts


@given(st.lists(st.tuples(st.sampled_from(OWN), st.floats(0, 59.9)), min_size=4, max_size=8))
def test_short_lives_in_a_row_are_a_loop_after_as_many_as_the_budget_has(lives):
    loop = crash_loop()
    assert [loop.ended(cause, lived_s=lived_s) for cause, lived_s in lives[:4]] == [True, True, True, False]


@given(st.lists(st.tuples(st.sampled_from(FREE), st.floats(0, 1e6)), max_size=100))
def test_what_is_not_the_childs_own_end_never_makes_a_loop_nor_ends_one(ends):
    loop = crash_loop()
    assert all(loop.ended(cause, lived_s=lived_s) for cause, lived_s in ends)
    for _ in range(3):
        assert loop.ended(ExitCause.CRASHED, lived_s=0.0)
    assert all(loop.ended(cause, lived_s=lived_s) for cause, lived_s in ends)
    assert not loop.ended(ExitCause.CRASHED, lived_s=0.0)


@given(st.lists(st.lists(st.tuples(st.sampled_from(OWN), st.floats(0, 1e6)), max_size=3), max_size=30))
def test_a_run_that_commits_a_step_now_and_then_is_never_given_up_as_a_loop(between_steps):
    loop = crash_loop()
    for lives in between_steps:
        assert all(loop.ended(cause, lived_s=lived_s) for cause, lived_s in lives)
        loop.progressed()


@given(st.integers(0, 20), st.integers(0, 30))
def test_a_loop_never_ends_a_row_that_the_budget_would_have_allowed_in_its_window(restarts_max, exits):
    """It adds to the budget what lies outside of the window, and is no stricter inside of it."""
    loop = CrashLoop(restarts_max=restarts_max, healthy_s=60.0, lives_max=max(30, restarts_max))
    budget = RestartBudget(restarts_max=restarts_max, window_s=1e9)
    for at_s in range(exits):
        within, no_loop = budget.spend(ExitCause.CRASHED, float(at_s)), loop.ended(ExitCause.CRASHED, lived_s=0.1)
        assert no_loop or not within


def test_numbers_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match="lives_max"):
        CrashLoop(restarts_max=5, healthy_s=1.0, lives_max=4)
