"""Plans of a step: every prompt once, bounds kept, and the rules' promises, for any workers and lengths."""

from __future__ import annotations

import math
import time
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.policies.assigning.latency_table import EMPTY, LatencyTable
from actors.policies.planning.bill import BillingRule
from actors.policies.planning.parts import PartEnds
from actors.policies.planning.step_plan import TRIED, PlanRule, PlanView, PlanWorker, StepPlan, decide, known_tokens
from tests.actors.policies.latency_tables import linear

Parts = Literal["even", "balanced"]
NAN = float("nan")


def workers(count: int, **fields: float) -> list[PlanWorker]:
    """As many equal workers, the first beside the trainer."""
    values = {"slots": 16, "latency": linear(), **fields}
    return [PlanWorker(f"w{i}", beside_trainer=i == 0, **values) for i in range(count)]  # pyright: ignore[reportArgumentType]


def view(
    tokens: list[float], pool: list[PlanWorker], *, least: int = 1, bill: BillingRule | None = None, **rule: object
) -> PlanView:
    p = len(tokens)
    return PlanView(
        pool, np.array(tokens, float), np.full(p, 3, np.int32), np.full(p, 100, np.int32),
        least, len(pool), 2048, PlanRule(**rule), bill or BillingRule(asleep_price=0.1),  # pyright: ignore[reportArgumentType]
    )  # fmt: skip


def plan(tokens: list[float], pool: list[PlanWorker], **more: object) -> StepPlan:
    return decide(view(tokens, pool, **more), now=0.0)  # pyright: ignore[reportArgumentType]


TOKENS = st.lists(st.one_of(st.floats(-5, 1e9), st.just(NAN), st.just(math.inf)), min_size=1, max_size=40)
POOLS = st.lists(
    st.builds(
        PlanWorker,
        name=st.just(""),
        slots=st.integers(0, 20),
        latency=st.sampled_from([EMPTY, linear(), linear(0.02), linear(0.004, 0.001)]),
        kv_tokens=st.sampled_from([math.inf, 3000.0, 0.0]),
        prefill_token_s=st.sampled_from([0.0, 1e-4]),
        ready_in_s=st.sampled_from([0.0, 0.3, 50.0]),
        transfer_s=st.floats(0, 2),
        beside_trainer=st.booleans(),
        price=st.sampled_from([0.0, 1.0, 2.5]),
        exists=st.booleans(),
    ),
    min_size=1,
    max_size=6,
).map(lambda pool: [worker._replace(name=f"w{i}") for i, worker in enumerate(pool)])
RULES = st.fixed_dictionaries(
    {
        "choose": st.sampled_from(["lambda", "pareto", "fixed"]),
        "time_weight": st.floats(0, 1),
        "within": st.floats(0, 0.5),
        "parts": st.sampled_from(["even", "balanced"]),
    }
)


@given(TOKENS, POOLS, RULES, st.integers(1, 6))
def test_every_prompt_is_in_exactly_one_part_and_bounds_are_kept(
    tokens: list[float], pool: list[PlanWorker], rule: dict[str, object], least: int
) -> None:
    found = plan(tokens, pool, least=min(least, len(pool)), **rule)
    assert sorted(np.concatenate(list(found.parts.values())).tolist()) == list(range(len(tokens)))
    assert all(len(part) for part in found.parts.values())
    most = min(len(pool), len(tokens))
    assert min(least, most) <= found.chosen.workers <= most
    assert len(found.parts) <= found.chosen.workers
    if found.forecasts:
        assert [one.workers for one in found.forecasts] == list(range(min(least, most), most + 1))
        assert all(np.isfinite(one).all() and one.seconds > 0 for one in found.forecasts)
        assert max(found.ends_s.values()) == pytest.approx(found.chosen.seconds)


@given(TOKENS, POOLS, RULES)
def test_parts_hold_neighbours_of_the_sorted_prompts(
    tokens: list[float], pool: list[PlanWorker], rule: dict[str, object]
) -> None:
    found = plan(tokens, pool, **rule)
    expected = known_tokens(np.array(tokens), 2048)
    order = np.concatenate([expected[part] for part in found.parts.values()])
    assert (np.diff(order) <= 0).all()
    if any(worker.beside_trainer for worker in pool[: found.chosen.workers]):
        assert pool[int(found.longest[1:])].beside_trainer  # pyright: ignore[reportOptionalSubscript]


