"""The clairvoyant bound against exhaustive search: no schedule at all ends before it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.policies.assigning.generation_time import Instance
from benchmarks.papers.cluster.clairvoyant.ends import earliest_ends_s
from benchmarks.papers.cluster.clairvoyant.least_work import Demand, Kind, demand, token_costs
from benchmarks.papers.cluster.clairvoyant.supply import Supply
from benchmarks.papers.cluster.combined import CombinedCluster, Machines, Rules
from benchmarks.papers.cluster.costs import DecodePace
from benchmarks.papers.cluster.moving_engine import Sample
from tests.benchmarks.papers.schedules import Case, optimum_s


def pace(fixed: float, weights: float, compute: float, sequence: float, context: float) -> DecodePace:
    return DecodePace(fixed, weights, compute, sequence, context)


INSTANCES = st.builds(
    Instance,
    pace=st.builds(
        pace,
        st.sampled_from([0.1, 1.0]),
        st.sampled_from([0.1, 1.0]),
        st.sampled_from([0.05, 0.6]),
        st.sampled_from([0.0, 0.3]),
        st.sampled_from([0.0, 0.1]),
    ),
    places=st.integers(1, 2),
    kv_tokens=st.sampled_from([5.0, 20.0]),
    prefill_token_s=st.sampled_from([0.0, 0.1]),
)
CASES = st.builds(
    Case,
    lengths=st.tuples(*[st.integers(1, 2)] * 3),
    per_step=st.sampled_from([1, 3]),
    train_s=st.tuples(*[st.sampled_from([0.5, 1.0, 4.0])] * 3),
    instance=INSTANCES,
    local=st.integers(0, 1),
    others=st.integers(0, 1),
    staleness=st.integers(0, 1),
    step_s=st.sampled_from([0.0, 0.5]),
    early=st.sampled_from([0.0, 0.4]),
    switch_s=st.sampled_from([0.0, 0.6]),
    pull_s=st.sampled_from([0.0, 0.8]),
)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(CASES)
def test_no_schedule_at_all_ends_before_the_bound(case: Case) -> None:
    if case.local + case.others:
        assert case.bound_s() <= optimum_s(case) * (1 + 1e-9)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(CASES, st.builds(Kind, INSTANCES))
def test_no_schedule_ends_before_the_bound_of_engines_of_its_kind_and_another(case: Case, kind: Kind) -> None:
    if case.local + case.others:
        assert replace(case, other_kinds=(kind,)).bound_s() <= optimum_s(case) * (1 + 1e-9)


ON_POLICY = st.builds(
    Case,
    lengths=st.tuples(*[st.integers(1, 3)] * 3),
    per_step=st.just(3),
    train_s=st.tuples(*[st.sampled_from([0.02, 0.3, 1.0])] * 3),
    instance=st.builds(
        Instance,
        pace=st.builds(pace, st.just(1.0), st.sampled_from([0.0, 1.0]), st.just(0.0), st.just(0.1), st.just(0.02)),
        places=st.integers(2, 4),
        kv_tokens=st.sampled_from([4.0, 6.0, 9.0]),
        prefill_token_s=st.sampled_from([0.0, 0.2]),
    ),
    local=st.integers(0, 1),
    others=st.just(1),
    staleness=st.just(0),
    step_s=st.just(0.1),
    early=st.sampled_from([0.0, 0.6]),
    switch_s=st.sampled_from([0.2, 0.6]),
    pull_s=st.sampled_from([0.2, 0.8]),
    prompt=st.sampled_from([0, 1]),
)
"""Whose engines run empty, pull and change over."""


@settings(max_examples=6, deadline=None, derandomize=True)
@given(ON_POLICY)
def test_no_schedule_of_an_on_policy_step_whose_engines_run_empty_ends_before_the_bound(case: Case) -> None:
    assert case.bound_s() <= optimum_s(case) * (1 + 1e-9)


def least_of(kinds: list[Kind], prompt_tokens: int, *lengths: int) -> Demand:
    """Of a job of these samples, all in one step."""
    tokens = np.array(lengths)
    return demand(token_costs(kinds, prompt_tokens, tokens), tokens, np.ones(len(tokens)), 1)


def test_each_token_is_counted_where_it_costs_least_and_of_engines_as_large_as_they_are() -> None:
    """With little context on the one kind, with much on the other; an engine of two devices counts twice."""
    small = Instance(pace(1.0, 0.0, 0.0, 0.0, 1.0), places=1, prefill_token_s=0.3)
    large = Instance(pace(3.0, 0.0, 0.0, 0.0, 0.0), places=1, prefill_token_s=0.2)
    one, other, both, twice = (
        least_of(kinds, 1, 4)
        for kinds in ([Kind(small)], [Kind(large)], [Kind(small), Kind(large)], [Kind(small), Kind(large, 2)])
    )
    assert one.work_s[0] == pytest.approx(4 * 1 + (1.5 + 2.5 + 3.5 + 4.5) + 0.3)
    assert other.work_s[0] == pytest.approx(4 * 3 + 0.2)
    assert both.work_s[0] == both.alone_s[0] == pytest.approx(2.5 + 3 + 3 + 3 + 0.2)
    assert twice.work_s[0] == pytest.approx(2.5 + 3.5 + 4.5 + 5.5 + 0.3), "twice 0.2 for a prefill is more"
    assert twice.alone_s[0] == both.alone_s[0], "alone, a sample has the fast engine whatever that takes"


def test_what_a_step_costs_is_shared_by_cache_where_it_runs_out_first() -> None:
    """One sample of ten tokens after a prompt of nine: ten places, but cache for two contexts of fourteen."""
    roomy = Instance(pace(2.0, 1.0, 0.0, 0.0, 0.0), places=10, kv_tokens=1e9)
    tight = replace(roomy, kv_tokens=28.0)
    assert least_of([Kind(roomy)], 9, 10).work_s[0] == pytest.approx(10 * 3 / 10)
    assert least_of([Kind(tight)], 9, 10).work_s[0] == pytest.approx(3 * (9 + 5) * 10 / 28)


def test_products_take_the_place_of_reading_where_they_take_longer_in_a_full_batch() -> None:
    instance = Instance(pace(2.0, 1.0, 0.5, 0.0, 0.0), places=10, kv_tokens=1e9)
    assert least_of([Kind(instance)], 9, 10).work_s[0] == pytest.approx(10 * (2 / 10 + 0.5))


def test_samples_of_two_steps_that_share_decode_steps_are_counted_in_one_way() -> None:
    """Many short ones that places hold up, one long one that the cache does: together they take 50 decode steps."""
    instance = Instance(pace(1.0, 0.0, 0.0, 0.0, 0.0), places=10, kv_tokens=60.0)
    short, long = np.full(400, 1), np.array([50])
    costs = token_costs([Kind(instance)], 1, np.concatenate([short, long]))
    demands = [demand(costs, x, np.zeros(len(x)), 1) for x in (short, long)]
    supply = Supply(0, lambda a, b: b - a, 0.0, 0, staleness=1)
    assert earliest_ends_s(demands, supply)[-1] <= 50 + 1e-6


def test_what_a_sample_allows_before_its_group_is_whole_is_trained_before_it() -> None:
    """One engine, one place: two of three samples are there early; the bound knows it, and is not above the optimum."""
    instance = Instance(pace(1.0, 0.5, 0.1, 0.2, 0.01), places=1, kv_tokens=100.0)
    case = Case((1, 1, 2), 3, (4.0,) * 3, instance, local=0, others=1, staleness=0, step_s=0.0)
    early = replace(case, early=0.4)
    assert 0.8 * optimum_s(early) < early.bound_s() <= optimum_s(early) * (1 + 1e-9)
    assert optimum_s(early) < optimum_s(replace(early, early=1e-9)), "without it the trainer waits for all three"
    assert early.bound_s() < replace(early, early=1e-9).bound_s()


def test_generation_ahead_of_a_version_is_not_counted_after_its_end() -> None:
    """With k = 1 samples of two steps share engine steps: what waits for the first end is the third step's only."""
    instance = Instance(pace(1.0, 0.1, 0.05, 0.0, 0.0), places=2, kv_tokens=100.0)
    case = Case((3, 3, 1), 1, (0.1, 0.1, 0.1), instance, local=1, others=0, staleness=1, step_s=0.0)
    assert case.bound_s() <= optimum_s(case) * (1 + 1e-9)
    assert case.bound_s() > 0.9 * optimum_s(case)


