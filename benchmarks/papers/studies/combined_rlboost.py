"""The combined policy against RLBoost's own on RLBoost's scenarios, and against the clairvoyant bound.

same samples, machines, cost models ─┬─▶ RLBoost's rules                       (hybrid.py)      ─┐
                                     ├─▶ streaming, ranking, hand-over, price  (combined.py)    ─┼─▶ ratios
                                     └─▶ true lengths and trace known          (clairvoyant/)   ─┘
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.papers.cluster.clairvoyant.ends import earliest_ends_s, least_cost
from benchmarks.papers.cluster.clairvoyant.least_work import Demand, Kind, demand, token_costs
from benchmarks.papers.cluster.clairvoyant.supply import Supply, of_trace
from benchmarks.papers.cluster.combined import CombinedCluster, Figures, Rules
from benchmarks.papers.cluster.hybrid import Hybrid
from benchmarks.papers.cluster.lengths import ranked
from benchmarks.papers.setups.combined import CombinedSpotStudy, CombinedStaticStudy
from benchmarks.papers.setups.rlboost import HYBRID, HybridModel, HybridSetup
from benchmarks.papers.setups.streamrl import Ranker
from benchmarks.papers.studies import rlboost
from benchmarks.papers.traces import kept
from supervisors.providers.trace_files import read_trace
from supervisors.providers.traces import Trace, TraceEvent


def static(study: CombinedStaticStudy, seed: int) -> dict[str, float]:
    """Fixed numbers of workers: tokens a second and a dollar against RLBoost's policy, means over the draws."""
    draws = [_static(study, one) for one in range(seed, seed + study.draws)]
    return {name: float(np.mean([draw[name] for draw in draws])) for name in draws[0]}


def _static(study: CombinedStaticStudy, seed: int) -> dict[str, float]:
    model, setup, measures = HYBRID[study.model], study.setup, dict[str, float]()
    for workers in study.workers:
        own, last = rlboost.settled(model, setup, workers, seed), rlboost.last_third(setup)
        there = that_stay(workers)
        job = HybridJob(model, replace_boot(setup), study.ranker, seed, study.staleness)
        figures = job.run(there, steps=setup.steps)
        measures |= _compared(f"n{workers}", job, figures, there, own, last)
    return measures


def spot(study: CombinedSpotStudy, seed: int) -> dict[str, float]:
    """Parts of a real trace: the same against RLBoost's policy, each part and their mean."""
    parts = rlboost.segments(kept(read_trace(rlboost.ROOT / study.trace), study.part, seed), study.segment_s)
    measures: dict[str, float] = {}
    for name in study.models:
        for segment, part in parts.items():
            own = rlboost.over(HYBRID[name], study.setup, part, seed)
            job = HybridJob(HYBRID[name], study.setup, study.ranker, seed, study.staleness)
            fits = len(job.run(part, until_s=part.length_s).ends_s)
            figures = job.run(part, steps=fits)  # a job knows which of its steps is the last
            measures |= _compared(f"{name}.{segment}", job, figures, part, own)
        for what in ("over_rlboost", "per_dollar_over_rlboost", "of_bound", "per_dollar_of_bound"):
            measures[f"{name}.{what}"] = float(np.mean([measures[f"{name}.{segment}.{what}"] for segment in parts]))
    return measures


def that_stay(workers: int) -> Trace:
    """Machines that are there from the beginning and never leave."""
    events = tuple(TraceEvent(0.0, f"fixed-{i}", "up") for i in range(workers))
    return Trace("fixed", events, float("inf"))


def replace_boot(setup: HybridSetup) -> HybridSetup:
    """Workers that are there from the beginning have booted."""
    return setup.model_copy(update={"boot_s": 1e-9})


@dataclass(frozen=True, slots=True)
class HybridJob:
    """Runs one of RLBoost's models on its machines, under the combined policy."""

    model: HybridModel
    setup: HybridSetup
    ranker: Ranker
    seed: int
    staleness: int

    def run(self, trace: Trace, *, steps: int | None = None, until_s: float = float("inf")) -> Figures:
        hybrid, rules = Hybrid(self.model, self.setup, self.seed), Rules(self.staleness)
        if not self.staleness:  # nothing fills time to spare, all contexts begin short, and the trainer is to be fed
            slack_s = -self.setup.switch_s
            rules = Rules(0, order="both_ends", slack_s=slack_s, learns=True, booked=0.45, look_every_s=5.0)
        machines, expect = hybrid.machines(early=self.setup.early), ranked(self.ranker, self.seed)
        return CombinedCluster(machines, rules, hybrid.draw, expect, trace.events).run(steps=steps, until_s=until_s)

    def bounds(self, figures: Figures, trace: Trace) -> tuple[float, float]:
        """Seconds and dollars that the steps of a run take at least."""
        setup, hybrid = self.setup, Hybrid(self.model, self.setup)
        least = token_costs([Kind(hybrid.instance)], setup.prompt_tokens, np.concatenate(figures.lengths))
        demands: list[Demand] = []
        for lengths in figures.lengths:
            train_s = hybrid.train_each_s(lengths + setup.prompt_tokens)
            demands.append(demand(least, lengths, train_s, setup.group_size, setup.early))
        supply = Supply(
            local=hybrid.local,
            others_s=of_trace(trace, setup.boot_s + hybrid.pull_s(1)),
            step_s=setup.train.step_s,
            step_engines=hybrid.local,
            staleness=self.staleness,
            switch_s=setup.switch_s,
            pull_s=hybrid.pull_s(1),
        )
        end_s = earliest_ends_s(demands, supply)[-1]
        hour_s = 3600
        prices = self.model.machines * setup.reserved_price / hour_s, setup.spot_price / hour_s
        return end_s, least_cost(demands, supply, *prices)


def _compared(
    at: str, job: HybridJob, figures: Figures, trace: Trace, own: Figures, last: int | None = None
) -> dict[str, float]:
    """``last``: as many steps, the newest, are held against RLBoost's; the bound is always of the whole run."""
    bound_s, bound_dollars = job.bounds(figures, trace)
    over_s, over_dollars = (ours / theirs for ours, theirs in zip(figures.rates(last), own.rates(last), strict=True))
    return {
        f"{at}.over_rlboost": over_s,
        f"{at}.per_dollar_over_rlboost": over_dollars,
        f"{at}.of_bound": bound_s / figures.ends_s[-1],
        f"{at}.per_dollar_of_bound": bound_dollars / figures.costs[-1],
        f"{at}.remote_mean": figures.rented_s / figures.ends_s[-1],
    }