@given(st.lists(st.floats(1, 2000), min_size=6, max_size=40), st.integers(1, 6))
def test_even_gives_every_worker_as_many_prompts(tokens: list[float], count: int) -> None:
    sizes = [len(part) for part in plan(tokens, workers(count), choose="fixed", parts="even").parts.values()]
    assert len(sizes) == count
    assert max(sizes) - min(sizes) <= 1


@given(st.lists(st.floats(1, 2000), min_size=6, max_size=40), st.integers(1, 6), st.integers(1, 40), st.floats(0, 3))
def test_balanced_ends_at_most_one_prompt_later_than_even(
    tokens: list[float], count: int, slots: int, transfer_s: float
) -> None:
    pool = workers(count, slots=slots)
    pool[1:] = [worker._replace(transfer_s=transfer_s) for worker in pool[1:]]
    even, balanced = (plan(tokens, pool, choose="fixed", parts=parts).chosen for parts in ("even", "balanced"))
    tall = np.ones(len(tokens))
    whole = PartEnds(np.sort(tokens)[::-1], 3 * tall, 100 * tall, linear(), slots, 0 * tall).ends(0)
    assert balanced.seconds <= even.seconds + np.diff(whole, prepend=0.0).max() + 1e-9
    assert balanced.violation_s <= 1e-9, "nobody ends after the longest part"


def test_balanced_gives_the_longest_prompts_to_a_worker_with_few_of_them() -> None:
    tokens = [100.0] * 28 + [1000.0] * 4
    even, balanced = (plan(tokens, workers(2, slots=64), choose="fixed", parts=parts) for parts in ("even", "balanced"))
    assert [len(part) for part in even.parts.values()] == [16, 16]
    assert [len(part) for part in balanced.parts.values()] == [4, 28]
    assert balanced.chosen.seconds < even.chosen.seconds


@given(TOKENS, POOLS, st.sampled_from(["even", "balanced"]))
def test_the_weight_of_time_goes_from_the_cheapest_to_the_fastest(
    tokens: list[float], pool: list[PlanWorker], parts: Parts
) -> None:
    fastest, cheapest = (plan(tokens, pool, parts=parts, time_weight=weight) for weight in (1.0, 0.0))
    least = min((one.violation_s for one in fastest.forecasts), default=0)
    hidden = [one for one in fastest.forecasts if one.violation_s <= least + 1e-9 * one.seconds]
    if hidden:
        assert fastest.chosen.seconds == min(one.seconds for one in hidden)
        assert cheapest.chosen.cost == min(one.cost for one in hidden)


@given(TOKENS, POOLS, st.floats(0, 0.5))
def test_pareto_is_the_cheapest_within_the_bound(tokens: list[float], pool: list[PlanWorker], within: float) -> None:
    found = plan(tokens, pool, choose="pareto", within=within)
    if found.forecasts:
        fastest_s = min(one.seconds for one in found.forecasts)
        in_time = [one for one in found.forecasts if one.seconds <= fastest_s * (1 + within)]
        assert found.chosen.cost == min(one.cost for one in in_time)
        assert found.chosen in in_time


def test_equal_numbers_of_workers_are_no_division_by_zero() -> None:
    """With one prompt there is one candidate; with free workers all cost the same: the fewest are taken."""
    assert plan([500.0], workers(4)).chosen.workers == 1
    free = workers(4, price=0.0)
    assert plan([500.0] * 8, free, time_weight=0.0).chosen.workers == 1


def test_unknown_lengths_count_as_the_median_of_the_known() -> None:
    assert known_tokens(np.array([NAN, 100, 300, NAN, 200]), 2048).tolist() == [200, 100, 300, 200, 200]
    assert known_tokens(np.array([NAN, NAN]), 2048).tolist() == [2048, 2048]
    assert known_tokens(np.array([-1, math.inf, 5000]), 2048).tolist() == [1, 2048, 2048]
    assert plan([NAN, 900.0, 100.0], workers(1)).parts["w0"].tolist() == [1, 0, 2]


def test_what_cannot_be_hidden_decides_for_the_number_of_workers_that_violates_least() -> None:
    """A far worker with as many prompts as the near one cannot end with it, whatever time and cost say."""
    pool = workers(3)
    pool[2] = pool[2]._replace(transfer_s=30.0)
    found = plan([400.0] * 30, pool, parts="even", time_weight=1.0)
    assert [one.violation_s > 1 for one in found.forecasts] == [False, False, True]
    assert found.chosen.workers == 2
    pool[1] = pool[1]._replace(transfer_s=5.0)
    found = plan([400.0] * 30, pool, least=2, parts="even", time_weight=1.0)
    assert found.chosen.workers == 2
    assert "hides its transfers" in found.why


