"""Where jobs are put, and why they wait: the rules one by one, and what holds for any jobs and services."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.policies.sharing.job_profile import UNKNOWN, JobProfile
from actors.policies.sharing.placement import decide
from actors.policies.sharing.placement_fit import Lack, is_cold, lack
from actors.policies.sharing.placement_view import (
    JobView,
    PlacementDecision,
    PlacementPolicy,
    PlacementRules,
    PlacementView,
    Quota,
    ServiceView,
)

GB = 1_000_000_000
PACK = PlacementRules("pack")
SPREAD = PlacementRules("spread")
BACKFILL = PlacementRules("spread_backfill")
ISOLATED = PlacementRules("isolated")
POLICIES: list[PlacementPolicy] = ["isolated", "pack", "spread", "spread_backfill"]


def profile(duty: float = 0.2, *, period_s: float = 100.0, jitter: float = 0.3) -> JobProfile:
    busy_s = duty * period_s
    return JobProfile(9, period_s, busy_s, busy_s, jitter * period_s)


def service(number: int = 0, *, memory: float = 4, parked: float = 10, jobs_max: int = 3) -> ServiceView:
    return ServiceView(f"train-{number}", int(memory * GB), int(parked * GB), jobs_max)


def job(name: str, on: int | None = None, *, gb: float = 1, **more: object) -> JobView:
    values: dict[str, object] = {"profile": profile()} | more
    return JobView(name, int(gb * GB), f"train-{on}" if on is not None else None, **values)  # pyright: ignore[reportArgumentType]


def decided(rules: PlacementRules, services: Sequence[ServiceView], *jobs: JobView) -> PlacementDecision:
    return decide(rules, PlacementView(services, jobs))


def where(decision: PlacementDecision) -> dict[str, str]:
    return {one.job: one.service for one in decision.place}


# ------------------------------------------------------------ where


def test_pack_takes_the_fullest_spread_the_quietest_and_isolated_one_that_serves_nobody() -> None:
    services = [service(i) for i in range(3)]
    there = [job("a", 0), job("b", 0, profile=profile(0.05)), job("c", 1, profile=profile(0.3))]
    new = job("new", profile=profile(0.1))
    assert where(decided(PACK, services, *there, new)) == {"new": "train-0"}
    assert where(decided(SPREAD, services, *there, new)) == {"new": "train-2"}
    assert where(decided(SPREAD, services[:2], *there, new)) == {"new": "train-0"}, "0.25 against 0.3"
    assert where(decided(ISOLATED, services, *there, new)) == {"new": "train-2"}
    assert decided(ISOLATED, services[:2], *there, new).wait == {
        "new": "waits for a service that serves nobody, as placement is isolated"
    }


def test_what_is_placed_counts_for_the_next_in_the_same_decision() -> None:
    decision = decided(SPREAD, [service(0), service(1)], job("a"), job("b"), job("c"), job("d"))
    assert where(decision) == {"a": "train-0", "b": "train-1", "c": "train-0", "d": "train-1"}


def test_a_job_without_a_profile_runs_alone_and_nobody_joins_it_until_it_has_one() -> None:
    cold = job("cold", profile=replace(profile(), steps=2))
    assert where(decided(PACK, [service(0), service(1)], job("a", 0), cold)) == {"cold": "train-1"}
    decision = decided(PACK, [service(0)], replace(cold, on="train-0"), job("b"))
    assert decision.wait == {"b": "waits for cold on train-0 to have run 3 steps"}
    assert where(decided(replace(PACK, cold_steps=0), [service(0)], job("a", 0), cold)) == {"cold": "train-0"}


def test_a_job_with_a_profile_makes_room_for_one_without_if_it_has_room_elsewhere() -> None:
    services = [service(0), service(1)]
    decision = decided(SPREAD, services, job("a", 0), job("b", 1), job("cold", profile=UNKNOWN))
    assert [(one.job, one.service) for one in decision.move] == [("a", "train-1")]
    assert decision.wait == {"cold": "waits for train-0, which a leaves"}
    crowded = [job("a", 0, profile=profile(0.5)), job("b", 1, profile=profile(0.5))]
    decision = decided(SPREAD, services, *crowded, job("cold", profile=UNKNOWN))
    assert not decision.move
    assert decision.wait == {"cold": "waits for a service of its own for its first 3 steps"}


def test_a_job_that_names_a_service_goes_there_whatever_its_profile_and_into_no_other() -> None:
    services = [service(0), service(1)]
    named = job("named", named="train-0", profile=UNKNOWN)
    assert where(decided(PACK, services, job("a", 0, profile=profile(0.9)), named)) == {"named": "train-0"}
    full = [job(name, 0) for name in "abc"]
    assert decided(PACK, services, *full, named).wait == {
        "named": "waits for a place on train-0, which serves 3 jobs of 3"
    }


def test_nobody_is_put_beside_a_job_under_which_services_died_nor_that_job_beside_others() -> None:
    alone = job("alone", 0, alone=True)
    decision = decided(PACK, [service(0)], alone, job("b", named="train-0"))
    assert decision.wait == {"b": "waits for a place on train-0, where alone runs alone because services died under it"}
    assert decided(PACK, [service(0)], job("b", 0), replace(alone, on=None)).wait == {
        "alone": "waits for a service of its own, because services died under it"
    }


def test_a_service_that_is_drained_takes_nobody() -> None:
    drained = replace(service(0), draining=True)
    assert where(decided(PACK, [drained, service(1)], job("a"))) == {"a": "train-1"}
    assert decided(PACK, [drained], job("a")).wait == {
        "a": "waits for another service than train-0, which takes no further job"
    }


def test_the_phase_of_a_job_is_the_one_in_which_it_finds_the_service_free() -> None:
    regular = replace(profile(0.3, jitter=0.0), burst_at_s=1000.0)
    decision = decided(PACK, [service(0)], job("a", 0, profile=regular), job("b", profile=regular))
    at_s = decision.place[0].burst_at_s
    assert at_s is not None
    assert 30.0 <= (at_s - 1000.0) % 100.0 <= 70.0


# ------------------------------------------------------------ bounds


def test_what_has_no_room_now_waits_for_the_bytes_that_are_missing() -> None:
    decision = decided(PACK, [service(0)], job("a", 0, gb=4), job("b", 0, gb=3.2), job("c", gb=4))
    assert decision.wait == {"c": "waits for 1.2 GB on train-0"}
    assert not decision.refuse


def test_what_never_has_room_is_refused_with_the_bytes_needed_and_those_there_are() -> None:
    services = [service(0), service(1, memory=8)]
    assert decided(PACK, services, job("big", gb=9)).refuse == {
        "big": "its trained state needs 9 GB, and train-1, the one with most room, has 8 GB: "
        "raise memory_bytes and host_bytes there"
    }
    assert decided(PACK, services, job("big", gb=5, named="train-0")).refuse == {
        "big": "its trained state needs 5 GB, and train-0, the one that suits it, has 4 GB: "
        "raise memory_bytes and host_bytes there"
    }
    assert decided(PACK, services, job("a", named="train-9")).refuse == {"a": "service train-9 is not there"}
    assert decided(PACK, services, job("a", suits=())).refuse == {"a": "no service suits it"}


def test_a_service_takes_nobody_by_whom_it_would_be_too_busy_or_anybody_too_slow() -> None:
    there = job("a", 0, profile=profile(0.5))
    assert decided(PACK, [service(0)], there, job("b", profile=profile(0.35))).wait == {
        "b": "waits for quiet on train-0, which would compute for 85% of the time where 80% are allowed"
    }
    short = profile(0.1, period_s=10.0)
    waits = decided(PACK, [service(0)], there, job("b", profile=short)).wait["b"]
    assert re.fullmatch(
        r"waits for quiet on train-0, where a step of b would take 2\.\d\d times as long where 1\.10 are allowed", waits
    )
    assert where(decided(replace(PACK, slowdown_max=3.0), [service(0)], there, job("b", profile=short)))


def test_quotas_bound_a_project_and_keep_nobody_else() -> None:
    rules = replace(PACK, quotas={"p": Quota(jobs_max=1), "q": Quota(memory_bytes=3 * GB)})
    there = [job("a", 0, project="p"), job("b", 0, project="q", gb=2)]
    new = [job("c", project="p"), job("d", project="q", gb=2), job("e"), job("f", project="q", gb=4)]
    decision = decided(rules, [service(0), service(1)], *there, *new)
    assert where(decision) == {"e": "train-0"}
    assert decision.wait == {
        "c": "waits for a job of project p to end: its quota is 1",
        "d": "waits for 1 GB in the quota of project q",
    }
    assert decision.refuse == {
        "f": "its trained state needs 4 GB, and the quota of project q is 3 GB: raise quotas.memory_bytes"
    }


# ------------------------------------------------------------ the queue


def test_the_queue_goes_by_priority_then_by_share_then_by_age() -> None:
    waiting = [job("old", submitted=1), job("new", submitted=2), job("urgent", submitted=3, priority=1)]
    decision = decided(ISOLATED, [service(0)], *waiting)
    assert where(decision) == {"urgent": "train-0"}
    assert list(decision.wait) == ["old", "new"]


@pytest.mark.parametrize(("share", "expected"), [(1.0, {"p": 6, "q": 6}), (2.0, {"p": 8, "q": 4})])
def test_projects_that_wait_get_places_in_proportion_to_their_shares(share: float, expected: dict[str, int]) -> None:
    rules = replace(PACK, quotas={"p": Quota(share=share)}, slowdown_max=9.0)
    waiting = [job(f"{project}{i}", project=project, submitted=i) for i in range(12) for project in "pq"]
    placed = where(decided(rules, [service(i) for i in range(4)], *waiting))
    assert {project: sum(name.startswith(project) for name in placed) for project in "pq"} == expected


def test_a_large_job_counts_for_as_much_of_a_share_as_its_bytes() -> None:
    services = [service(0, parked=5), service(1, parked=5)]
    waiting = [job("p1", project="p", gb=4, submitted=0)]
    waiting += [job(f"q{i}", project="q", gb=0.1, submitted=1 + i) for i in range(3)]
    waiting += [job("p2", project="p", gb=4, submitted=0.5)]
    order = list(where(decided(PACK, services, *waiting)))
    assert order == ["p1", "q0", "q1", "q2", "p2"], "4 GB of 10 are more than two places of six"


def test_who_waits_keeps_those_behind_it_from_the_services_that_it_waits_for_and_from_no_others() -> None:
    services = [service(0, jobs_max=1), service(1)]
    waiting = [job("head", named="train-0"), job("next", named="train-0"), job("other", named="train-1")]
    decision = decided(PACK, services, job("a", 0), *waiting)
    assert where(decision) == {"other": "train-1"}
    assert decision.wait == {
        "head": "waits for a place on train-0, which serves 1 jobs of 1",
        "next": "waits for its turn after head",
    }
    behind = [job("a", 1, gb=4), job("b", 1, gb=3.5), job("head", gb=3), job("small", gb=0.1)]
    assert not decided(SPREAD, services[1:], *behind).place


def test_a_small_job_passes_a_large_one_that_waits_if_that_is_not_delayed_by_it() -> None:
    there = [job("long", 0, gb=4, remaining_s=1000.0), job("short", 0, gb=4, remaining_s=10.0)]
    head, small = job("head", gb=3), job("small", gb=0.5, submitted=1)
    decision = decided(BACKFILL, [service(0)], *there, head, small)
    assert where(decision) == {"small": "train-0"}, "7.5 GB are in use once short has ended"
    large = job("large", gb=1.5, submitted=1, remaining_s=11.0)
    wider = service(0, parked=10, jobs_max=9)
    assert where(decided(BACKFILL, [wider], *there, head, replace(large, remaining_s=9.0))) == {"large": "train-0"}
    tight = [replace(there[0], state_bytes=5 * GB), replace(there[1], state_bytes=int(3.2 * GB))]
    decision = decided(
        BACKFILL, [replace(wider, memory_bytes=9 * GB)], *tight, replace(head, state_bytes=4 * GB), large
    )
    assert not decision.place
    assert decision.wait["large"] == "waits for its turn after head"


def test_with_ends_that_nobody_knows_a_job_passes_only_where_the_head_would_have_room_beside_it() -> None:
    there = [job("a", 0, gb=4), job("b", 0, gb=4)]
    head = job("head", gb=4)
    assert where(decided(BACKFILL, [service(0)], *there, head, job("c", gb=1, submitted=1))) == {"c": "train-0"}
    tight, larger = service(0, memory=5, parked=8.5), replace(head, state_bytes=int(4.3 * GB))
    assert not decided(BACKFILL, [tight], *there, larger, job("c", gb=0.5, submitted=1)).place, "head needs its 0.5 GB"


def test_of_two_services_that_would_do_for_the_head_one_is_left_to_it() -> None:
    pair = [service(i, parked=5) for i in range(2)]
    there = [job("a", 0, gb=3, remaining_s=10.0), job("b", 1, gb=3, remaining_s=10.0)]
    long = [job(name, gb=1.5, submitted=1, remaining_s=1e4) for name in "xy"]
    decision = decided(BACKFILL, pair, *there, job("head", gb=4), *long)
    assert where(decision) == {"x": "train-0"}
    assert decision.wait["y"] == "waits for its turn after head"


# ------------------------------------------------------------ any jobs and services

duties = st.sampled_from([0.05, 0.2, 0.35, 0.6])
profiles = st.one_of(
    st.just(UNKNOWN),
    st.builds(
        lambda duty, period_s, jitter, at_s: replace(
            profile(duty, period_s=period_s, jitter=jitter), burst_at_s=at_s, switch_s=0.5
        ),
        duties,
        st.sampled_from([50.0, 100.0, 101.0]),
        st.sampled_from([0.0, 0.05, 0.3]),
        st.floats(0, 100),
    ),
)
jobs = st.lists(
    st.builds(
        JobView,
        st.just(""),
        st.sampled_from([GB // 2, GB, 3 * GB, 5 * GB]),
        named=st.sampled_from([None, None, None, "train-0", "train-7"]),
        suits=st.sampled_from([None, None, ("train-1", "train-2")]),
        project=st.sampled_from(["p", "q", "r"]),
        priority=st.integers(0, 1),
        submitted=st.integers(0, 5).map(float),
        profile=profiles,
        remaining_s=st.one_of(st.none(), st.sampled_from([10.0, 500.0, 1e4])),
        alone=st.sampled_from([False] * 9 + [True]),
    ),
    max_size=14,
).map(lambda some: [replace(one, name=f"job-{i}") for i, one in enumerate(some)])
services = st.lists(
    st.builds(
        lambda memory, parked, most: service(memory=memory, parked=parked, jobs_max=most),
        st.sampled_from([2, 4]),
        st.sampled_from([4, 8]),
        st.integers(1, 3),
    ),
    min_size=1,
    max_size=3,
).map(lambda some: [replace(one, name=f"train-{i}") for i, one in enumerate(some)])
quotas = st.sampled_from([{}, {"p": Quota(jobs_max=1), "q": Quota(memory_bytes=4 * GB, share=3.0)}])


def applied(view: PlacementView, decision: PlacementDecision) -> PlacementView:
    to = {one.job: one.service for one in (*decision.place, *decision.move)}
    return PlacementView(view.services, [replace(one, on=to.get(one.name, one.on)) for one in view.jobs])


def settled(rules: PlacementRules, some: list[ServiceView], first: list[JobView]) -> PlacementView:
    """A cluster on which ``first`` were placed."""
    view = PlacementView(some, first)
    view = applied(view, decide(rules, view))
    return PlacementView(some, [one for one in view.jobs if one.on])


def within_bounds(rules: PlacementRules, view: PlacementView) -> None:
    for one in view.services:
        there = [job for job in view.jobs if job.on == one.name]
        assert len(there) <= one.jobs_max
        assert sum(job.state_bytes for job in there) <= one.parked_bytes
        assert all(job.state_bytes <= one.memory_bytes for job in there)
        assert len(there) <= 1 or not any(job.alone for job in there)
        if len(there) > 1 and not any(job.named for job in there):
            assert rules.policy != "isolated"
            assert not any(is_cold(job, rules) for job in there)
            assert sum(job.profile.duty for job in there) <= rules.duty_max + 1e-9
    for project, quota in rules.quotas.items():
        held = [job for job in view.jobs if job.on and job.project == project]
        assert quota.jobs_max is None or len(held) <= quota.jobs_max
        assert quota.memory_bytes is None or sum(job.state_bytes for job in held) <= quota.memory_bytes


@given(services, jobs, jobs, st.sampled_from(POLICIES), quotas)
def test_bounds_hold_each_job_is_answered_once_and_the_order_of_the_view_does_not_count(
    some: list[ServiceView], first: list[JobView], later: list[JobView], policy: PlacementPolicy, of: dict[str, Quota]
) -> None:
    rules = PlacementRules(policy, quotas=of)
    before = settled(rules, some, first)
    waiting = [replace(one, name=f"later-{one.name}") for one in later]
    view = PlacementView(some, [*before.jobs, *waiting])
    decision = decide(rules, view)
    answered = [*where(decision), *decision.wait, *decision.refuse]
    assert sorted(answered) == sorted(one.name for one in waiting)
    assert not {one.job for one in decision.move} & set(answered)
    within_bounds(rules, applied(view, decision))
    assert decide(rules, PlacementView(some, view.jobs[::-1])) == decision


@given(services, jobs, st.sampled_from(POLICIES))
def test_the_head_of_the_queue_never_waits_where_it_has_room(
    some: list[ServiceView], first: list[JobView], policy: PlacementPolicy
) -> None:
    rules = PlacementRules(policy)
    view = PlacementView(some, first)
    decision = decide(rules, view)
    after = applied(view, replace(decision, move=()))
    for head in [one for one in first if one.name in list(decision.wait)[:1]]:
        for one, there in [(one, [job for job in after.jobs if job.on == one.name]) for one in some]:
            assert not suits(head, one) or isinstance(lack(head, one, there, rules), Lack)


def suits(one: JobView, service: ServiceView) -> bool:
    return service.name in ([one.named] if one.named else one.suits or [service.name])


def earliest_s(rules: PlacementRules, view: PlacementView, head: JobView) -> float:
    """When ``head`` has room if nobody else begins, found by letting jobs end one after another."""
    ends = sorted({0.0, *(one.remaining_s or 0.0 for one in view.jobs if one.on)})
    for at_s in ends:
        for one in view.services:
            left = [job for job in view.jobs if job.on == one.name and (job.remaining_s or 0.0) > at_s]
            if suits(head, one) and not isinstance(lack(head, one, left, rules), Lack):
                return at_s
    return math.inf


@given(services, jobs, jobs)
def test_backfill_never_delays_the_earliest_start_of_the_head(
    some: list[ServiceView], first: list[JobView], later: list[JobView]
) -> None:
    """The head is the first one that waits for a service. What passes it is known by coming after it in the queue."""
    known = [replace(one, remaining_s=one.remaining_s or 77.0) for one in first]
    before = settled(BACKFILL, some, known)
    waiting = [
        replace(
            one,
            name=f"later-{one.name}",
            remaining_s=one.remaining_s or 77.0,
            submitted=float(i),
            priority=0,
            project="p",
        )
        for i, one in enumerate(later)
    ]
    view = PlacementView(some, [*before.jobs, *waiting])
    decision = decide(BACKFILL, view)
    if not decision.wait:
        return
    head = next(one for one in waiting if one.name in decision.wait)
    ahead = {one.name for one in waiting if one.submitted < head.submitted}
    to = where(decision)
    without = [replace(one, on=to[one.name]) if one.name in ahead & set(to) else one for one in view.jobs]
    everybody = applied(view, replace(decision, move=()))
    assert earliest_s(BACKFILL, everybody, head) <= earliest_s(BACKFILL, PlacementView(some, without), head)
