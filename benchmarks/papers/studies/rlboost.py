"""RLBoost in simulation: the same policies as live, on a cluster whose time is modelled (``cluster/hybrid.py``)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.papers.cluster.combined import CombinedCluster, Figures
from benchmarks.papers.cluster.hybrid import Hybrid
from benchmarks.papers.setups.rlboost import (
    HYBRID,
    HybridModel,
    HybridSetup,
    MigrationStudy,
    SeedingStudy,
    SpotStudy,
    StaticStudy,
)
from benchmarks.papers.traces import between, kept, nodes_mean, preemptions
from supervisors.providers.trace_files import read_trace
from supervisors.providers.traces import Trace, TraceEvent

ROOT = Path(__file__).resolve().parents[3]


def static(study: StaticStudy, seed: int) -> dict[str, float]:
    """Fixed numbers of remote workers; windows and targets as the policy settles on them."""
    model, setup = HYBRID[study.model], study.setup
    base = colocated(model, setup, seed)
    measures = {
        "colocated.step_s": base.step_s,
        "colocated.tokens_s": base.tokens_s,
        "colocated.train_s": base.train_s,
        "colocated.rollout_share": base.rollout_share,
        "tokens_millions": base.tokens / 1e6,
    }
    for workers in study.workers:
        figures, last = settled(model, setup, workers, seed), last_third(setup)
        tokens_s, per_dollar = figures.rates(last)
        windows, at = figures.windows[-last:], f"n{workers}"
        measures[f"{at}.speedup"] = tokens_s / base.tokens_s
        measures[f"{at}.cost_per_token_ratio"] = base.tokens_per_dollar / per_dollar
        measures[f"{at}.efficiency"] = per_dollar / base.tokens_per_dollar
        measures[f"{at}.seed_s"] = sum(seed_s for seed_s, _ in windows) / last
        measures[f"{at}.target"] = sum(target for _, target in windows) / last
        measures[f"{at}.step_s"] = (figures.ends_s[-1] - figures.ends_s[-1 - last]) / last
    return measures


def seeding(study: SeedingStudy, seed: int) -> dict[str, float]:
    """Throughput from a loss of most workers until all are back, in the last of several such losses."""
    workers = study.workers

    def job(*, remember: bool = True, fixed_s: float | None = None) -> CombinedCluster:
        hybrid = Hybrid(HYBRID[study.model], study.setup, seed)
        return hybrid.rlboost(workers=workers, target=workers, remember=remember, fixed_s=fixed_s)

    variants = {"seeding": job(), "no_memory": job(remember=False), "no_seeding": job(fixed_s=0.0)}
    rates = {name: _through_losses(study, cluster) for name, cluster in variants.items()}
    return {f"{name}.tokens_s": rate for name, rate in rates.items()} | {
        "without_seeding": rates["no_seeding"] / rates["seeding"] - 1,
        "memory_gain": rates["seeding"] / rates["no_memory"] - 1,
    }


def migration(study: MigrationStudy, seed: int) -> dict[str, float]:
    """How much of the delay that a preemption in mid-step causes is saved by going on from the tokens."""
    pasts = [_warm(study, seed + r) for r in range(study.repeats)]
    measures: dict[str, float] = {}
    for at_s in study.at_s:
        over = {
            keep: sum(_overhead_s(study, past, at_s, keep) for past in pasts) / len(pasts) for keep in (True, False)
        }
        measures[f"at_{at_s:.0f}s.overhead_s"] = over[True]
        measures[f"at_{at_s:.0f}s.overhead_recomputing_s"] = over[False]
        measures[f"at_{at_s:.0f}s.saved"] = 1 - over[True] / over[False]
    return measures


def spot(study: SpotStudy, seed: int) -> dict[str, float]:
    """Three parts of a real trace, for each model: against the reserved machines alone."""
    whole = kept(read_trace(ROOT / study.trace), study.part, seed)
    measures: dict[str, float] = {}
    parts = segments(whole, study.segment_s)
    for name, part in parts.items():
        measures[f"{name}.nodes_mean"] = nodes_mean(part)
        measures[f"{name}.preemptions"] = float(preemptions(part))
    for model_name in study.models:
        model = HYBRID[model_name]
        base = colocated(model, study.setup, seed)
        gains: list[tuple[float, float]] = []
        for name, part in parts.items():
            figures = over(model, study.setup, part, seed)
            tokens_s, per_dollar = figures.rates()
            gain = tokens_s / base.tokens_s, per_dollar / base.tokens_per_dollar
            gains.append(gain)
            at = f"{model_name}.{name}"
            measures |= {f"{at}.speedup": gain[0], f"{at}.efficiency": gain[1]}
            measures[f"{at}.remote_mean"] = figures.rented_s / figures.ends_s[-1]
        measures[f"{model_name}.speedup"] = sum(gain[0] for gain in gains) / len(gains)
        measures[f"{model_name}.efficiency"] = sum(gain[1] for gain in gains) / len(gains)
    return measures


# ------------------------------------------------------------ parts of a trace


def segments(trace: Trace, length_s: float) -> dict[str, Trace]:
    """A: the part with the most machines; B: with the fewest; C: of those that touch neither, the middle one.

    Chosen by mean machines among parts that begin every half hour; nothing else is looked at.
    """
    starts = [1800.0 * i for i in range(int((trace.length_s - length_s) // 1800) + 1)]
    parts = sorted((nodes_mean(between(trace, s, s + length_s)), s) for s in starts)
    best, worst = parts[-1][1], parts[0][1]
    apart = [s for _, s in parts if min(abs(s - best), abs(s - worst)) >= length_s] or [parts[len(parts) // 2][1]]
    chosen = {"A": best, "B": worst, "C": apart[len(apart) // 2]}
    return {name: between(trace, start, start + length_s) for name, start in chosen.items()}


# ------------------------------------------------------------ runs


class Base:
    """Says what the reserved machines come to alone."""

    def __init__(self, steps_s: Sequence[float], train_s: Sequence[float], tokens: Sequence[int], price: float) -> None:
        self.step_s, self.train_s = sum(steps_s) / len(steps_s), sum(train_s) / len(train_s)
        self.tokens = sum(tokens) / len(tokens)
        self.tokens_s = self.tokens / self.step_s
        self.tokens_per_dollar = self.tokens_s * 3600 / price
        self.rollout_share = 1 - self.train_s / self.step_s


def colocated(model: HybridModel, setup: HybridSetup, seed: int) -> Base:
    """As colocated trainers use them."""
    hybrid = Hybrid(model, setup, seed)
    steps_s, train_s, tokens = list[float](), list[float](), list[int]()
    for _ in range(max(4, setup.steps // 3)):
        samples = hybrid.draw()
        tokens.append(sum(s.prompt_tokens + s.length for s in samples))
        train_s.append(hybrid.train_s(samples))
        steps_s.append(hybrid.colocated_step_s(samples))
    return Base(steps_s, train_s, tokens, model.machines * setup.reserved_price)


def settled(model: HybridModel, setup: HybridSetup, workers: int, seed: int) -> Figures:
    """A run with ``workers`` that stay, whose last third is measured."""
    return Hybrid(model, setup, seed).rlboost(workers=workers, target=workers).run(steps=setup.steps)


def last_third(setup: HybridSetup) -> int:
    """Steps that are measured of a run with workers that stay."""
    return max(1, setup.steps // 3)


def over(model: HybridModel, setup: HybridSetup, part: Trace, seed: int, *, keep_tokens: bool = True) -> Figures:
    """Steps that begin within a part of a trace."""
    return Hybrid(model, setup, seed).rlboost(part.events, keep_tokens=keep_tokens).run(until_s=part.length_s)


def _through_losses(study: SeedingStudy, cluster: CombinedCluster) -> float:
    """Tokens a second from the last loss until all are back."""
    figures, before = cluster.run(steps=study.warm_steps), 0
    for round_ in range(study.rounds):
        began_s, before = cluster.now_s, len(figures.ends_s)
        lost, back_s = list(cluster.pool.spot)[: study.lost], study.return_every_s
        events = [TraceEvent(began_s, name, "kill") for name in lost]
        events += [TraceEvent(began_s + (i + 1) * back_s, f"back-{round_}.{i}", "up") for i in range(study.lost)]
        cluster.pool.expect(events)
        while cluster.now_s < began_s + (study.lost + 1) * back_s:
            cluster.run(steps=len(figures.ends_s) + 1)
    return figures.rates(len(figures.ends_s) - before)[0]


def _warm(study: MigrationStudy, seed: int) -> CombinedCluster:
    """A cluster whose window has settled, before the step that is measured."""
    hybrid = Hybrid(HYBRID[study.model], study.setup, seed)
    cluster = hybrid.rlboost(workers=study.workers, target=study.workers)
    cluster.run(steps=study.warm_steps)
    return cluster


def _overhead_s(study: MigrationStudy, past: CombinedCluster, at_s: float, keep: bool) -> float:
    """Seconds by which a preemption makes one step longer: the same samples and past, with it and without it."""
    seconds: list[float] = []
    for lost in (study.lost, 0):
        cluster = copy.deepcopy(past)
        cluster.rules = replace(cluster.rules, keep_tokens=keep)
        began_s, nodes = cluster.now_s, list(cluster.pool.spot)[:lost]
        cluster.pool.expect([TraceEvent(began_s + at_s, node, "kill") for node in nodes])
        seconds.append(cluster.run(steps=study.warm_steps + 1).ends_s[-1] - began_s)
    return seconds[0] - seconds[1]
