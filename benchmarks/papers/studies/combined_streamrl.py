"""The combined policy against StreamRL's asynchronous mode on the scenario of its Fig. 8, and against a clairvoyant.

same samples, devices, cost models ─┬─▶ StreamRL-Async             (pipeline.py)    ─┐
                                    ├─▶ steps that overlap         (combined.py)    ─┼─▶ ratios
                                    └─▶ true lengths known         (clairvoyant/)   ─┘

How many devices generate, and how many of them make an engine, is chosen as StreamRL's profiler does, by the best time
(section 1.4), with overlapping steps in place of stages:

    tensor parallelism ─▶ three splits, by the pace of full batches ─▶ short runs on other draws ─▶ ever smaller moves
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from actors.policies.assigning.generation_time import Instance
from benchmarks.papers.cluster import costs
from benchmarks.papers.cluster.clairvoyant.ends import earliest_ends_s
from benchmarks.papers.cluster.clairvoyant.least_work import Demand, Kind, demand, token_costs
from benchmarks.papers.cluster.clairvoyant.supply import Supply
from benchmarks.papers.cluster.combined import CombinedCluster, Figures, Machines, Rules
from benchmarks.papers.cluster.lengths import ranked
from benchmarks.papers.cluster.moving_engine import Sample
from benchmarks.papers.cluster.splits import Split
from benchmarks.papers.setups.combined import CombinedStreamStudy
from benchmarks.papers.setups.streamrl import MODELS
from benchmarks.papers.studies.streamrl_bench import Bench, bench

_TRIED = 3
"""Splits by whole machines of which short runs choose."""
_SHORT_RUN = 10
"""Steps of a run that chooses a split."""
_OTHER_DRAWS = 1000
"""Number added to the seed for the runs that choose a split."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A layout says how many devices of a job make an engine, and who generates and who trains."""

    at: Bench
    """Bench with engines of that many devices."""
    split: Split
    """Split with the time of a step in the runs that it was chosen by."""

    @property
    def tensor_parallel(self) -> int:
        return self.at.model.transformer.tensor_parallel


def streamrl(study: CombinedStreamStudy, seed: int) -> dict[str, float]:
    """Samples a second against StreamRL's asynchronous mode, for every model and length."""
    measures: dict[str, float] = {}
    work = study.workload
    for name in study.models:
        own = bench(work, MODELS[name], work.split_variant, seed).split()
        for variant in study.variants:
            one = bench(work, MODELS[name], variant, seed)
            own_s = one.iterations_s(["async"], "simulated", rollout=own.rollout, train=own.train)["async"]
            layout, figures = combined_stream(one, study.staleness)
            ends, combined_s = figures.ends_s, figures.steady_step_s()
            at = f"{name}.{variant}"
            measures |= {
                f"{at}.rollout_devices": float(layout.split.rollout),
                f"{at}.train_devices": float(layout.split.train),
                f"{at}.tensor_parallel": float(layout.tensor_parallel),
                f"{at}.samples_s": work.samples / combined_s,
                f"{at}.over_streamrl": own_s / combined_s,
                f"{at}.over_streamrl_chosen_anew": fastest_async_s(one) / combined_s,
                f"{at}.of_bound": bound_stream_s(one, len(ends), study.staleness) / ends[-1],
            }
            # of a job so long that its first and its last step hardly count
            long_s = run_stream(layout.at, layout.split, study.staleness, study.long_steps).ends_s[-1]
            measures[f"{at}.of_bound_long"] = bound_stream_s(one, study.long_steps, study.staleness) / long_s
    return measures


def fastest_async_s(one: Bench) -> float:
    """An iteration of StreamRL's asynchronous mode, with the best engines and split for these very lengths.

    Its rule knows others' lengths and splits by whole machines; here half ones are tried as well.
    """
    last, half = one.model.devices - one.fewest_train_devices, costs.MACHINE_DEVICES // 2
    return min(
        at.iterations_s(["async"], "simulated", rollout=x, train=one.model.devices - x)["async"]
        for tp, at in one.by_tensor_parallel().items()
        for x in range(max(tp, half), last + 1, max(tp, half))
    )


def combined_stream(one: Bench, staleness: int) -> tuple[Layout, Figures]:
    """All iterations of the workload, on devices laid out by throughput: overlapping steps have no tail to pay for."""
    layout = lay_out(one, staleness)
    return layout, run_stream(layout.at, layout.split, staleness, one.workload.iterations)


