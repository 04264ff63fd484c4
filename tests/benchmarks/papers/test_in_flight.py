"""Engines that run empty at a step's begin and its end: what they can do with little in flight, and what that costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from actors.policies.assigning.generation_time import Instance
from benchmarks.papers.cluster.clairvoyant.ends import earliest_ends_s
from benchmarks.papers.cluster.clairvoyant.least_work import Demand, Kind, Sharing, demand, sharings, token_costs
from benchmarks.papers.cluster.clairvoyant.supply import Supply
from benchmarks.papers.cluster.costs import DecodePace

PROMPT, PLACES, CACHE = 8, 12, 300.0
ROOMY = Instance(DecodePace(1.0, 0.0, 0.0, 0.0, 0.0), places=10**6, kv_tokens=1e9)
OTHER = Supply(
    local=0, others_s=lambda begin_s, end_s: end_s - begin_s, step_s=0.0, step_engines=0, staleness=0
)  # one engine

SHARINGS = st.builds(
    lambda fixed, weights, compute, sequence, context, prompt, which: sharings(
        Instance(DecodePace(fixed, weights, compute, sequence, context), places=PLACES, kv_tokens=CACHE), prompt
    )[which],
    st.sampled_from([0.0, 0.2, 1.0]),
    st.sampled_from([0.0, 0.5, 2.0]),
    st.sampled_from([0.0, 0.1]),
    st.sampled_from([0.0, 0.05, 0.3]),
    st.sampled_from([0.0, 0.001, 0.02]),
    st.sampled_from([0, PROMPT, 40]),
    st.integers(0, 3),
)
MANY_PROMPTS = sharings(
    replace(ROOMY, pace=DecodePace(1.0, 0.0, 0.0, 0.3, 0.0), places=PLACES, kv_tokens=CACHE), prompt_tokens=40
)[2]
"""By cache: what prompts take away is more than samples bring."""
TOKENS = st.lists(st.integers(0, 60), max_size=PLACES)
"""That the samples of an engine have."""


@settings(max_examples=500, deadline=None, derandomize=True)
@given(sharing=SHARINGS, engines=st.lists(TOKENS, min_size=1, max_size=4))
def test_however_samples_are_spread_over_engines_these_pay_no_more_than_is_said(
    sharing: Sharing, engines: list[list[int]]
) -> None:
    paid_s, samples, context_tokens = 0.0, 0, 0.0
    for tokens in engines:
        contexts = np.array([sharing.prompt_tokens + t for t in tokens], float)
        if not len(contexts) or contexts.sum() > CACHE:
            continue
        step_s = sharing.step_s + float((sharing.sequence_s + sharing.context_token_s * contexts).sum())
        paid_s += float(sharing.token_s(contexts).sum()) / step_s if step_s else 1.0
        samples, context_tokens = samples + len(contexts), context_tokens + float(contexts.sum())
    most_s = sharing.paid_s(float(len(engines)), float(samples), context_tokens)
    assert paid_s <= float(most_s) * (1 + 1e-9) + 1e-9
    assert most_s <= len(engines)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(sharing=SHARINGS, samples=st.integers(0, 60), more=st.floats(0, 2000))
def test_more_engines_pay_more_but_each_less_than_the_one_before(sharing: Sharing, samples: int, more: float) -> None:
    """So their mean number may stand for engines that come and go, and the trainer's add no more than themselves."""
    engines = np.linspace(0.25, 8.0, 32)
    paid_s = sharing.paid_s(engines, float(samples), sharing.prompt_tokens * samples + more)
    gains = np.diff(paid_s) / np.diff(engines)
    assert np.all(gains >= -1e-9)
    assert np.all(gains <= 1 + 1e-9)
    assert np.all(np.diff(gains) <= 1e-9)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(sharing=SHARINGS, samples=st.floats(0, 60), more=st.floats(0, 900), further=st.floats(0, 60))
@example(sharing=MANY_PROMPTS, samples=12.0, more=0.0, further=9.0)
def test_more_in_flight_never_pays_less(sharing: Sharing, samples: float, more: float, further: float) -> None:
    prompts = sharing.prompt_tokens * (samples + further)
    paid_s = sharing.paid_s(3.0, samples, prompts + more)
    assert sharing.paid_s(3.0, samples + further, prompts + more) >= paid_s - 1e-9
    assert sharing.paid_s(3.0, samples, prompts + more + further) >= paid_s - 1e-9


def one_step(instance: Instance, samples: int, length: int, train_s: float, prompt: int = 0) -> Demand:
    lengths = np.full(samples, length)
    return demand(token_costs([Kind(instance)], prompt, lengths), lengths, np.full(samples, train_s), 1)


def end_s(one: Demand, supply: Supply = OTHER) -> float:
    return earliest_ends_s([one], supply)[0]


