"""What is learned of a job's steps, and what is predicted of jobs together: small cases by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actors.policies.sharing.job_profile import UNKNOWN, JobProfile, StepUse, observed, predict

REGULAR = JobProfile(9, period_s=100.0, busy_s=30.0, busy_p90_s=30.0)
RANDOM = replace(REGULAR, jitter_s=30.0)


def learned(*steps: StepUse) -> JobProfile:
    profile = UNKNOWN
    for step in steps:
        profile = observed(profile, step)
    return profile


def test_the_newest_step_counts_most_and_the_first_for_all() -> None:
    assert learned(StepUse(100.0, 20.0, burst_at_s=80.0)) == JobProfile(
        1, 100.0, 20.0, 20.0, burst_at_s=80.0, recent_busy_s=(20.0,)
    )
    profile = learned(StepUse(100.0, 20.0), StepUse(200.0, 30.0))
    assert (profile.steps, profile.period_s, profile.busy_s) == (2, pytest.approx(130.0), pytest.approx(23.0))
    assert profile.jitter_s == pytest.approx(45.8, abs=0.1)
    assert profile.duty == pytest.approx(23 / 130)


def test_a_burst_in_ten_may_be_longer_than_the_ninetieth_percentile_and_old_ones_are_forgotten() -> None:
    bursts = [StepUse(100.0, 10.0 + (i % 10 == 9) * 40.0) for i in range(20)]
    assert learned(*bursts).busy_p90_s == 10.0
    assert learned(*bursts, StepUse(100.0, 50.0)).busy_p90_s == 50.0
    assert learned(*bursts, *[StepUse(100.0, 10.0)] * 20).busy_p90_s == 10.0


def test_a_step_that_found_its_state_in_place_says_nothing_of_what_loading_takes() -> None:
    assert learned(StepUse(1.0, 1.0, switch_s=2.0), StepUse(1.0, 1.0)).switch_s == 2.0
    assert learned(StepUse(1.0, 1.0), StepUse(1.0, 1.0, switch_s=2.0)).switch_s == 2.0


def test_alone_nobody_is_slowed() -> None:
    assert predict([], REGULAR).slowdowns == (1.0,)
    assert predict([UNKNOWN], REGULAR).slowdowns == (1.0, 1.0)


def test_regular_jobs_of_one_period_take_turns_and_do_not_meet() -> None:
    together = predict([REGULAR, replace(REGULAR, burst_at_s=30.0)], REGULAR)
    assert together.slowdowns == (1.0, 1.0, 1.0)
    assert 60.0 <= together.burst_at_s % 100.0 <= 70.0


def test_random_ones_meet_by_chance_and_wait_for_half_of_what_they_meet() -> None:
    assert predict([RANDOM], RANDOM).slowdowns == pytest.approx((1.045, 1.045))  # 0.3 · 15 s of 100 s
    off = replace(REGULAR, period_s=110.0, busy_s=33.0, busy_p90_s=33.0)
    assert predict([REGULAR], off).slowdowns == pytest.approx((1.0495, 1.0409), abs=1e-3)


def test_the_state_is_loaded_for_each_burst_where_there_is_no_room_for_both() -> None:
    loaded = replace(REGULAR, switch_s=5.0)
    assert predict([loaded], loaded).slowdowns == (1.05, 1.05)
    assert predict([loaded], loaded, switches=False).slowdowns == (1.0, 1.0)


def test_a_short_step_suffers_most_beside_a_long_burst() -> None:
    long = JobProfile(9, 1000.0, 300.0, 300.0)
    short = JobProfile(9, 20.0, 2.0, 2.0)
    of_long, of_short = predict([long], short).slowdowns
    assert of_long == pytest.approx(1.0, abs=1e-3)
    assert of_short == pytest.approx(1 + 0.3 * 150 / 20)
