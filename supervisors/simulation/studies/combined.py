"""The combined policy against each paper's own on that paper's scenario, and against the clairvoyant bound.

same samples, machines, cost models ─┬─▶ the paper's policy            (pipeline.py, hybrid.py)   ─┐
                                     ├─▶ streaming, ranking, hand-over, price  (combined.py)      ─┼─▶ ratios
                                     └─▶ true lengths and trace known          (clairvoyant.py)   ─┘
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from actors.scheduler.policies import stage_balance
from actors.scheduler.policies.generation_time import Instance
from configs.studies.combined import CombinedSpotStudy, CombinedStaticStudy, CombinedStreamStudy
from configs.studies.rlboost import H100, HYBRID, HybridModel, HybridSetup
from configs.studies.streamrl import MODELS, Ranker
from supervisors.providers.trace_files import read_trace
from supervisors.providers.traces import Trace, TraceEvent
from supervisors.simulation.cluster import clairvoyant, costs
from supervisors.simulation.cluster.clairvoyant import Demand, Supply
from supervisors.simulation.cluster.combined import CombinedCluster, Figures, Machines, Rules
from supervisors.simulation.cluster.hybrid import HybridCluster, Options
from supervisors.simulation.cluster.lengths import estimate_lengths
from supervisors.simulation.cluster.moving_engine import Sample
from supervisors.simulation.studies import rlboost
from supervisors.simulation.studies.streamrl_bench import Bench, bench

_TRIED = 3
"""Splits by whole machines of which short runs choose."""
_SHORT_RUN = 10
"""Steps of a run that chooses a split."""
_OTHER_DRAWS = 1000
"""Added to the seed for the runs that choose a split."""

# ------------------------------------------------------------ StreamRL's scenario


def streamrl(study: CombinedStreamStudy, seed: int) -> dict[str, float]:
    """Samples a second against StreamRL's asynchronous mode, for every model and length."""
    measures: dict[str, float] = {}
    work = study.workload
    for name in study.models:
        own = bench(work, MODELS[name], work.split_variant, seed).split()
        for variant in study.variants:
            one = bench(work, MODELS[name], variant, seed)
            own_s = one.iterations_s(["async"], "simulated", rollout=own.rollout, train=own.train)["async"]
            split, figures = combined_stream(one, study.staleness)
            ends, combined_s = figures.ends_s, figures.steady_step_s()
            at = f"{name}.{variant}"
            measures |= {
                f"{at}.rollout_devices": float(split.rollout),
                f"{at}.train_devices": float(split.train),
                f"{at}.samples_s": work.samples / combined_s,
                f"{at}.over_streamrl": own_s / combined_s,
                f"{at}.over_streamrl_split_anew": fastest_async_s(one) / combined_s,
                f"{at}.of_bound": bound_stream_s(one, len(ends), study.staleness) / ends[-1],
            }
            # of a job so long that its first and its last step hardly count
            long_s = run_stream(one, split, study.staleness, study.long_steps).ends_s[-1]
            measures[f"{at}.of_bound_long"] = bound_stream_s(one, study.long_steps, study.staleness) / long_s
    return measures


def fastest_async_s(one: Bench) -> float:
    """An iteration of StreamRL's asynchronous mode, on the best split for these very lengths: its rule knows others."""
    unit, devices = costs.MACHINE_DEVICES, one.model.devices
    splits = (x for x in range(unit, devices, unit) if not (devices - x) % one.replica_devices)
    return min(one.iterations_s(["async"], "simulated", rollout=x, train=devices - x)["async"] for x in splits)


def combined_stream(one: Bench, staleness: int) -> tuple[stage_balance.Split, Figures]:
    """All iterations of the workload, on the devices split by throughput: overlapping steps have no tail to pay for."""
    split = split_stream(one, staleness)
    return split, run_stream(one, split, staleness, one.workload.iterations)


def split_stream(one: Bench, staleness: int) -> stage_balance.Split:
    """By the pace of short runs on other draws: the best of three by machines, and from there by ever fewer devices.

    The three are those that look best by the pace of full batches.
    """
    work, unit, devices = one.workload, costs.MACHINE_DEVICES, one.model.devices
    tp = one.model.transformer.tensor_parallel
    instance = _engine(one.pool(tp)[0], work.prompt_tokens)
    other = replace(one, seed=one.seed + _OTHER_DRAWS)
    batch_s = _full_batches_s(instance, other.lengths(0), work.prompt_tokens)

    @cache
    def step_s(rollout: int) -> float:
        split = stage_balance.Split(rollout, devices - rollout, 0.0)
        return run_stream(other, split, staleness, _SHORT_RUN).steady_step_s()

    by_machines = range(unit, devices, unit)
    ideal_s = {x: max(batch_s * tp / x, one.train_s(devices - x)) for x in by_machines}
    best = min(sorted(by_machines, key=lambda x: ideal_s[x])[:_TRIED], key=step_s)
    move = unit // 2
    while move >= tp:
        near = [x for x in (best, best - move, best + move) if tp <= x <= devices - one.replica_devices]
        best, move = min(near, key=step_s), move // 2
    return stage_balance.Split(best, devices - best, step_s(best))