def test_engines_whose_cache_fills_only_as_contexts_grow_are_not_full_at_a_steps_begin() -> None:
    """Ten samples make ten tokens a second; a cache of a thousand is full after 100 s, half of which was idle."""
    one = one_step(replace(ROOMY, kv_tokens=1000.0), samples=10, length=1000, train_s=1e-6)
    assert end_s(replace(one, flight=None)) == pytest.approx(10 * 1000 * 500 / 1000, rel=1e-3)
    assert end_s(one) == pytest.approx(5000 + 50, abs=4)


def test_what_must_still_be_trained_leaves_few_samples_to_a_steps_last_engines() -> None:
    """A second before the end there is training for two samples only, so ten places are full until 5 s before it."""
    one = one_step(replace(ROOMY, places=10), samples=1000, length=10, train_s=0.5)
    assert end_s(replace(one, flight=None)) == pytest.approx(1000)
    assert end_s(one) == pytest.approx(1000 + 2.5, abs=0.1)


@pytest.mark.parametrize(("room", "full_s"), [({"places": 10}, 1000), ({"kv_tokens": 100.0}, 500)])
def test_of_samples_that_could_be_the_last_those_with_the_least_training_leave_the_most(
    room: dict[str, Any], full_s: float
) -> None:
    """Training takes 0.1 or 0.5 s: ten of the shorter, which fill places as well as the cache, leave a second."""
    lengths, train_s = np.full(1000, 10), np.tile([0.1, 0.5], 500)
    one = demand(token_costs([Kind(replace(ROOMY, **room))], 0, lengths), lengths, train_s, 1)
    assert full_s + 0.47 < end_s(one) <= full_s + 0.5 + 1e-6, "half of that second, and no more"


def test_training_that_fits_into_a_steps_begin_takes_nothing_from_its_engines_later() -> None:
    """Ten samples fill two caches of a thousand after 200 s; meanwhile one engine would do, and the other trains."""
    lengths, train_s = np.array([1, *[1000] * 10]), np.array([90.0, *[1e-6] * 10])
    one = demand(token_costs([Kind(replace(ROOMY, kv_tokens=1000.0))], 0, lengths), lengths, train_s, 1)
    both = replace(OTHER, local=1, step_engines=1)
    assert end_s(replace(one, flight=None), both) == pytest.approx((5000 + 90) / 2, abs=4)
    assert 2580 < end_s(one, both) <= 200 + (5000 - 200) / 2


def test_a_step_whose_begin_lasts_until_its_end_loses_nothing_twice() -> None:
    """Ten samples of 100 tokens in a roomy cache end together, and each is trained for six seconds then."""
    one = one_step(replace(ROOMY, kv_tokens=1e5), samples=10, length=100, train_s=6.0)
    assert end_s(one) == pytest.approx(100 + 60, abs=1)


def test_engines_that_may_prefill_meanwhile_are_not_said_to_run_empty() -> None:
    one = one_step(replace(ROOMY, places=10, prefill_token_s=0.1), samples=1000, length=10, train_s=0.5, prompt=10)
    assert end_s(one) == end_s(replace(one, flight=None)) == pytest.approx(1000 + 1000)


def test_what_may_be_trained_before_a_group_is_whole_leaves_more_samples_to_the_last_engines() -> None:
    """Five seconds of training a group of ten, or three of them after its last sample."""
    lengths, train_s = np.full(1000, 10), np.full(1000, 0.5)
    costs = token_costs([Kind(replace(ROOMY, places=10))], 0, lengths)
    late, early = (demand(costs, lengths, train_s, 10, early=part) for part in (0.0, 0.4))
    assert end_s(late) == pytest.approx(1000 + 2.5, abs=0.1)
    assert end_s(early) == pytest.approx(1000 + 1.5, abs=0.1)


def test_on_policy_others_pull_a_version_and_the_trainers_machines_change_over_twice() -> None:
    one = one_step(replace(ROOMY, places=10), samples=1000, length=10, train_s=0.01)
    pulling = replace(OTHER, pull_s=7.0)
    assert end_s(one, pulling) == pytest.approx(end_s(one) + 7.0, abs=0.01)
    own = replace(OTHER, local=1, step_engines=1, others_s=lambda begin_s, end_s: 0.0)
    assert end_s(one, replace(own, switch_s=3.0)) == pytest.approx(end_s(one, own) + 6.0, abs=0.01)


def test_a_version_that_overlaps_the_next_is_waited_for_by_nobody() -> None:
    """With k = 1 nothing says that an engine runs empty, pulls or changes over."""
    one = one_step(replace(ROOMY, places=10), samples=1000, length=10, train_s=0.5)
    free = replace(OTHER, staleness=1)
    late = end_s(one, replace(free, pull_s=7.0, switch_s=3.0))
    assert late == pytest.approx(end_s(replace(one, flight=None), free))
