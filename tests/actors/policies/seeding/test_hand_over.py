"""When machines that train hand over, and how many others are worth their price: small cases by hand."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest

from actors.policies.seeding.hand_over import (
    HandOverView,
    Left,
    left_tokens,
    should_return,
    should_train,
    wait_s,
    waited_s,
)
from actors.policies.seeding.worth_having import StepCost, decide, settled


@dataclass(frozen=True)
class Steady:
    def step_s(self, batch: float, context_tokens: float) -> float:
        return 1.0


VIEW = HandOverView(
    ready_s=5.0,
    running=[Left(10.0, 0, 20.0), Left(30.0, 1, 20.0)],
    queued=[],
    train_s={0: 15.0, 1: 5.0},
    workers=1,
    places=2,
    cache_tokens=100.0,
    pace=Steady(),
)


def test_the_wait_is_the_worst_lag_of_a_group_behind_the_training_before_it() -> None:
    assert wait_s(VIEW) == pytest.approx(10.0)  # group 0 comes 5 s late, group 1 10 s
    assert wait_s(replace(VIEW, ready_s=25.0)) == pytest.approx(-10.0)


def test_it_hands_over_once_it_would_not_wait() -> None:
    assert not should_train(VIEW)
    assert not should_train(replace(VIEW, ready_s=14.9))
    assert should_train(replace(VIEW, ready_s=15.0))


def test_who_has_outlived_what_was_expected_needs_a_tenth_more_and_nobody_more_than_is_allowed() -> None:
    assert left_tokens(expected=100, has=40, longest=1000) == 60
    assert left_tokens(expected=100, has=95, longest=1000) == 10
    assert left_tokens(expected=100, has=300, longest=1000) == 30
    assert left_tokens(expected=2000, has=300, longest=1000) == 700
    assert left_tokens(expected=100, has=1000, longest=1000) == 1, "it has not ended: one more at least"


def test_what_was_waited_is_reckoned_as_what_is_expected() -> None:
    """The two groups of the view end after 10 s and 30 s, as the estimate has it: 5 s and 10 s late."""
    assert waited_s(5.0, [(10.0, 15.0), (30.0, 5.0)]) == pytest.approx(10.0)
    assert waited_s(25.0, [(30.0, 5.0), (10.0, 15.0)]) == pytest.approx(-10.0)


def test_what_need_not_wait_for_a_group_is_done_while_the_group_is_not_whole() -> None:
    """A group of two: one sample ends after 10 s, one after 30 s; of the 15 s of training of each, 5 need no group."""
    whole = replace(VIEW, running=[Left(10.0, 0, 20.0), Left(30.0, 0, 20.0)], train_s={0: 30.0}, ready_s=10.0)
    early = replace(whole, running=[one._replace(early_s=5.0) for one in whole.running], train_s={0: 20.0})
    assert wait_s(whole) == pytest.approx(20.0)
    assert wait_s(early) == pytest.approx(15.0)


def test_with_nobody_else_it_generates_until_nothing_is_left() -> None:
    alone = replace(VIEW, workers=0)
    assert wait_s(alone) == math.inf
    assert should_train(replace(alone, running=[], train_s={}))


def test_what_waits_begins_when_a_place_and_cache_are_free_and_other_steps_take_room_too() -> None:
    queued = replace(VIEW, queued=[Left(10.0, 2, 20.0)], train_s={0: 0.0, 1: 0.0, 2: 0.0}, ready_s=0.0)
    assert wait_s(queued) == pytest.approx(30.0)  # begins at 10 s, ends at 20 s, and the running one at 30 s
    blocked = replace(queued, running=[Left(50.0, -1, 90.0)], train_s={2: 0.0})
    assert wait_s(blocked) == pytest.approx(60.0)


def test_a_dry_trainer_goes_back_where_its_own_engines_shorten_its_wait_by_much() -> None:
    """Two wait for the one place: the last comes after 30 s, and after 20 s with an engine more."""
    waiting = [Left(10.0, 0, 20.0), Left(10.0, 1, 20.0), Left(10.0, 2, 20.0)]
    dry = replace(
        VIEW, ready_s=0.0, running=waiting[:1], queued=waiting[1:], places=1, train_s=dict.fromkeys(range(3), 0.0)
    )
    assert not should_return(dry, switch_s=0.0), "nobody is there to help"
    helped = replace(dry, helpers=1)
    assert should_return(helped, switch_s=1.6)  # 10 s less, against three times there and back
    assert not should_return(helped, switch_s=1.7)
    assert not should_return(replace(helped, ready_s=35.0), switch_s=0.0), "it has more to do than it takes"
    assert should_return(replace(helped, ready_s=25.0), switch_s=0.8)  # without help it waits for 5 s
    assert not should_return(replace(helped, ready_s=25.0), switch_s=0.9), "it cannot wait for less than no time"


def test_a_dry_trainer_does_not_go_back_for_a_tail_whose_steps_take_as_long_with_fewer() -> None:
    dry = replace(VIEW, ready_s=0.0, running=[Left(1e6, 0, 20.0)] * 8, train_s={0: 1.0}, helpers=8)
    assert wait_s(dry) == pytest.approx(1e6)
    assert not should_return(dry, switch_s=0.0)


@dataclass(frozen=True)
class Shared:
    """A step takes a second for each of its samples."""

    def step_s(self, batch: float, context_tokens: float) -> float:
        return batch


def test_a_dry_trainer_goes_back_for_what_runs_if_that_is_faster_with_fewer_beside_it() -> None:
    """Two of 10 tokens take 20 s on one engine, and 10 s on two."""
    dry = replace(VIEW, ready_s=0.0, running=[Left(10.0, 0, 20.0)] * 2, train_s={0: 1.0}, helpers=1, pace=Shared())
    assert should_return(dry, switch_s=1.6)
    assert not should_return(dry, switch_s=1.7)


def test_a_dry_trainers_own_engines_need_not_wait_until_others_have_begun() -> None:
    loading = replace(VIEW, ready_s=0.0, running=[], queued=[Left(10.0, 0, 20.0)], train_s={0: 1.0}, begin_s=600.0)
    assert not should_return(loading, switch_s=1.0)
    assert should_return(replace(loading, helpers=1), switch_s=99.0)


def test_where_samples_of_later_steps_wait_a_dry_trainer_goes_back_for_all_of_its_wait() -> None:
    """30 s for a tail that nobody can shorten."""
    dry = replace(VIEW, ready_s=0.0, running=[Left(30.0, 0, 20.0)], train_s={0: 1.0}, helpers=1)
    assert not should_return(dry, switch_s=0.0)
    ahead = replace(dry, more_waits=True)
    assert should_return(ahead, switch_s=4.9)
    assert not should_return(ahead, switch_s=5.1)
    assert not should_return(replace(ahead, helpers=0), switch_s=0.0), "it has no engines"


def test_a_dry_trainer_goes_back_where_nobody_else_is_left() -> None:
    assert should_return(replace(VIEW, workers=0, ready_s=0.1, helpers=1), switch_s=100.0)


def test_machines_are_taken_as_long_as_they_make_a_step_cheaper() -> None:
    step = StepCost(generate_s=100.0, train_s=20.0, local_engines=4, reserved_price=10.0, machine_price=0.5)
    assert decide(step, 20) == 5  # five generate in 20 s what is needed; a sixth would only cost
    assert decide(step, 3) == 3
    assert decide(replace(step, machine_price=100.0), 20) == 0


def test_one_step_that_would_do_with_fewer_machines_ends_none() -> None:
    assert settled([5, 4]) is None, "too few to know"
    assert settled([5, 2, 3]) == 5
    assert settled([2, 3, 3]) == 3


def test_more_machines_than_generate_everything_while_the_trainer_trains_are_of_no_use() -> None:
    step = StepCost(generate_s=101.0, train_s=20.0, local_engines=4, reserved_price=10.0, machine_price=0.0)
    assert step.useful() == 6
    assert step.seconds(5) > step.seconds(6) == step.seconds(60) == 20.0


def test_a_job_whose_machines_cost_nothing_still_has_some() -> None:
    step = StepCost(generate_s=100.0, train_s=10.0, local_engines=0, reserved_price=0.0, machine_price=0.0)
    assert decide(step, 20) == 20
    assert decide(replace(step, machine_price=1.0), 20) > 0
