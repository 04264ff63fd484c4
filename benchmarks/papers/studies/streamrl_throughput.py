"""StreamRL Fig. 8, Tab. 3 and Fig. 12: throughput of the modes, part by part, and for its price."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.papers.cluster.costs import MACHINE_DEVICES
from benchmarks.papers.setups.streamrl import (
    H20,
    H800,
    MODELS,
    CostStudy,
    LadderStudy,
    ThroughputStudy,
)
from benchmarks.papers.studies.streamrl_bench import bench


def throughput(study: ThroughputStudy, seed: int) -> dict[str, float]:
    """Samples a second of each mode, and the ratios to the colocated baseline, for every model and length."""
    measures: dict[str, float] = {}
    for name in study.models:
        split = bench(study.workload, MODELS[name], study.workload.split_variant, seed).split()
        measures |= {f"{name}.rollout_devices": float(split.rollout), f"{name}.train_devices": float(split.train)}
        for variant in study.variants:
            one = bench(study.workload, MODELS[name], variant, seed)
            apart_s = one.iterations_s(
                ["minibatch", "dynamic", "one_step_barrier", "async"], "simulated",
                rollout=split.rollout, train=split.train,
            )  # fmt: skip
            colocated_s = one.colocated_s()
            at = f"{name}.{variant}"
            measures[f"{at}.colocated_samples_s"] = study.workload.samples / colocated_s
            measures |= {f"{at}.{mode}_samples_s": study.workload.samples / s for mode, s in apart_s.items()}
            measures |= {f"{at}.{mode}_over_colocated": colocated_s / s for mode, s in apart_s.items()}
    return measures


def ladder(study: LadderStudy, seed: int) -> dict[str, float]:
    """Throughput over the colocated baseline, as StreamRL's parts are added one after the other."""
    one = bench(study.workload, MODELS[study.model], study.variant, seed)
    split, base_s = one.split(), one.colocated_s()
    apart_s = one.iterations_s(["dynamic", "async"], "simulated", rollout=split.rollout, train=split.train)
    return {
        "skewness_aware": base_s / one.colocated_s("simulated"),
        "streaming": base_s / apart_s["dynamic"],
        "async": base_s / apart_s["async"],
    }


def cost(study: CostStudy, seed: int) -> dict[str, float]:
    """Asynchronous throughput for its price in two centres, over that in one."""
    model, measures = MODELS[study.model], dict[str, float]()
    price = {device.name: device.machine_price / MACHINE_DEVICES for device in (H20, H800)}
    one_price = model.devices * price["H800"]
    two_price = study.rollout_devices * price["H20"] + study.train_devices * price["H800"]
    split = bench(study.workload, model, study.workload.split_variant, seed).split()
    for variant in study.variants:
        one = bench(study.workload, model, variant, seed)
        two = replace(one, rollout_device=H20)
        one_s = one.iterations_s(["async"], "simulated", rollout=split.rollout, train=split.train)["async"]
        two_s = two.iterations_s(
            ["async"], "simulated",
            rollout=study.rollout_devices, train=study.train_devices, line_bytes_s=study.line_bytes_s,
        )["async"]  # fmt: skip
        measures[f"{variant}.two_centres_samples_s"] = study.workload.samples / two_s
        measures[f"{variant}.one_centre_samples_s"] = study.workload.samples / one_s
        measures[f"{variant}.cost_ratio"] = (one_s * one_price) / (two_s * two_price)
    return measures
