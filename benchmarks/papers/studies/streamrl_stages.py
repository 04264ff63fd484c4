"""StreamRL Figs. 6, 9, 10 and 11: latency of a token, ranking, the split of devices, and growth as outputs lengthen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from benchmarks.papers.cluster.costs import MACHINE_DEVICES, decode_pace
from benchmarks.papers.cluster.splits import should_grow
from benchmarks.papers.setups.streamrl import (
    H800,
    MODELS,
    SCALES,
    DecodeStudy,
    GrowthStudy,
    RankingStudy,
    SplitStudy,
)
from benchmarks.papers.studies.streamrl_bench import Bench, bench


def decode(study: DecodeStudy, seed: int) -> dict[str, float]:
    """Milliseconds a token of the 7B model on H800, by batch."""
    pace = decode_pace(MODELS["7B"].transformer, H800, study.decode)
    batches = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    return {f"batch_{b}_ms": 1e3 * pace.step_s(b, study.decode.table_context_tokens) for b in batches}


def ranking(study: RankingStudy, seed: int) -> dict[str, float]:
    """Generation time over that of random dispatch, on the rollout devices of Algorithm 1."""
    measures: dict[str, float] = {}
    for name in study.models:
        one = bench(study.workload, MODELS[name], study.variant, seed)
        devices = one.split().rollout
        times: dict[str, list[float]] = {}
        for k in range(study.workload.iterations):
            lengths = one.lengths(k)
            runs = {
                "random": one.generate(devices, lengths, "random", iteration=k),
                "ranker": one.generate(devices, lengths, "simulated", iteration=k),
                "oracle": one.generate(devices, lengths, "simulated", iteration=k, oracle=True),
                "longest_first": one.generate(devices, lengths, "longest_first", iteration=k),
                "closed_form": one.generate(devices, lengths, "closed_form", iteration=k),
            }
            for how, finished in runs.items():
                times.setdefault(how, []).append(float(finished.max()))
        means = {how: float(np.mean(seconds)) for how, seconds in times.items()}
        measures |= {f"{name}.{how}_over_random": seconds / means["random"] for how, seconds in means.items()}
        measures[f"{name}.random_s"] = means["random"]
    return measures


def split(study: SplitStudy, seed: int) -> dict[str, float]:
    """What Algorithm 1 chooses, and the two stages there and at even halves, over generation at even halves."""
    measures: dict[str, float] = {}
    for name in study.models:
        one = bench(study.workload, MODELS[name], study.variant, seed)
        chosen, half = one.split(), MODELS[name].devices // 2
        even_s = one.gen_s(half)
        measures |= {
            f"{name}.rollout_devices": float(chosen.rollout),
            f"{name}.train_devices": float(chosen.train),
            f"{name}.even_train": one.train_s(half) / even_s,
            f"{name}.chosen_rollout": one.gen_s(chosen.rollout) / even_s,
            f"{name}.chosen_train": one.train_s(chosen.train) / even_s,
            f"{name}.gain": max(even_s, one.train_s(half)) / chosen.iteration_s,
        }
    return measures


def growth(study: GrowthStudy, seed: int) -> dict[str, float]:
    """After which iterations the pool grows. The trainer is as large as balances the stages at the beginning."""
    low, high = SCALES[study.from_variant], SCALES[study.to_variant]
    first = Bench(study.workload, MODELS[study.model], low, seed)
    start_gen_s, start_lengths = first.gen_s(study.rollout_devices), first.lengths(0)
    train_devices = min(range(1, 129), key=lambda y: abs(_train_s(first, y, start_lengths) - start_gen_s))
    devices, grown = study.rollout_devices, list[int]()
    measures: dict[str, float] = {"train_devices": float(train_devices)}
    for k in range(study.steps):
        one = replace(first, scale=low + (high - low) * k / (study.steps - 1))
        lengths = one.lengths(k)
        gen_s = float(one.generate(devices, lengths, "simulated", iteration=k).max())
        train_s = _train_s(one, train_devices, lengths)
        measures[f"gap_{k + 1}_s"] = gen_s - train_s
        if should_grow(gen_s, train_s, rollout=devices, unit=MACHINE_DEVICES, gen_s=one.gen_s):
            devices += MACHINE_DEVICES
            grown.append(k + 1)
    never = float(study.steps + 1)
    points = {f"growth_{i + 1}_after": float(grown[i]) if i < len(grown) else never for i in range(3)}
    return measures | points | {"rollout_devices": float(devices), "times_grown": float(len(grown))}


def _train_s(one: Bench, devices: int, lengths: np.ndarray) -> float:
    return float(one.train_each_s(devices, lengths).sum()) + one.workload.train.step_s
