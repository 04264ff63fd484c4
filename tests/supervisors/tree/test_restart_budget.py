"""The exit-cause table, the budget's window and the backoff."""

import random

import pytest

from supervisors.tree.restart_budget import (
    Backoff,
    BackoffPolicy,
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
