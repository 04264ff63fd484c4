"""What planned steps cost by a provider's bill, where a start takes a while and a worker that waits is paid for.

    reserved   the baseline's workers, awake from the first step to the last; siblings share prefills, as with all
    gone       each worker ends when it has nothing left, and is started for the next step, ahead of its plan
    asleep     each worker that is ever used stays, asleep while it has nothing

A bill counts lives (``actors/policies/planning/bill.py``); starts are ordered by ``prewarm.py``. A start that takes
longer than the rest of a step delays the next one. GRPO, 3B, GSM8K.
"""

from __future__ import annotations

import numpy as np

from actors.policies.planning import prewarm
from actors.policies.planning.bill import BilledLife, BillingRule, bill
from actors.policies.planning.prewarm import PrewarmView
from benchmarks.papers.setups.rlhfless import SITES, TASKS, BillStudy
from benchmarks.papers.studies.rlhfless_bench import Bench, Totals, policies

SEARCHED_S = 600.0
"""Longest start that the break-even is sought up to."""


def bills(study: BillStudy, seed: int) -> dict[str, float]:
    """By policy and by what becomes of a worker between its steps."""
    bench = Bench(SITES["3B"], study.setup, SITES["3B"].machines)
    totals = {
        name: bench.draws(TASKS["gsm8k"], study.siblings, policy, seed)
        for name, policy in policies(study.setup).items()
        if name in ("prefill", "paper", "balanced", "pareto")
    }
    rest_s = study.rest * totals["prefill"].seconds / len(totals["prefill"].generated)
    reserved_s, reserved_cost = _reserved(totals.pop("prefill"), rest_s)
    measures = {"rest_s": rest_s}
    for name, total in totals.items():
        for cold_s in study.cold_starts_s:
            seconds, cost = _gone(study, total, rest_s, cold_s)
            measures[f"{name}.gone.{cold_s:g}.cost_cut_percent"] = 100 * (1 - cost / reserved_cost)
            measures[f"{name}.gone.{cold_s:g}.speedup"] = reserved_s / seconds
        for price in study.asleep_prices:
            cost = _asleep(study, total, rest_s, price)
            measures[f"{name}.asleep.{price:g}.cost_cut_percent"] = 100 * (1 - cost / reserved_cost)
        measures[f"{name}.break_even_cold_s"] = _break_even(study, total, rest_s, reserved_cost)
        asleep_cost = _asleep(study, total, rest_s, 0.1)
        measures[f"{name}.break_even_cold_over_asleep_s"] = _break_even(study, total, rest_s, asleep_cost)
    return measures


def _reserved(total: Totals, rest_s: float) -> tuple[float, float]:
    """Seconds of all steps, and worker-seconds of the workers that are there all the time."""
    seconds = total.seconds + rest_s * len(total.generated)
    return seconds, seconds * max(total.workers)


def _gone(study: BillStudy, total: Totals, rest_s: float, cold_s: float) -> tuple[float, float]:
    rule, cost, seconds = BillingRule(study.rounding_s), 0.0, 0.0
    for one in total.generated:
        view = PrewarmView(0.0, [rest_s], [cold_s], study.buffer_s, wanted=len(one.spans), ready=0)
        order = prewarm.decide(view, now=0.0)
        assert order is not None
        begins_s = max(rest_s, order.at_s + cold_s)
        cost += bill((BilledLife(order.at_s, begins_s + span.ended_s) for span in one.spans), rule)
        seconds += begins_s + one.seconds
    return seconds, cost


def _asleep(study: BillStudy, total: Totals, rest_s: float, price: float) -> float:
    """The k-th worker is awake until the k-th longest life of a step is over."""
    seconds = total.seconds + rest_s * len(total.generated)
    awake_s = np.zeros(max(total.workers))
    for one in total.generated:
        lives = sorted((span.ended_s for span in one.spans), reverse=True)
        awake_s[: len(lives)] += lives
    lives = [BilledLife(0.0, seconds, asleep_s=seconds - float(one)) for one in awake_s]
    return bill(lives, BillingRule(study.rounding_s, price))


def _break_even(study: BillStudy, total: Totals, rest_s: float, cost: float) -> float:
    """The start time above which ending workers is dearer than ``cost``, by bisection; 0: it always is."""
    low, high = 0.0, SEARCHED_S
    if _gone(study, total, rest_s, low)[1] > cost:
        return 0.0
    for _ in range(30):
        cold_s = (low + high) / 2
        low, high = (cold_s, high) if _gone(study, total, rest_s, cold_s)[1] <= cost else (low, cold_s)
    return low
