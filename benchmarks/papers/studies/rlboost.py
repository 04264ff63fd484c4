"""RLBoost in simulation: the same policies as live, on a cluster whose time is modelled (``cluster/hybrid.py``)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

from benchmarks.papers.cluster.hybrid import HOUR_S, HybridCluster, Options, StepFigures
from benchmarks.papers.setups.rlboost import (
    HYBRID,
    HybridModel,
    HybridSetup,
    MigrationStudy,
    SeedingStudy,
    SpotStudy,
    StaticStudy,
)
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
        steps = settled(model, setup, Options(target=workers), workers, setup.steps, seed)
        tokens_s = rate(steps)
        at = f"n{workers}"
        measures[f"{at}.speedup"] = tokens_s / base.tokens_s
        measures[f"{at}.cost_per_token_ratio"] = base.tokens_per_dollar / per_dollar(steps)
        measures[f"{at}.efficiency"] = per_dollar(steps) / base.tokens_per_dollar
        measures[f"{at}.seed_s"] = sum(step.seed_s for step in steps) / len(steps)
        measures[f"{at}.target"] = sum(step.target for step in steps) / len(steps)
        measures[f"{at}.step_s"] = sum(step.seconds for step in steps) / len(steps)
    return measures


def seeding(study: SeedingStudy, seed: int) -> dict[str, float]:
    """Throughput from a loss of most workers until all are back, in the last of several such losses."""
    model = HYBRID[study.model]
    variants = {
        "seeding": Options(target=study.workers),
        "no_memory": Options(target=study.workers, remember=False),
        "no_seeding": Options(target=study.workers, seeding=False),
    }
    rates = {name: _through_losses(study, model, options, seed) for name, options in variants.items()}
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
    whole = read_trace(ROOT / study.trace).kept(study.part, seed)
    measures: dict[str, float] = {}
    parts = segments(whole, study.segment_s)
    for name, part in parts.items():
        measures[f"{name}.nodes_mean"] = part.nodes_mean
        measures[f"{name}.preemptions"] = float(part.preemptions)
    for model_name in study.models:
        model = HYBRID[model_name]
        base = colocated(model, study.setup, seed)
        gains: list[tuple[float, float]] = []
        for name, part in parts.items():
            steps = over(model, study.setup, part, seed)
            gain = rate(steps) / base.tokens_s, per_dollar(steps) / base.tokens_per_dollar
            gains.append(gain)
            at = f"{model_name}.{name}"
            measures |= {f"{at}.speedup": gain[0], f"{at}.efficiency": gain[1]}
            measures[f"{at}.remote_mean"] = sum(s.remote_mean * s.seconds for s in steps) / sum(
                s.seconds for s in steps
            )
        measures[f"{model_name}.speedup"] = sum(gain[0] for gain in gains) / len(gains)
        measures[f"{model_name}.efficiency"] = sum(gain[1] for gain in gains) / len(gains)
    return measures


# ------------------------------------------------------------ parts of a trace


def segments(trace: Trace, length_s: float) -> dict[str, Trace]:
    """A: the part with the most machines; B: with the fewest; C: of those that touch neither, the middle one.

    Chosen by mean machines among parts that begin every half hour; nothing else is looked at.
    """
    starts = [1800.0 * i for i in range(int((trace.length_s - length_s) // 1800) + 1)]
    parts = sorted((trace.between(s, s + length_s).nodes_mean, s) for s in starts)
    best, worst = parts[-1][1], parts[0][1]
    apart = [s for _, s in parts if min(abs(s - best), abs(s - worst)) >= length_s] or [parts[len(parts) // 2][1]]
    chosen = {"A": best, "B": worst, "C": apart[len(apart) // 2]}
    return {name: trace.between(start, start + length_s) for name, start in chosen.items()}


# ------------------------------------------------------------ runs


class Base:
    """The reserved machines alone."""

    def __init__(self, steps_s: Sequence[float], train_s: Sequence[float], tokens: Sequence[int], price: float) -> None:
        self.step_s, self.train_s = sum(steps_s) / len(steps_s), sum(train_s) / len(train_s)
        self.tokens = sum(tokens) / len(tokens)
        self.tokens_s = self.tokens / self.step_s
        self.tokens_per_dollar = self.tokens_s * HOUR_S / price
        self.rollout_share = 1 - self.train_s / self.step_s


def colocated(model: HybridModel, setup: HybridSetup, seed: int) -> Base:
    """As colocated trainers use them."""
    cluster = HybridCluster(model, setup, Options(), seed=seed)
    steps_s, train_s, tokens = list[float](), list[float](), list[int]()
    for _ in range(max(4, setup.steps // 3)):
        samples = cluster.draw()
        tokens.append(sum(s.prompt_tokens + s.length for s in samples))
        train_s.append(cluster.train_s(samples))
        steps_s.append(cluster.colocated_step_s(samples))
    return Base(steps_s, train_s, tokens, model.machines * setup.reserved_price)


def settled(
    model: HybridModel, setup: HybridSetup, options: Options, workers: int, steps: int, seed: int
) -> list[StepFigures]:
    """The last third of a run with ``workers`` that stay."""
    cluster = HybridCluster(model, setup, options, seed=seed)
    cluster.place_now(workers)
    done = [cluster.step(cluster.draw()) for _ in range(steps)]
    return done[-max(1, steps // 3) :]


def rate(steps: Sequence[StepFigures]) -> float:
    return sum(step.tokens for step in steps) / sum(step.seconds for step in steps)


def per_dollar(steps: Sequence[StepFigures]) -> float:
    return sum(step.tokens for step in steps) / sum(step.cost for step in steps)


def _through_losses(study: SeedingStudy, model: HybridModel, options: Options, seed: int) -> float:
    cluster = HybridCluster(model, study.setup, options, seed=seed)
    cluster.place_now(study.workers)
    for _ in range(study.warm_steps):
        cluster.step(cluster.draw())
    measured: list[StepFigures] = []
    for round_ in range(study.rounds):
        began_s = cluster.now_s
        names = list(cluster.remote)[: study.lost]
        events = [TraceEvent(began_s, name, "kill") for name in names]
        events += [
            TraceEvent(began_s + (i + 1) * study.return_every_s, f"back-{round_}.{i}", "up") for i in range(study.lost)
        ]
        cluster.expect(events)
        measured = []
        while cluster.now_s < began_s + (study.lost + 1) * study.return_every_s:
            measured.append(cluster.step(cluster.draw()))
    return rate(measured)


def _warm(study: MigrationStudy, seed: int) -> HybridCluster:
    """A cluster whose window has settled, before the step that is measured."""
    cluster = HybridCluster(HYBRID[study.model], study.setup, Options(target=study.workers), seed=seed)
    cluster.place_now(study.workers)
    for _ in range(study.warm_steps):
        cluster.step(cluster.draw())
    return cluster


def _overhead_s(study: MigrationStudy, past: HybridCluster, at_s: float, keep: bool) -> float:
    """Of one step: with the preemption less without it. Both have the same samples and the same past."""
    seconds: list[float] = []
    for lost in (study.lost, 0):
        cluster = copy.deepcopy(past)
        cluster.options.keep_tokens = keep
        cluster.expect([TraceEvent(cluster.now_s + at_s, name, "kill") for name in list(cluster.remote)[:lost]])
        seconds.append(cluster.step(cluster.draw()).seconds)
    return seconds[0] - seconds[1]


def over(
    model: HybridModel, setup: HybridSetup, part: Trace, seed: int, *, keep_tokens: bool = True
) -> list[StepFigures]:
    """Steps that begin within the part."""
    cluster = HybridCluster(model, setup, Options(keep_tokens=keep_tokens), part.events, seed)
    done: list[StepFigures] = []
    while cluster.now_s < part.length_s:
        done.append(cluster.step(cluster.draw()))
    return done
