"""How many workers generate a step, and which prompts each of them gets (RLHFless, arXiv 2602.22718).

    PlanView ─▶ for N in workers_min .. workers_max: parts of the sorted prompts ─▶ predicted end and cost ─▶ StepPlan

Pure: the workers, expected lengths and the rule in, a plan out; the same live and in the studies of the paper.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from actors.policies.assigning.latency_table import LatencyTable, mean_table
from actors.policies.planning.bill import BillingRule
from actors.policies.planning.parts import Pace, PartEnds, balanced, even

SEARCHED = 256
"""Largest number of entries to divide; if there are more prompts, neighbours in the sorted order are merged."""

TRIED = 32
"""How many numbers of workers are compared, evenly spread if there are more."""


class PlanWorker(NamedTuple):
    """Describes a worker that could generate the step, or one that could be started for it."""

    name: str
    slots: int
    """Samples that the worker decodes at once."""
    latency: LatencyTable
    """Table of its decode steps as measured; empty: not measured yet, so the mean of the others is used."""
    prefill_token_s: float = 0.0
    ready_in_s: float = 0.0
    """Seconds until the worker is awake: 0 if it is, else what waking it or starting it takes."""
    transfer_s: float = 0.0
    """Seconds until weights and prompts are there; the nearer the worker, the fewer."""
    beside_trainer: bool = False
    price: float = 1.0
    """Price of an awake second, in any unit that is the same for all."""
    exists: bool = True
    """Whether the worker is there, if only asleep; else a life begins with its start, which is billed by itself."""
    kv_tokens: float = math.inf
    """Tokens that the KV cache holds; infinite: more than ``slots`` samples need, or unknown."""


@dataclass(frozen=True, slots=True)
class PlanRule:
    """Holds what the job file says under ``scheduling.plan``."""

    choose: Literal["lambda", "pareto", "fixed"] = "lambda"
    time_weight: float = 0.7
    within: float = 0.05
    parts: Literal["even", "balanced"] = "balanced"


@dataclass(frozen=True, slots=True)
class PlanView:
    """Holds what is known when a step is planned. Arrays have one entry for each waiting prompt, in the same order."""

    workers: Sequence[PlanWorker]
    """Workers in the order in which they would be taken."""
    expected_tokens: np.ndarray
    """Expected tokens of one response, float64[p]; NaN: unknown, which counts as the median of the known."""
    siblings: np.ndarray
    """Queued samples of each prompt, int32[p]."""
    prompt_tokens: np.ndarray
    """Tokens of each prompt, int32[p]."""
    workers_min: int
    workers_max: int
    max_tokens: int
    """Limit of a response's length."""
    rule: PlanRule
    bill: BillingRule


class Forecast(NamedTuple):
    """Predicts time and cost of the step with so many workers."""

    workers: int
    seconds: float
    """Seconds from the plan to the last token."""
    cost: float
    """Worker-seconds, each weighted with its worker's price."""
    violation_s: float
    """Seconds by which the worst worker ends after the one with the longest part, so that the transfer of weights and
    prompts is not hidden (B.7 of the paper: ``L_model + L_kv + L_decode_i <= L_prefill + L_decode_1``)."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Says which worker generates which prompts."""

    parts: dict[str, np.ndarray]
    """Worker → positions of its prompts, int32[n], those expected to be longest first. Workers that are not named get
    nothing. The first worker has the longest part."""
    ends_s: dict[str, float]
    """Worker → seconds from the plan until it is expected to end; NaN where nothing has been measured."""
    chosen: Forecast
    forecasts: Sequence[Forecast]
    """Forecasts that were compared, by number of workers, ascending; empty where nothing has been measured yet."""
    why: str
    """Reason in words, for people."""

    @property
    def longest(self) -> str | None:
        """Worker that has the longest part, which is never cut; None: there was nothing to plan."""
        return next(iter(self.parts), None)


def decide(view: PlanView, now: float) -> StepPlan:
    """The plan of one step. ``now`` is not used: all times of the view count from this moment."""
    prompts = len(view.expected_tokens)
    most = min(view.workers_max, len(view.workers), prompts)
    if most < 1:
        return StepPlan({}, {}, Forecast(0, 0.0, 0.0, 0.0), (), "no prompts wait" if not prompts else "no workers")
    least = max(1, min(view.workers_min, most))
    step = _Step(view)
    if step.table.empty:
        bounds, why = even(prompts, most), f"nothing has been measured yet: all {most} workers"
        return step.plan(_Candidate(Forecast(most, math.nan, math.nan, 0.0), step.order(most), bounds), (), why)
    counts = np.unique(np.linspace(least, most, min(TRIED, most - least + 1)).round()).astype(int).tolist()
    candidates = [step.candidate(count) for count in counts]
    chosen, why = _choose(view.rule, candidates)
    return step.plan(chosen, [candidate.forecast for candidate in candidates], why)


class _Candidate(NamedTuple):
    forecast: Forecast
    workers: list[PlanWorker]
    """Workers in the order of the parts."""
    bounds: list[int]
    """Position behind the last prompt of each part."""
    ends_s: Sequence[float] = ()


