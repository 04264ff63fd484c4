"""RLHFless: what the window of the length history, the cut and the weight of time change. GRPO, 3B, GSM8K.

Cost and time of a sweep's points are over those of one of them, so that only their order and slope count.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from actors.policies.planning.step_plan import PlanRule
from benchmarks.papers.cluster.answers import epochs
from benchmarks.papers.setups.rlhfless import SITES, TASKS, Setup, SweepStudy
from benchmarks.papers.studies.rlhfless_bench import Bench, Policy, Totals, cut_from, policies

SIBLINGS = 3
TASK = TASKS["gsm8k"]


def sweeps(study: SweepStudy, seed: int) -> dict[str, float]:
    """All three, and how much a prompt's length changes between two epochs."""
    setup = study.setup
    windows = {
        str(window): setup.model_copy(update={"window": window, "epochs": study.window_epochs})
        for window in study.windows
    }
    cuts = {f"{cut:g}": Policy(_even(setup.time_weight), cut=cut_from(cut)) for cut in study.cuts}
    weights = {f"{weight:g}": Policy(_even(weight), cut=cut_from(setup.cut_at)) for weight in study.weights}
    measures = _changes(setup, seed)
    measures |= _figures("window", {key: _run(one, policies(one)["paper"], seed) for key, one in windows.items()})
    measures |= {f"window.{key}.rank_correlation": _rank_correlation(one, seed) for key, one in windows.items()}
    measures |= _figures("cut", {key: _run(setup, policy, seed) for key, policy in cuts.items()})
    measures |= _figures("weight", {key: _run(setup, policy, seed) for key, policy in weights.items()})
    return measures


def _even(weight: float) -> PlanRule:
    return PlanRule("lambda", weight, parts="even")


def _run(setup: Setup, policy: Policy, seed: int) -> Totals:
    return Bench(SITES["3B"], setup, SITES["3B"].machines).draws(TASK, SIBLINGS, policy, seed)


def _figures(name: str, totals: Mapping[str, Totals]) -> dict[str, float]:
    """Over the first point; ranks from 1, the least."""
    first = next(iter(totals.values()))
    measures: dict[str, float] = {}
    for key, total in totals.items():
        measures[f"{name}.{key}.cost"] = total.cost / first.cost
        measures[f"{name}.{key}.seconds"] = total.seconds / first.seconds
        measures[f"{name}.{key}.cost_rank"] = 1.0 + sum(other.cost < total.cost for other in totals.values())
        measures[f"{name}.{key}.seconds_rank"] = 1.0 + sum(other.seconds < total.seconds for other in totals.values())
    return measures


def _changes(setup: Setup, seed: int) -> dict[str, float]:
    """Percent of prompts whose one response (PPO) is no more than so many tokens longer or shorter an epoch later."""
    many = setup.model_copy(update={"prompts": 4096, "steps": 1, "epochs": 2})
    by_prompt = [epoch[0].lengths[:, 0][np.argsort(epoch[0].prompts)] for epoch in epochs(TASK, many, 1, seed)]
    change = np.abs(by_prompt[1] - by_prompt[0])
    return {f"changed_by_{tokens}_percent": 100 * float(np.mean(change <= tokens)) for tokens in (50, 100)}


def _rank_correlation(setup: Setup, seed: int) -> float:
    """Spearman's, between expected and mean length of the prompts of the last epoch."""
    *_, last = epochs(TASK, setup, SIBLINGS, seed)
    expected = np.concatenate([step.expected for step in last])
    lengths = np.concatenate([step.lengths.mean(axis=1) for step in last])
    return float(np.corrcoef(_ranks(expected), _ranks(lengths))[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    return np.argsort(np.argsort(values, kind="stable"), kind="stable").astype(np.float64)