def run_stream(one: Bench, split: stage_balance.Split, staleness: int, iterations: int) -> Figures:
    """A job of so many steps on devices split like that; those that train generate until the first hand-over."""
    work, shape, device = one.workload, one.model.transformer, one.rollout_device
    switch_s = one.moved_bytes / 2 / split.train / work.switch_bytes_s  # in, once: out again only where it goes back
    machines = Machines(
        instance=_engine(one.pool(shape.tensor_parallel)[0], work.prompt_tokens),
        fixed=split.rollout // shape.tensor_parallel,
        local=split.train // shape.tensor_parallel,
        train_s=lambda samples: float(one.train_each_s(split.train, np.array([s.length for s in samples])).sum()),
        step_s=work.train.step_s,
        pull_s=lambda _: costs.transfer_s(shape, device, split.rollout),
        load_s=0.0,
        switch_s=switch_s,
        least_s=one.saturating_s(split.train),
        longest_tokens=one.longest_tokens,
    )
    rules = Rules(staleness, slack_s=-switch_s, returns=False)

    def draw(step: int) -> list[Sample]:
        return [Sample(i, i, work.prompt_tokens, int(tokens)) for i, tokens in enumerate(one.lengths(step))]

    return CombinedCluster(machines, rules, draw, _ranked(work.ranker, one.seed)).run(steps=iterations)


def bound_stream_s(one: Bench, steps: int, staleness: int) -> float:
    """Any device may generate or train at any time, and change over for nothing."""
    devices, tp = one.model.devices, one.model.transformer.tensor_parallel
    supply = Supply(
        local=devices / tp,
        others_s=lambda begin_s, end_s: 0.0,
        step_s=one.workload.train.step_s,
        step_engines=one.replica_devices / tp,
        staleness=staleness,
    )
    return clairvoyant.earliest_ends_s(_demands(one, steps), supply)[-1]


def _demands(one: Bench, steps: int) -> list[Demand]:
    """The first steps' work, trained on all devices."""
    work = one.workload
    instance = _engine(one.pool(one.model.transformer.tensor_parallel)[0], work.prompt_tokens)
    demands: list[Demand] = []
    for k in range(steps):
        lengths = one.lengths(k)
        train_s = one.train_each_s(one.model.devices, lengths)
        demands.append(clairvoyant.demand(instance, work.prompt_tokens, lengths, train_s, 1))
    return demands


