"""Rankers that find less and less: StreamRL's dispatch against equal shares, the combined policy without ranking.

recall ─▶ sigma_of_recall ─▶ Ranker(knows="order") ─┬─▶ dispatch in hindsight, at its word, by the closed form
chance ─▶ Ranker(by_chance) ────────────────────────┴─▶ the combined policy
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from benchmarks.papers.cluster.generation import Dispatching
from benchmarks.papers.cluster.hybrid import Hybrid
from benchmarks.papers.cluster.lengths import draw_lengths, sigma_of_recall
from benchmarks.papers.setups.rlboost import HYBRID, HybridName
from benchmarks.papers.setups.sensitivity import CombinedRankerSweep, RankerSweep
from benchmarks.papers.setups.streamrl import MODELS, ModelName, Ranker
from benchmarks.papers.studies import combined_streamrl
from benchmarks.papers.studies.combined_rlboost import HybridJob, that_stay
from benchmarks.papers.studies.streamrl_bench import Bench, bench
from benchmarks.papers.sweep import Panel, Sweep

LONGEST = 0.2
_SAMPLED = 50_000
"""Lengths on which noise and recall are matched."""
_PARAMETER = "recall of the longest 20 %"
WARM_UP = 2
_COMPARED: dict[str, Dispatching] = {"async_at_its_word": "simulated", "async_closed_form": "closed_form"}


def dispatch(study: RankerSweep, seed: int) -> Sweep:
    """Modes of StreamRL over the same with equal shares in any order."""
    lengths = draw_lengths(study.workload.lengths, _SAMPLED, np.random.default_rng(seed))
    rankers = _rankers(lengths, study.recalls, seed)
    panels: list[Panel] = []
    for name in study.models:
        draws = [
            _dispatched(bench(study.workload, MODELS[name], study.variant, seed + i), rankers)
            for i in range(study.draws)
        ]
        ratios = {policy: np.array([draw[policy] for draw in draws]).T for policy in draws[0]}
        panels.append(Panel(name, f"{name}, {study.variant}", "the same mode with equal shares", ratios))
    return Sweep(_PARAMETER, _points(study.recalls), panels)


def _dispatched(one: Bench, rankers: Sequence[Ranker]) -> dict[str, list[float]]:
    split = bench(one.workload, one.model, one.workload.split_variant, one.seed).split()
    plain = one.iterations_s(["dynamic", "async"], "random", rollout=split.rollout, train=split.train)
    ratios: dict[str, list[float]] = {policy: [] for policy in ("sync", "async", *_COMPARED)}
    for ranker in rankers:
        ranked = replace(one, workload=one.workload.model_copy(update={"ranker": ranker}))
        in_hindsight = ranked.iterations_s(["dynamic", "async"], "hindsight", rollout=split.rollout, train=split.train)
        ratios["sync"].append(plain["dynamic"] / in_hindsight["dynamic"])
        ratios["async"].append(plain["async"] / in_hindsight["async"])
        for policy, how in _COMPARED.items():
            seconds = ranked.iterations_s(["async"], how, rollout=split.rollout, train=split.train)["async"]
            ratios[policy].append(plain["async"] / seconds)
    return ratios


def combined_policy(study: CombinedRankerSweep, seed: int) -> Sweep:
    """Samples a second on StreamRL's set-up, tokens a second on RLBoost's, over the same with equal estimates."""
    panels: list[Panel] = []
    for name in study.models:
        lengths = draw_lengths(study.workload.lengths, _SAMPLED, np.random.default_rng(seed))
        rankers = [Ranker(knows="nothing"), *_rankers(lengths, study.recalls, seed)]
        rates = [[_stream_rate(study, name, ranker, seed + i) for i in range(study.draws)] for ranker in rankers]
        panels.append(_panel(f"streamrl.{name}", f"StreamRL's set-up, {name}, {study.variant}", rates))
    for name in study.hybrid:
        hybrid = Hybrid(HYBRID[name], study.setup, seed)
        lengths = np.array([s.length for _ in range(8) for s in hybrid.draw()])
        rankers = [Ranker(knows="nothing"), *_rankers(lengths, study.recalls, seed)]
        draws = range(seed, seed + study.hybrid_draws)
        rates = [[_hybrid_rate(study, name, ranker, one) for one in draws] for ranker in rankers]
        panels.append(_panel(f"rlboost.{name}", f"RLBoost's set-up, {name}, {study.workers} workers", rates))
    return Sweep(_PARAMETER, _points(study.recalls), panels)


def _panel(key: str, title: str, rates: list[list[float]]) -> Panel:
    """``rates``: of each ranker, that which knows nothing first, in each draw."""
    plain, *ranked = np.array(rates)
    return Panel(key, title, "the same without ranking", {"combined": np.array(ranked) / plain})


def _stream_rate(study: CombinedRankerSweep, name: ModelName, ranker: Ranker, seed: int) -> float:
    work = study.workload.model_copy(update={"ranker": ranker})
    one = bench(work, MODELS[name], study.variant, seed)
    return work.samples / combined_streamrl.combined_stream(one, study.staleness)[1].steady_step_s()


def _hybrid_rate(study: CombinedRankerSweep, name: HybridName, ranker: Ranker, seed: int) -> float:
    job = HybridJob(HYBRID[name], study.setup, ranker, seed, study.staleness)
    figures = job.run(that_stay(study.workers), steps=study.setup.steps)
    return figures.rates(study.setup.steps - WARM_UP)[0]


def _rankers(lengths: np.ndarray, recalls: Sequence[float], seed: int) -> list[Ranker]:
    """One for each recall, and one by chance."""
    noise = np.random.default_rng([seed, 2])
    state = noise.bit_generator.state
    rankers: list[Ranker] = []
    for recall in recalls:
        noise.bit_generator.state = state  # the same noise, scaled: a lower recall is never a lucky draw
        rankers.append(Ranker(sigma=sigma_of_recall(lengths, recall, LONGEST, noise), knows="order"))
    return [*rankers, Ranker(by_chance=True)]


def _points(recalls: Sequence[float]) -> list[str]:
    return [*(f"{recall:g}" for recall in recalls), "chance"]
