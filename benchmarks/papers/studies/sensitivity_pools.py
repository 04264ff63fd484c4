"""Rollout instances on H20 and on H800, for the same money: dispatch by each one's own latencies, or as if all alike.

money of the H800 pool ─▶ a share for H20 ─▶ instances ─┬─▶ own tables     over equal shares on the same pool
                                                        ├─▶ all alike      (upper panels)
                                                        └─▶ equal shares   over those on H800 (lower panels)
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from actors.policies.assigning.generation_time import Instance
from benchmarks.papers.cluster.costs import MACHINE_DEVICES
from benchmarks.papers.cluster.generation import Dispatching, generate
from benchmarks.papers.setups.hardware import Device
from benchmarks.papers.setups.sensitivity import PoolSweep
from benchmarks.papers.setups.streamrl import H20, H800, MODELS, ModelName
from benchmarks.papers.studies.streamrl_bench import Bench, bench
from benchmarks.papers.sweep import Panel, Sweep


def pools(study: PoolSweep, seed: int) -> Sweep:
    """Samples a second of generation."""
    same_pool, same_money, also = list[Panel](), list[Panel](), dict[str, float]()
    for name in study.models:
        draws = [_rates(study, name, seed + i) for i in range(study.draws)]
        rates = {policy: np.array([draw[policy] for draw in draws]).T for policy in draws[0]}
        plain = rates["equal_shares"]
        over_plain = {policy: rate / plain for policy, rate in rates.items() if policy != "equal_shares"}
        title = f"{name}, {study.variant}"
        same_pool.append(Panel(name, title, "equal shares on the same pool", over_plain))
        over_first = {policy: rate / plain[0] for policy, rate in rates.items()}
        same_money.append(Panel(f"{name}.money", title, "equal shares on the first pool", over_first))
        own = rates["own_tables"].mean(axis=1)
        also[f"{name}.mixed_over_worse_pool.least"] = float(own[1:-1].min() / min(own[0], own[-1]))
        alike = rates["all_alike"].mean(axis=1)
        also[f"{name}.own_tables_over_all_alike.least"] = float((own / alike).min())
    points = [f"{share:.0%}".removesuffix("%") for share in study.shares]
    panels = [*same_pool, *same_money]
    return Sweep("% of the money in H20, the rest in H800", points, panels, also)


def _rates(study: PoolSweep, name: ModelName, seed: int) -> dict[str, list[float]]:
    one = bench(study.workload, MODELS[name], study.variant, seed)
    devices = bench(study.workload, MODELS[name], study.workload.split_variant, seed).split().rollout
    rates: dict[str, list[float]] = {"own_tables": [], "all_alike": [], "equal_shares": []}
    for share in study.shares:
        pool = _pool(one, devices, share)
        told: dict[str, tuple[Dispatching, list[Instance]]] = {
            "own_tables": ("hindsight", pool),
            "all_alike": ("hindsight", [max(pool, key=pool.count)] * len(pool)),
            "equal_shares": ("random", pool),
        }
        for policy, (how, believed) in told.items():
            rates[policy].append(study.workload.samples / _generation_s(one, pool, how, believed))
    return rates


def _pool(one: Bench, devices: int, share: float) -> list[Instance]:
    """Whole instances of either kind that cost what ``devices`` H800 cost."""
    tensor_parallel = one.model.transformer.tensor_parallel

    def instance_price(device: Device) -> float:
        return device.machine_price / MACHINE_DEVICES * tensor_parallel

    money = devices // tensor_parallel * instance_price(H800)
    counts = {H20.name: int(share * money / instance_price(H20) + 1e-9)}
    counts[H800.name] = int((money - counts[H20.name] * instance_price(H20)) / instance_price(H800) + 1e-9)
    return [
        instance
        for device in (H20, H800)
        for instance in replace(one, rollout_device=device).pool(counts[device.name] * tensor_parallel)
    ]


def _generation_s(one: Bench, pool: list[Instance], how: Dispatching, believed: list[Instance]) -> float:
    """Mean over the iterations."""
    total_s = 0.0
    for k in range(one.workload.iterations):
        lengths, rng = one.lengths(k), np.random.default_rng([one.seed, k, 1])
        estimates, past = one.estimates(lengths, rng), one.past(k)
        finished_s = generate(
            pool, lengths, one.workload.prompt_tokens,
            dispatching=how, estimates=estimates, rng=rng, past=past, believed=believed,
        )  # fmt: skip
        total_s += float(finished_s.max())
    return total_s / one.workload.iterations
