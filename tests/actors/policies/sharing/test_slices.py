"""Who has the next slice of a service: the rules one by one, and what holds for any jobs, played on a small service."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.policies.sharing.fair_share import FairShare
from actors.policies.sharing.slices import Asking, PolicyName, SliceChoice, SliceRules, SliceView, slice_policy

HRRS = SliceRules("hrrs", starvation_s=1000.0, gap_s=2.0)
FIFO = replace(HRRS, policy="fifo")
ROUND_ROBIN = replace(HRRS, policy="round_robin")


def chosen(*asking: Asking, rules: SliceRules = HRRS, now_s: float = 100.0, **view: object) -> SliceChoice:
    return slice_policy(rules)(SliceView(asking, **view), now_s)  # pyright: ignore[reportArgumentType]


# ------------------------------------------------------------ a slice that is under way


def test_a_holder_that_computes_goes_on_and_the_one_to_prefetch_is_known() -> None:
    choice = chosen(Asking("b", 0.0, 1.0), holder="a", resident=["a"])
    assert choice == SliceChoice("a", prefetch="b")


def test_calls_of_the_holder_go_before_all_others_for_as_long_as_its_burst_lasts() -> None:
    waiting = Asking("b", 0.0, 1.0, priority=9)
    assert chosen(waiting, Asking("a", 99.0, 50.0), holder="a", holder_idle_since_s=10.0).run == "a"


def test_a_holder_with_nothing_to_do_yields_after_the_gap_and_it_is_said_when() -> None:
    waiting = Asking("b", 0.0, 1.0)
    assert chosen(waiting, holder="a", holder_idle_since_s=99.5) == SliceChoice("a", "b", look_again_s=1.5)
    assert chosen(waiting, holder="a", holder_idle_since_s=98.0) == SliceChoice("b")
    assert chosen(holder="a", holder_idle_since_s=98.0) == SliceChoice(None)


def test_the_look_that_was_asked_for_finds_the_gap_over_however_the_clock_rounds() -> None:
    for since_s in (0.1, 1e5 + 1 / 3, 1e9 + 0.7):
        first = chosen(Asking("b", 0.0, 1.0), holder="a", holder_idle_since_s=since_s, now_s=since_s + 0.3)
        assert first.look_again_s is not None
        later = chosen(
            Asking("b", 0.0, 1.0), holder="a", holder_idle_since_s=since_s, now_s=since_s + 0.3 + first.look_again_s
        )
        assert later.run == "b"


def test_nobody_runs_where_nobody_asks() -> None:
    assert chosen() == SliceChoice(None)


# ------------------------------------------------------------ who is next


def test_a_short_slice_overtakes_a_long_one_until_that_has_waited_for_long_enough() -> None:
    short, long = Asking("short", 90.0, 5.0), Asking("long", 70.0, 60.0)
    assert chosen(short, long).run == "short"  # 3 against 1.5
    assert chosen(short, replace(long, since_s=-30.0)).run == "long"  # against 3.2


def test_loading_the_state_counts_as_a_part_of_the_slice() -> None:
    assert chosen(Asking("a", 90.0, 5.0, switch_s=5.0), Asking("b", 90.0, 6.0)).run == "b"


def test_a_resident_job_keeps_the_service_until_another_ratio_is_larger_by_the_hysteresis() -> None:
    here, other = Asking("here", 90.0, 10.0), Asking("other", 88.1, 10.0)  # 2 against 2.19, and 2.4 are needed
    assert chosen(here, other, resident=["here"]).run == "here"
    assert chosen(here, replace(other, since_s=85.9), resident=["here"]).run == "other"
    assert chosen(here, other, resident=["here"], rules=replace(HRRS, hysteresis=0.0)).run == "other"


def test_a_higher_priority_goes_first_until_the_guard() -> None:
    high, low = Asking("high", 99.0, 10.0, priority=1), Asking("low", -800.0, 1.0)
    assert chosen(high, low).run == "high"
    assert chosen(high, replace(low, since_s=-895.0)).run == "low", "it would begin after 1,005 s"


def test_who_is_far_ahead_of_its_share_stands_back_for_those_who_are_not() -> None:
    ahead, behind = Asking("ahead", 50.0, 10.0, used_s=121.0), Asking("behind", 99.0, 10.0, used_s=100.0)
    assert chosen(ahead, behind).run == "behind"
    assert chosen(replace(ahead, used_s=120.0), behind).run == "ahead", "two slices are allowed"
    assert chosen(replace(ahead, used_s=215.0, share=2.0), behind).run == "ahead"


def test_the_runner_up_is_prefetched_unless_it_is_resident() -> None:
    a, b, c = Asking("a", 0.0, 1.0), Asking("b", 50.0, 1.0), Asking("c", 90.0, 1.0)
    assert chosen(a, b, c) == SliceChoice("a", prefetch="b")
    assert chosen(a, b, c, resident=["b"]).prefetch is None


def test_a_slice_of_no_length_is_no_trouble() -> None:
    assert chosen(Asking("a", 100.0, 0.0), Asking("b", 100.0, 1.0), now_s=100.0).run == "a"


def test_fifo_runs_the_one_that_has_waited_longest_whatever_else_is_known_of_it() -> None:
    first = Asking("z", 10.0, 1e6, switch_s=1e3, priority=-1, used_s=1e9)
    assert chosen(Asking("a", 11.0, 1.0, priority=5), first, resident=["a"], rules=FIFO).run == "z"


def test_round_robin_goes_by_name_and_begins_anew_after_the_last() -> None:
    asking = [Asking(name, 0.0, 1.0) for name in "cab"]
    assert [chosen(*asking, rules=ROUND_ROBIN, last=last).run for last in (None, "a", "b", "c")] == list("abca")


# ------------------------------------------------------------ a small service


@dataclass(frozen=True)
class Job:
    """It asks for a slice, and for the next one ``think_s`` after that."""

    name: str
    think_s: tuple[float, ...]
    """In turn; 0: it asks again at once."""
    slice_s: tuple[float, ...]
    priority: int = 0
    share: float = 1.0


@dataclass(frozen=True)
class Slice:
    job: str
    asked_s: float
    began_s: float
    ended_s: float
    overtaken: int
    """Jobs that asked before it did, and were still waiting when it began."""

    @property
    def waited_s(self) -> float:
        return self.began_s - self.asked_s


SWITCH_S = 0.5


def play(rules: SliceRules, jobs: Sequence[Job], slices: int = 40) -> list[Slice]:
    """A service with room for the state of one job; estimates are right. Somebody always runs while anybody asks."""
    decide, shares = slice_policy(rules), FairShare()
    turn = {job.name: (itertools.cycle(job.think_s), itertools.cycle(job.slice_s)) for job in jobs}
    asks_s = {job.name: next(turn[job.name][0]) for job in jobs}
    length_s = {job.name: next(turn[job.name][1]) for job in jobs}
    now_s, resident, done = 0.0, "", list[Slice]()
    while len(done) < slices:
        now_s = max(now_s, min(asks_s.values()))
        there = [job for job in jobs if asks_s[job.name] <= now_s]
        for job in jobs:
            (shares.asks if job in there else shares.rests)(job.name)
        asking = [
            Asking(
                job.name,
                asks_s[job.name],
                length_s[job.name],
                0.0 if job.name == resident else SWITCH_S,
                job.priority,
                job.share,
                shares.used_s(job.name, job.share),
            )
            for job in there
        ]
        choice = decide(SliceView(asking, resident={resident}, last=resident), now_s)
        assert decide(SliceView(asking[::-1], resident={resident}, last=resident), now_s) == choice, "order of asking"
        run = next(one for one in asking if one.job == choice.run)
        assert choice.prefetch not in (run.job, resident)
        end_s = now_s + run.slice_s
        older = sum(one.since_s < run.since_s for one in asking)
        done.append(Slice(run.job, run.since_s, now_s, end_s, older))
        shares.charge(run.job, run.slice_s, run.share)
        asks_s[run.job] = end_s + next(turn[run.job][0])
        length_s[run.job] = next(turn[run.job][1])
        now_s, resident = end_s, run.job
    return done


times = st.lists(st.sampled_from([0.0, 0.1, 1.0, 3.0, 20.0]), min_size=1, max_size=3).map(tuple)
lengths = st.lists(st.sampled_from([0.1, 1.0, 4.0, 10.0]), min_size=1, max_size=3).map(tuple)
jobs = st.lists(
    st.builds(Job, st.just(""), times, lengths, st.integers(0, 2), st.sampled_from([0.5, 1.0, 3.0])),
    min_size=1,
    max_size=5,
).map(lambda some: [replace(job, name=f"job-{i}") for i, job in enumerate(some)])


@given(jobs, st.sampled_from([1.0, 15.0, 60.0]), st.sampled_from([0.0, 0.2, 2.0]))
def test_nobody_waits_beyond_the_guard_plus_one_slice_whatever_priorities_and_shares(
    some: list[Job], guard_s: float, hysteresis: float
) -> None:
    """Where one slice of each of the others takes longer than the guard, that is the bound: no order can be better."""
    longest = {job.name: max(job.slice_s) + SWITCH_S for job in some}
    for one in play(replace(HRRS, starvation_s=guard_s, hysteresis=hysteresis), some):
        others_s = sum(slice_s for name, slice_s in longest.items() if name != one.job)
        assert one.waited_s <= max(guard_s, others_s) + max(longest.values())


@given(jobs, st.sampled_from(["hrrs", "fifo", "round_robin"]))
def test_somebody_runs_whenever_somebody_asks_and_equal_views_give_equal_choices(
    some: list[Job], policy: PolicyName
) -> None:
    rules = replace(HRRS, policy=policy)
    done = play(rules, some)
    for before, after in itertools.pairwise(done):
        assert after.began_s == max(before.ended_s, after.asked_s) or after.asked_s < before.ended_s == after.began_s
    assert play(rules, some) == done


@given(jobs)
def test_under_fifo_nobody_is_ever_overtaken(some: list[Job]) -> None:
    assert not any(one.overtaken for one in play(FIFO, some))


@given(jobs)
def test_under_round_robin_nobody_has_two_slices_while_another_waits_for_one(some: list[Job]) -> None:
    done = play(ROUND_ROBIN, some)
    for one in done:
        between = [other.job for other in done if one.asked_s <= other.began_s < one.began_s]
        assert len(between) == len(set(between))


@pytest.mark.parametrize("shares", [(1.0, 1.0), (3.0, 1.0), (1.0, 2.0, 5.0)])
@given(st.data())
@settings(max_examples=20)
def test_jobs_that_always_ask_get_the_service_in_proportion_to_their_shares(
    shares: tuple[float, ...], data: st.DataObject
) -> None:
    """However long their slices are; a guard that holds before shares do is a setting, and here it is far off."""
    some = [Job(f"job-{i}", (0.0,), data.draw(lengths), share=share) for i, share in enumerate(shares)]
    done = play(replace(HRRS, starvation_s=math.inf), some, slices=400)
    used = {job.name: sum(one.ended_s - one.began_s for one in done if one.job == job.name) for job in some}
    longest_s = max(max(job.slice_s) for job in some) + SWITCH_S
    virtual = [used[job.name] / job.share for job in some]
    assert max(virtual) - min(virtual) <= 4 * longest_s / min(shares)


def test_a_job_that_comes_later_is_not_owed_the_time_before_and_one_that_rests_saves_nothing_up() -> None:
    shares = FairShare()
    shares.asks("old")
    shares.charge("old", 1000.0)
    shares.asks("new")
    assert shares.used_s("new") == 1000.0
    shares.rests("new")
    shares.charge("old", 500.0)
    shares.asks("new")
    assert shares.used_s("new") == 1500.0
    shares.charge("new", 10.0, share=2.0)
    assert shares.used_s("new", share=2.0) == 3010.0
    shares.forget("old")
    shares.asks("third")
    assert shares.used_s("third") == 1505.0