def lay_out(one: Bench, staleness: int) -> Layout:
    """The tensor parallelism whose best split has the fastest steps: from the paper's up, else down, while it pays.

    Raises:
        ValueError: the paper's engines do not hold a sample of these lengths.
    """
    by_size, own = one.by_tensor_parallel(), one.model.transformer.tensor_parallel
    if own not in by_size:
        raise ValueError(f"{own} devices of {one.rollout_device.name} hold no sample of {one.longest_tokens} tokens")
    best = Layout(one, split_stream(one, staleness))
    for sizes in ([tp for tp in by_size if tp > own], [tp for tp in reversed(by_size) if tp < own]):
        for tp in sizes:
            other = Layout(by_size[tp], split_stream(by_size[tp], staleness))
            if other.split.iteration_s >= best.split.iteration_s:
                break
            best = other
        if best.tensor_parallel != own:
            break
    return best


def split_stream(one: Bench, staleness: int) -> Split:
    """The split with the fastest steps in short runs on other draws: of three by machines, then by ever fewer devices.

    The three are those that look best by the pace of full batches.
    """
    work, unit, devices = one.workload, costs.MACHINE_DEVICES, one.model.devices
    tp = one.model.transformer.tensor_parallel
    instance = _engine(one.pool(tp)[0], work.prompt_tokens)
    other = replace(one, seed=one.seed + _OTHER_DRAWS)
    lengths = other.lengths(0)
    batch_s = _full_batches_s(instance, lengths, work.prompt_tokens)

    @cache
    def step_s(rollout: int) -> float:
        split = Split(rollout, devices - rollout, 0.0)
        return run_stream(other, split, staleness, _SHORT_RUN).steady_step_s()

    most = devices - one.fewest_train_devices
    by_machines = range(unit, most + 1, unit)
    ideal_s = {x: max(batch_s * tp / x, float(one.train_each_s(devices - x, lengths).sum())) for x in by_machines}
    best = min(sorted(by_machines, key=lambda x: ideal_s[x])[:_TRIED], key=step_s)
    move = max(tp, unit // 2)
    while move >= tp:
        near = [x for x in (best, best - move, best + move) if tp <= x <= most]
        before, best = best, min(near, key=step_s)
        move = move if best != before else move // 2
    return Split(best, devices - best, step_s(best))


def run_stream(one: Bench, split: Split, staleness: int, iterations: int) -> Figures:
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

    return CombinedCluster(machines, rules, draw, ranked(work.ranker, one.seed)).run(steps=iterations)


def bound_stream_s(one: Bench, steps: int, staleness: int) -> float:
    """Any device may generate or train at any time, in engines of any size, and change over for nothing.

    Of schedules whose engines keep cache free for the longest response of each sample, if ``workload.reserve`` says so.
    """
    supply = Supply(
        local=one.model.devices,
        others_s=lambda begin_s, end_s: 0.0,
        step_s=one.workload.train.step_s,
        step_engines=one.fewest_train_devices,
        staleness=staleness,
    )
    return earliest_ends_s(_demands(one, steps), supply)[-1]


def _demands(one: Bench, steps: int) -> list[Demand]:
    """The first steps' work, trained on all devices."""
    prompt_tokens, by_size = one.workload.prompt_tokens, one.by_tensor_parallel()
    kinds = [Kind(_engine(at.pool(tp)[0], prompt_tokens), tp) for tp, at in by_size.items()]
    by_step = [one.lengths(k) for k in range(steps)]
    least = token_costs(kinds, prompt_tokens, np.concatenate(by_step))
    return [demand(least, x, one.train_each_s(one.model.devices, x), 1) for x in by_step]


def _engine(instance: Instance, prompt_tokens: int) -> Instance:
    """The same engine with what is reserved for each response counted in places."""
    fit = int(instance.kv_tokens // (prompt_tokens + instance.reserve_tokens)) if instance.reserve_tokens else 1 << 30
    return replace(instance, places=max(1, min(instance.places, fit)), reserve_tokens=0)


def _full_batches_s(instance: Instance, lengths: np.ndarray, prompt_tokens: int) -> float:
    """One engine with all places taken, for samples like these: the profile of a stage that never runs empty."""
    tokens = lengths.astype(np.float64)
    context = float((tokens * (prompt_tokens + tokens / 2)).sum() / tokens.sum())
    return float(tokens.sum()) * instance.pace.step_s(instance.places, context) / instance.places
