"""As many spot machines as in a real trace, that live shorter and shorter: RLBoost, with and without migration.

trace ─▶ kept ─▶ shorter_lived ─▶ parts A, B, C ─▶ throughput over the reserved machines alone
"""

from __future__ import annotations

import numpy as np

from benchmarks.papers import traces
from benchmarks.papers.setups.rlboost import HYBRID, HybridName
from benchmarks.papers.setups.sensitivity import PreemptionSweep
from benchmarks.papers.studies import rlboost
from benchmarks.papers.studies.combined_rlboost import HybridJob
from benchmarks.papers.sweep import Panel, Sweep
from supervisors.providers.trace_files import read_trace
from supervisors.providers.traces import Trace


def preemptions(study: PreemptionSweep, seed: int) -> Sweep:
    """The draws are the parts of the trace; those that are best, worst and in the middle for as many machines."""
    whole = traces.kept(read_trace(rlboost.ROOT / study.trace), study.part, seed)
    parts_of = [rlboost.segments(traces.shorter_lived(whole, times, seed), study.segment_s) for times in study.times]
    panels = [_panel(study, name, parts_of, seed) for name in study.models]
    points = [f"×{times}" for times in study.times]
    also: dict[str, float] = {}
    for point, parts in zip(points, parts_of, strict=True):
        for part, trace in parts.items():
            also[f"{part}.preemptions.{point}"] = float(traces.preemptions(trace))
            also[f"{part}.nodes_mean.{point}"] = traces.nodes_mean(trace)
    for panel in panels:
        gain = panel.ratios["migrate"].mean(axis=1) / panel.ratios["recompute"].mean(axis=1)
        also[f"{panel.key}.migrate_over_recompute.least"] = float(gain.min())
        also |= {f"{panel.key}.migrate_over_recompute.{p}": float(g) for p, g in zip(points, gain, strict=True)}
    return Sweep("preemptions, of those in the trace", points, panels, also)


def _panel(study: PreemptionSweep, name: HybridName, parts_of: list[dict[str, Trace]], seed: int) -> Panel:
    alone = rlboost.colocated(HYBRID[name], study.setup, seed).tokens_s
    ratios: dict[str, list[list[float]]] = {"migrate": [], "recompute": [], "combined": []}
    for parts in parts_of:
        rates = [_rates(study, name, part, seed) for part in parts.values()]
        for policy, of_points in ratios.items():
            of_points.append([rate[policy] / alone for rate in rates])
    title = f"{name}, parts A, B and C of the trace"
    return Panel(name, title, "reserved machines alone", {policy: np.array(r) for policy, r in ratios.items()})


def _rates(study: PreemptionSweep, name: HybridName, part: Trace, seed: int) -> dict[str, float]:
    """Tokens a second."""
    model, setup = HYBRID[name], study.setup
    figures = HybridJob(model, setup, study.ranker, seed, study.staleness).run(part, until_s=part.length_s)
    return {
        "migrate": rlboost.over(model, setup, part, seed).rates()[0],
        "recompute": rlboost.over(model, setup, part, seed, keep_tokens=False).rates()[0],
        "combined": figures.rates()[0],
    }