def test_a_worker_that_would_come_too_late_gets_nothing_by_balanced() -> None:
    pool = workers(3)
    pool[2] = pool[2]._replace(ready_in_s=500.0, exists=False)
    found = plan([400.0] * 30, pool, choose="fixed")
    assert set(found.parts) == {"w0", "w1"}
    assert found.chosen.violation_s <= 1e-9


def test_the_nearer_workers_get_the_longer_parts() -> None:
    pool = workers(3)
    pool[1] = pool[1]._replace(transfer_s=0.2)
    pool[2] = pool[2]._replace(transfer_s=0.1)
    assert list(plan([float(n) for n in range(100, 130)], pool, choose="fixed").parts) == ["w0", "w2", "w1"]


def test_without_any_measurement_all_workers_get_equal_parts_and_the_plan_says_so() -> None:
    found = plan([float(n) for n in range(1, 31)], workers(3, latency=EMPTY))  # pyright: ignore[reportArgumentType]
    assert [len(part) for part in found.parts.values()] == [10, 10, 10]
    assert found.longest == "w0"
    assert not found.forecasts
    assert "nothing has been measured yet" in found.why


def test_a_slower_worker_gets_less() -> None:
    slow: LatencyTable = linear(0.016, 0.0002)
    pool = workers(3)
    pool[2] = pool[2]._replace(latency=slow)
    parts = plan([300.0] * 60, pool, choose="fixed").parts
    assert len(parts["w2"]) < len(parts["w1"])


def test_nothing_to_plan_is_a_plan() -> None:
    for found in (plan([], workers(2)), plan([100.0], [])):
        assert not found.parts
        assert found.longest is None


def test_the_bill_counts_sleep_and_rounds_up_the_life_of_a_worker_that_is_started() -> None:
    pool = [worker._replace(exists=False) for worker in workers(2)]
    tokens = [900.0] * 4 + [100.0] * 4
    exact, rounded, sleep = (
        plan(tokens, pool, choose="fixed", parts="even", bill=bill)
        for bill in (BillingRule(asleep_price=0.0), BillingRule(10.0, 0.0), BillingRule(asleep_price=1.0))
    )
    assert exact.chosen.cost == pytest.approx(sum(exact.ends_s.values()))
    assert rounded.chosen.cost == 20.0
    assert sleep.chosen.cost == pytest.approx(2 * sleep.chosen.seconds)


def test_many_prompts_are_planned_in_neighbours() -> None:
    tokens = np.random.default_rng(0).lognormal(5.6, 0.5, 3000).tolist()
    for parts in ("even", "balanced"):
        found = plan(tokens, workers(8, slots=64), parts=parts, choose="fixed")
        assert sorted(np.concatenate(list(found.parts.values())).tolist()) == list(range(3000))
        if parts == "even":
            assert {len(part) for part in found.parts.values()} == {375}


def test_of_very_many_workers_some_numbers_are_compared_the_least_and_the_largest_among_them() -> None:
    found = plan([300.0] * 200, workers(100))
    compared = [one.workers for one in found.forecasts]
    assert len(compared) == TRIED
    assert (compared[0], compared[-1]) == (1, 100)


@pytest.mark.parametrize("parts", ["even", "balanced"])
def test_a_step_of_512_prompts_is_planned_for_up_to_32_workers_in_less_than_100_ms(parts: Parts) -> None:
    """Processor time, the best of ten; by itself it takes 20 ms, beside others that share its cores twice that."""
    tokens = np.random.default_rng(1).lognormal(5.6, 0.5, 512).tolist()
    pool = [worker._replace(latency=linear(0.008 + 1e-4 * i)) for i, worker in enumerate(workers(32, slots=64))]
    some, taken_s = view(tokens, pool, parts=parts), list[float]()
    for _ in range(10):
        began_s = time.process_time()
        decide(some, now=0.0)
        taken_s.append(time.process_time() - began_s)
    assert min(taken_s) < 0.100


def test_who_is_there_gets_the_longest_prompts_though_nobody_knows_yet_how_long_a_start_takes() -> None:
    asleep, new = workers(2, ready_in_s=0.5)
    pool = [asleep._replace(beside_trainer=False), new._replace(exists=False, ready_in_s=0.0)]
    found = plan([300.0, 200.0, 100.0], pool, choose="fixed", parts="even")
    assert found.longest == asleep.name
