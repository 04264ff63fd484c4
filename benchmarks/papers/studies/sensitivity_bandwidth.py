"""Slower and slower links for the weights: who waits for them, and for how long.

StreamRL's modes and the combined policy   over colocated stages, which move no weights between machines
RLBoost and the combined policy            over the reserved machines alone, which move none either
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from benchmarks.papers.setups.rlboost import HYBRID, HybridName
from benchmarks.papers.setups.sensitivity import BandwidthSweep
from benchmarks.papers.setups.streamrl import H800, MODELS, ModelName
from benchmarks.papers.studies import combined_streamrl, rlboost
from benchmarks.papers.studies.combined_rlboost import HybridJob, replace_boot, that_stay
from benchmarks.papers.studies.sensitivity_ranker import WARM_UP
from benchmarks.papers.studies.streamrl_bench import bench
from benchmarks.papers.sweep import Panel, Sweep

_MODES = ("dynamic", "one_step_barrier", "async")
_CALLED = {"dynamic": "sync", "one_step_barrier": "one_step_barrier", "async": "async"}


def bandwidth(study: BandwidthSweep, seed: int) -> Sweep:
    """Throughput at each bandwidth over a baseline that needs none."""
    seeds = range(seed, seed + study.draws)
    panels: list[Panel] = []
    for name in study.models:
        draws = [_stream(study, name, one) for one in seeds]
        title = f"StreamRL's set-up, {name}, {study.variant}"
        panels.append(_panel(f"streamrl.{name}", title, "colocated stages", draws))
    for name in study.hybrid:
        draws = [_hybrid(study, name, one) for one in seeds]
        title = f"RLBoost's set-up, {name}, {study.workers} workers"
        panels.append(_panel(f"rlboost.{name}", title, "reserved machines alone", draws))
    points = [f"÷{slower:g}" for slower in study.slower]
    return Sweep("bandwidth of the links for weights", points, panels)


def _panel(key: str, title: str, over: str, draws: list[dict[str, list[float]]]) -> Panel:
    return Panel(key, title, over, {policy: np.array([draw[policy] for draw in draws]).T for policy in draws[0]})


def _stream(study: BandwidthSweep, name: ModelName, seed: int) -> dict[str, list[float]]:
    work = study.workload.model_copy(update={"ranker": study.ranker})
    split = bench(work, MODELS[name], work.split_variant, seed).split()
    one = bench(work, MODELS[name], study.variant, seed)
    colocated_s = one.colocated_s()
    ratios: dict[str, list[float]] = {policy: [] for policy in (*_CALLED.values(), "combined")}
    for slower in study.slower:
        device = H800.model_copy(update={"network_bytes_s": H800.network_bytes_s / slower})
        at = replace(one, rollout_device=device)
        for mode, s in at.iterations_s(_MODES, "hindsight", rollout=split.rollout, train=split.train).items():
            ratios[_CALLED[mode]].append(colocated_s / s)
        _, figures = combined_streamrl.combined_stream(at, study.staleness)
        ratios["combined"].append(colocated_s / figures.steady_step_s())
    return ratios


def _hybrid(study: BandwidthSweep, name: HybridName, seed: int) -> dict[str, list[float]]:
    model = HYBRID[name]
    alone = rlboost.colocated(model, study.setup, seed).tokens_s
    ratios: dict[str, list[float]] = {"rlboost": [], "combined": []}
    for slower in study.slower:
        setup = study.setup.model_copy(
            update={
                "reserved_network_bytes_s": study.setup.reserved_network_bytes_s / slower,
                "remote_network_bytes_s": study.setup.remote_network_bytes_s / slower,
            }
        )
        own = rlboost.settled(model, setup, study.workers, seed)
        ratios["rlboost"].append(own.rates(rlboost.last_third(setup))[0] / alone)
        job = HybridJob(model, replace_boot(setup), study.ranker, seed, study.staleness)
        figures = job.run(that_stay(study.workers), steps=setup.steps)
        ratios["combined"].append(figures.rates(setup.steps - WARM_UP)[0] / alone)
    return ratios