class _Step:
    """Holds the prompts of a view, longest first, and the common table of its workers."""

    def __init__(self, view: PlanView) -> None:
        self._view = view
        tokens = known_tokens(view.expected_tokens, view.max_tokens)
        self._sorted = np.argsort(-tokens, kind="stable")
        self.table = mean_table(worker.latency for worker in view.workers)
        self._thinned = math.ceil(len(tokens) / SEARCHED)
        starts = np.arange(0, len(tokens), self._thinned)
        siblings = np.maximum(view.siblings, 1)[self._sorted].astype(np.float64)
        lengths, prompts = tokens[self._sorted], view.prompt_tokens[self._sorted]
        self._siblings = np.add.reduceat(siblings, starts)
        self._tokens = np.add.reduceat(siblings * lengths, starts) / self._siblings
        self._prompt_tokens = np.add.reduceat(siblings * prompts, starts) / self._siblings
        self._prefilled = np.add.reduceat(prompts.astype(np.float64), starts)  # siblings share one prefill
        self._context_tokens = float(np.average(self._prompt_tokens + self._tokens / 2, weights=self._siblings))
        self._by_kind: dict[tuple[int, float, float], PartEnds] = {}

    def order(self, count: int) -> list[PlanWorker]:
        """The first ``count`` workers: those beside the trainer, then the nearest, then those to be started."""
        return sorted(
            self._view.workers[:count],
            key=lambda one: (not one.beside_trainer, not one.exists, one.ready_in_s + one.transfer_s),
        )

    def candidate(self, count: int) -> _Candidate:
        """The parts, and the forecast, for ``count`` workers."""
        workers, items = self.order(count), len(self._tokens)
        paces = [self._pace(worker, count) for worker in workers]
        if self._view.rule.parts == "even":
            bounds = even(len(self._sorted), count)
            cuts = [min(items, round(bound / self._thinned)) for bound in bounds[:-1]] + [items]
        else:
            cuts = balanced(items, paces)
            bounds = [min(len(self._sorted), cut * self._thinned) for cut in cuts]
        ends_s = [pace.end_s(*part) for pace, part in zip(paces, itertools.pairwise([0, *cuts]), strict=True)]
        seconds = max(ends_s)
        cost = sum(
            worker.price * self._charged(worker, end_s, seconds)
            for worker, end_s in zip(workers, ends_s, strict=True)
            if end_s
        )
        return _Candidate(Forecast(count, seconds, cost, seconds - ends_s[0]), workers, bounds, ends_s)

    def plan(self, chosen: _Candidate, forecasts: Sequence[Forecast], why: str) -> StepPlan:
        parts: dict[str, np.ndarray] = {}
        ends_s: dict[str, float] = {}
        ends = chosen.ends_s or [math.nan] * len(chosen.workers)
        spans = itertools.pairwise([0, *chosen.bounds])
        for worker, (first, beyond), end_s in zip(chosen.workers, spans, ends, strict=True):
            if beyond > first:
                parts[worker.name] = self._sorted[first:beyond].astype(np.int32)
                ends_s[worker.name] = end_s
        return StepPlan(parts, ends_s, chosen.forecast, forecasts, why)

    def _pace(self, worker: PlanWorker, count: int) -> Pace:
        """The common table at this worker's speed, as measured at about the batch that it would have."""
        kind = worker.slots, worker.kv_tokens, worker.prefill_token_s
        if kind not in self._by_kind:
            self._by_kind[kind] = PartEnds(
                self._tokens, self._siblings, self._prompt_tokens, self.table, worker.slots,
                self._prefilled * worker.prefill_token_s, worker.kv_tokens,
            )  # fmt: skip
        batch = min(worker.slots, self._siblings.sum() / count)
        own_s, common_s = (table.step_s(batch, self._context_tokens) for table in (worker.latency, self.table))
        factor = 1.0 if worker.latency.empty else own_s / common_s
        return Pace(self._by_kind[kind], factor, worker.ready_in_s + worker.transfer_s)

    def _charged(self, worker: PlanWorker, end_s: float, step_ends_s: float) -> float:
        """Seconds that are charged: until the part ends, then at the price of sleep until the step ends."""
        bill = self._view.bill
        return (end_s if worker.exists else bill.rounded(end_s)) + bill.asleep_price * (step_ends_s - end_s)


def known_tokens(expected_tokens: np.ndarray, max_tokens: int) -> np.ndarray:
    """Expected tokens, unknown ones as the median of the known, from 1 to the limit, float64[p]."""
    known = expected_tokens[~np.isnan(expected_tokens)]
    unknown = float(np.median(known)) if len(known) else float(max_tokens)
    return np.clip(np.where(np.isnan(expected_tokens), unknown, expected_tokens), 1.0, max(1.0, float(max_tokens)))


def _choose(rule: PlanRule, candidates: Sequence[_Candidate]) -> tuple[_Candidate, str]:
    """The best candidate by ``rule`` among those that hide their transfers; of equal ones, that of fewest workers."""
    if rule.choose == "fixed":
        return candidates[-1], "fixed"
    least = min(candidate.forecast.violation_s for candidate in candidates)
    hidden = [one for one in candidates if one.forecast.violation_s <= least + 1e-9 * one.forecast.seconds]
    why = f"; no number of workers hides its transfers, by {least:.3g} s at least" if least > 0 else ""
    seconds = np.array([candidate.forecast.seconds for candidate in hidden])
    cost = np.array([candidate.forecast.cost for candidate in hidden])
    if rule.choose == "pareto":
        in_time = seconds <= seconds.min() * (1 + rule.within)
        return hidden[int(np.argmin(np.where(in_time, cost, np.inf)))], f"pareto{why}"
    score = rule.time_weight * _scaled(seconds) + (1 - rule.time_weight) * _scaled(cost)
    return hidden[int(np.argmin(score))], f"lambda{why}"


def _scaled(values: np.ndarray) -> np.ndarray:
    """``values`` from 0 for the least to 1 for the largest; all 0 where they are equal."""
    spread = values.max() - values.min()
    return (values - values.min()) / spread if spread > 0 else np.zeros(len(values))