def test_the_bound_is_reached_where_nothing_is_relaxed() -> None:
    """One engine, one place: every token takes a whole step, and training follows."""
    instance = Instance(pace(1.0, 0.5, 0.1, 0.2, 0.01), places=1, kv_tokens=100.0)
    case = Case((2, 1, 2), 3, (0.1, 0.1, 0.1), instance, local=1, others=0, staleness=0, step_s=0.5)
    assert optimum_s(case) == pytest.approx(case.bound_s(), rel=0.01)


def test_engines_that_the_optimizer_does_not_hold_generate_meanwhile() -> None:
    """Seven that generate and one that trains: a bound that stops all eight for 40 s a step lies above this run."""
    samples = [Sample(i, i, 0, 10) for i in range(70)]
    instance = Instance(pace(1.0, 0.0, 0.0, 0.0, 0.0), places=1, kv_tokens=1e6)
    machines = Machines(
        instance=instance,
        fixed=7,
        local=1,
        train_s=lambda ss: 0.8 * len(ss),
        step_s=40.0,
        pull_s=lambda _: 0.0,
        load_s=0.0,
    )
    run = CombinedCluster(
        machines, Rules(1, returns=False), lambda _: samples, lambda _, ss: np.array([float(s.length) for s in ss])
    ).run(steps=10)
    lengths, train_s = np.full(70, 10), np.full(70, 0.1)  # on all eight
    demands = [demand(token_costs([Kind(instance)], 0, lengths), lengths, train_s, 1)] * 10
    held, all_held = (earliest_ends_s(demands, Supply(8, lambda a, b: 0.0, 40.0, engines, 1))[-1] for engines in (1, 8))
    assert held <= run.ends_s[-1] < all_held


