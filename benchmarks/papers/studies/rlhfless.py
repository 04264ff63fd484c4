"""RLHFless: planned steps against a static number of workers, on its test bed and on a large cluster; and assignment.

A measure is named site.task.siblings.policy.figure; ``best`` and ``mean`` are over all of a study's workloads.
"""

from __future__ import annotations

import numpy as np

from benchmarks.papers.cluster.planned_step import cut_all_at, cut_nobody
from benchmarks.papers.setups.rlhfless import SITES, TASKS, AssignStudy, ClusterStudy, ScalingStudy, Setup, TaskName
from benchmarks.papers.studies.rlhfless_bench import Bench, Policy, Totals, policies

OURS = ("paper", "balanced", "pareto")


def scaling(study: ScalingStudy, seed: int) -> dict[str, float]:
    """Every policy of ``rlhfless_bench`` on all workloads of the test bed."""
    measures = {"redundant_prefill_percent": _redundant_prefill(study.setup, seed)}
    found: dict[tuple[str, str], list[float]] = {}
    for site in study.sites:
        bench = Bench(SITES[site], study.setup, SITES[site].machines)
        for task in study.tasks:
            for siblings in study.siblings:
                for name, figures in _over_static(bench, task, siblings, seed).items():
                    measures |= {f"{site}.{task}.{siblings}.{name}.{key}": value for key, value in figures.items()}
                    for key, value in figures.items():
                        found.setdefault((name, key), []).append(value)
                        found.setdefault((f"{siblings}.{name}", key), []).append(value)
    for (name, key), values in found.items():
        measures |= {f"best.{name}.{key}": max(values), f"mean.{name}.{key}": float(np.mean(values))}
    first, *_, last = study.siblings
    for key in ("speedup", "cost_cut_percent"):
        measures[f"siblings_gain.{key}"] = measures[f"mean.{last}.paper.{key}"] - measures[f"mean.{first}.paper.{key}"]
    ablated = {
        name: measures[f"{study.sites[0]}.{study.tasks[0]}.{last}.{name}.speedup"] for name in ("parts", "paper")
    }
    measures["scaling_over_parts.speedup"] = ablated["paper"] / ablated["parts"]
    return measures


def _over_static(bench: Bench, task: TaskName, siblings: int, seed: int) -> dict[str, dict[str, float]]:
    every = policies(bench.setup)
    every |= {f"{name}_uncut": every[name]._replace(cut=cut_nobody) for name in OURS}
    totals = {name: bench.draws(TASKS[task], siblings, policy, seed) for name, policy in every.items()}
    totals["oracle"] = bench.draws(TASKS[task], siblings, every["paper"], seed, known="perfectly")
    anew = Bench(bench.site, bench.setup.model_copy(update={"moves_cache": False}), bench.machines)
    for name in ("paper", "balanced"):
        totals[f"{name}_prefilled_anew"] = anew.draws(TASKS[task], siblings, every[name], seed)
    figures = {name: total.over(totals["static"]) for name, total in totals.items() if name != "static"}
    for name in OURS:  # what is left where engines share prefills among siblings anyway, as live
        over = totals[name].over(totals["prefill"])
        figures[name] |= {f"{key}_over_prefill": over[key] for key in ("speedup", "cost_cut_percent")}
    return figures


def _redundant_prefill(setup: Setup, seed: int, siblings: int = 4) -> float:
    """Percent of the baseline's time in which prompts are prefilled that were prefilled for a sibling, 3B on GSM8K."""
    bench = Bench(SITES["3B"], setup, SITES["3B"].machines)
    total = bench.draws(TASKS["gsm8k"], siblings, policies(setup)["static"], seed)
    prefill_s = bench.devices * sum(one.prefill_s for one in total.generated)
    return 100 * (siblings - 1) / siblings * prefill_s / total.cost


def assign(study: AssignStudy, seed: int) -> dict[str, float]:
    """PPO on GSM8K with three workers: figures over RLHFuse's, whose workers are released when they have nothing."""
    bench = Bench(SITES["3B"], study.setup, SITES["3B"].machines)
    every = policies(study.setup)
    rlhfuse = bench.draws(TASKS["gsm8k"], 1, Policy(None, cut=cut_all_at(study.merge_at)), seed)
    measures: dict[str, float] = {}
    for name in ("parts", "balanced"):
        policy = every[name]._replace(scales=False)
        measures |= _named(name, bench.draws(TASKS["gsm8k"], 1, policy, seed), rlhfuse)
    return measures


def cluster(study: ClusterStudy, seed: int) -> dict[str, float]:
    """A 70B model, where the cache is small; the baseline has all workers of the cluster."""
    measures: dict[str, float] = {}
    for machines in study.machines:
        site = SITES["70B"]
        setup = study.setup.model_copy(update={"static_workers": machines * site.machine_workers})
        bench = Bench(site, setup, machines)
        every = policies(setup)
        static = bench.draws(TASKS[study.task], 1, every["static"], seed)
        for name in OURS:
            measures |= _named(f"{machines}.{name}", bench.draws(TASKS[study.task], 1, every[name], seed), static)
    for name in OURS:
        for key in ("speedup", "cost_cut_percent"):
            values = [measures[f"{machines}.{name}.{key}"] for machines in study.machines]
            measures[f"mean.{name}.{key}"] = float(np.mean(values))
    return measures


def _named(name: str, total: Totals, baseline: Totals) -> dict[str, float]:
    return {f"{name}.{key}": value for key, value in total.over(baseline).items()}