def _engine(instance: Instance, prompt_tokens: int) -> Instance:
    """With what is reserved for each response counted in places."""
    fit = int(instance.kv_tokens // (prompt_tokens + instance.reserve_tokens)) if instance.reserve_tokens else 1 << 30
    return replace(instance, places=max(1, min(instance.places, fit)), reserve_tokens=0)


def _full_batches_s(instance: Instance, lengths: np.ndarray, prompt_tokens: int) -> float:
    """One engine with all places taken, for samples like these: the profile of a stage that never runs empty."""
    tokens = lengths.astype(np.float64)
    context = float((tokens * (prompt_tokens + tokens / 2)).sum() / tokens.sum())
    return float(tokens.sum()) * instance.pace.step_s(instance.places, context) / instance.places


def _ranked(ranker: Ranker, seed: int) -> Callable[[int, Sequence[Sample]], np.ndarray]:
    def expect(step: int, samples: Sequence[Sample]) -> np.ndarray:
        lengths = np.array([s.length for s in samples], np.float64)
        return estimate_lengths(lengths, ranker, np.random.default_rng([seed, step, 1]))

    return expect


# ------------------------------------------------------------ RLBoost's scenarios


def static(study: CombinedStaticStudy, seed: int) -> dict[str, float]:
    """Fixed numbers of workers: tokens a second and a dollar against RLBoost's policy."""
    model, setup, measures = HYBRID[study.model], study.setup, dict[str, float]()
    for workers in study.workers:
        steps = rlboost.settled(model, setup, Options(target=workers), workers, setup.steps, seed)
        there = Trace("fixed", tuple(TraceEvent(0.0, f"fixed-{i}", "up") for i in range(workers)), float("inf"))
        job = HybridJob(model, replace_boot(setup), study.ranker, seed, study.staleness)
        figures = job.run(there, steps=setup.steps)
        own = rlboost.rate(steps), rlboost.per_dollar(steps)
        measures |= _compared(f"n{workers}", job, figures, there, *own, last=len(steps))
    return measures


def spot(study: CombinedSpotStudy, seed: int) -> dict[str, float]:
    """Parts of a real trace: the same against RLBoost's policy, each part and their mean."""
    parts = rlboost.segments(read_trace(rlboost.ROOT / study.trace).kept(study.part, seed), study.segment_s)
    measures: dict[str, float] = {}
    for name in study.models:
        for segment, part in parts.items():
            steps = rlboost.over(HYBRID[name], study.setup, part, seed)
            job = HybridJob(HYBRID[name], study.setup, study.ranker, seed, study.staleness)
            fits = len(job.run(part, until_s=part.length_s).ends_s)
            figures = job.run(part, steps=fits)  # a job knows which of its steps is the last
            rates = rlboost.rate(steps), rlboost.per_dollar(steps)
            measures |= _compared(f"{name}.{segment}", job, figures, part, *rates)
        for what in ("over_rlboost", "per_dollar_over_rlboost", "of_bound", "per_dollar_of_bound"):
            measures[f"{name}.{what}"] = float(np.mean([measures[f"{name}.{segment}.{what}"] for segment in parts]))
    return measures


def replace_boot(setup: HybridSetup) -> HybridSetup:
    """Workers that are there from the beginning have booted."""
    return setup.model_copy(update={"boot_s": 1e-9})


@dataclass(frozen=True, slots=True)
class HybridJob:
    """One of RLBoost's models on its machines, under the combined policy."""

    model: HybridModel
    setup: HybridSetup
    ranker: Ranker
    seed: int
    staleness: int

    def run(self, trace: Trace, *, steps: int | None = None, until_s: float = float("inf")) -> Figures:
        setup, like = self.setup, HybridCluster(self.model, self.setup, Options(), seed=self.seed)
        machines = Machines(
            instance=like.local[0].instance,
            fixed=0,
            local=len(like.local),
            train_s=like.train_s,
            step_s=setup.train.step_s,
            early=setup.early,
            pull_s=like.pull_s,
            load_s=setup.load_s,
            switch_s=setup.switch_s,
            start_s=setup.switch_s,
            boot_s=setup.boot_s,
            longest_tokens=self.model.lengths.max_tokens,
            reserved_price=self.model.machines * setup.reserved_price,
            spot_price=setup.spot_price,
            least_samples=setup.micro_batch_responses,
        )
        rules = Rules(self.staleness)
        if not self.staleness:  # nothing fills time to spare, and the trainer is to be fed early
            rules = Rules(0, order="both_ends", slack_s=0.0, learns=True, look_every_s=5.0)
        cluster = CombinedCluster(machines, rules, lambda _: like.draw(), _ranked(self.ranker, self.seed), trace.events)
        return cluster.run(steps=steps, until_s=until_s)

    def bounds(self, figures: Figures, trace: Trace) -> tuple[float, float]:
        """Seconds and dollars that the steps of a run take at least."""
        setup, like = self.setup, HybridCluster(self.model, self.setup, Options(), seed=self.seed)
        cost = setup.train.model_copy(update={"flops_use": self.model.train_flops_use})
        devices = self.model.machines * costs.MACHINE_DEVICES
        demands: list[Demand] = []
        for lengths in figures.lengths:
            tokens = lengths + setup.prompt_tokens
            train_s = costs.train_token_s(self.model.transformer, H100, cost, devices, tokens)
            instance = like.local[0].instance
            one = clairvoyant.demand(instance, setup.prompt_tokens, lengths, train_s, setup.group_size, setup.early)
            demands.append(one)
        on_policy = self.staleness == 0
        supply = Supply(
            local=len(like.local),
            others_s=clairvoyant.of_trace(trace, setup.boot_s + like.pull_s(1)),
            step_s=setup.train.step_s,
            step_engines=len(like.local),
            staleness=self.staleness,
            switch_s=2 * setup.switch_s if on_policy else 0.0,
        )
        ends = clairvoyant.earliest_ends_s(demands, supply)
        hour_s = 3600
        prices = self.model.machines * setup.reserved_price / hour_s, setup.spot_price / hour_s
        return ends[-1], clairvoyant.least_cost(demands, supply, *prices)


def _compared(
    at: str,
    job: HybridJob,
    figures: Figures,
    trace: Trace,
    own_rate: float,
    own_per_dollar: float,
    *,
    last: int | None = None,
) -> dict[str, float]:
    """``last``: as many steps, the newest, are held against RLBoost's; the bound is always of the whole run."""
    bound_s, bound_dollars = job.bounds(figures, trace)
    ends, costs_, first = [0.0, *figures.ends_s], [0.0, *figures.costs], -1 - (last or len(figures.ends_s))
    tokens, seconds, dollars = sum(figures.tokens[first + 1 :]), ends[-1] - ends[first], costs_[-1] - costs_[first]
    return {
        f"{at}.over_rlboost": tokens / seconds / own_rate,
        f"{at}.per_dollar_over_rlboost": tokens / dollars / own_per_dollar,
        f"{at}.of_bound": bound_s / ends[-1],
        f"{at}.per_dollar_of_bound": bound_dollars / costs_[-1],
        f"{at}.remote_mean": figures.rented_s / ends[-1],
    }