def test_work_that_no_engine_can_do_is_told() -> None:
    instance = Instance(pace(1.0, 0.5, 0.1, 0.2, 0.01), places=1, kv_tokens=100.0)
    with pytest.raises(ValueError, match="no machine ever gives"):
        Case((1, 1, 1), 3, (1.0,) * 3, instance, local=0, others=0, staleness=0, step_s=0.0).bound_s()


def test_work_that_waits_for_a_version_makes_the_bound_of_all_steps_later_by_a_cold_start() -> None:
    """Before the first end nobody can do the work of steps that wait for it."""
    long = np.array([50.0])
    first = Demand(work_s=np.array([10.0]), alone_s=long, train_s=np.array([5.0]))
    supply = Supply(local=1.0, others_s=lambda a, b: 0.0, step_s=0.0, step_engines=1.0, staleness=1)
    ends = earliest_ends_s([first] * 3, supply)
    assert ends[0] == pytest.approx(55.0)  # alone, then its training
    assert ends[2] == pytest.approx(max(55.0 + 5 + 5 + 10, 55.0 + 55.0))
    short = Demand(work_s=np.array([10.0]), alone_s=np.array([1.0]), train_s=np.array([5.0]))
    later = earliest_ends_s([first, *[short] * 4], supply)
    assert later[4] == pytest.approx(55.0 + 4 * 5 + 3 * 10)  # not 5 * 15: until 55 s there was work for 25 s only
