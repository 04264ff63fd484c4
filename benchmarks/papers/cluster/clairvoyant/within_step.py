"""Within a step: what can be trained of it by an instant, at most what engines can have finished by then."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from benchmarks.papers.cluster.clairvoyant.least_work import Demand, summed
from benchmarks.papers.cluster.clairvoyant.supply import Supply

_INSTANTS = 64
"""Instants at which the condition is looked at, and once more about the best of them; each alone gives a bound."""


def lasts_s(one: Demand, supply: Supply, release_s: float) -> float:
    """The largest, over instants t since its samples may begin, of t and the training that is left at t at best."""
    all_s = float(one.train_s.sum())
    engines = supply.local or supply.others_s(release_s, release_s + 1.0)
    horizon_s = 2 * (all_s + 2 * supply.switch_s) + float(one.work_s.sum()) / max(engines, 1.0)

    def at_least_s(t: float) -> float:
        trained_s = most_trained_s(one, supply, release_s, t)
        return t + all_s - trained_s if trained_s < all_s * (1 - 1e-9) else 0.0

    coarse = np.geomspace(horizon_s / 1000, horizon_s, _INSTANTS)
    lasts = [at_least_s(float(t)) for t in coarse]
    best = int(np.argmax(lasts))
    fine = np.linspace(coarse[max(0, best - 1)], coarse[min(best + 1, _INSTANTS - 1)], _INSTANTS)
    return max(*lasts, *(at_least_s(float(t)) for t in fine))


def most_trained_s(one: Demand, supply: Supply, release_s: float, t: float) -> float:
    """Seconds of training that can be done ``t`` after ``release_s``, at which a step's samples may begin."""
    switches_s = 2 * supply.switch_s if supply.on_policy else 0.0
    trainable_s = _trainable_s(one, t - supply.first_s)
    given_s = supply.since_release_s(release_s, release_s, release_s + t)
    low, high = 0.0, min(t, trainable_s(float("inf")))
    for _ in range(40):
        x = (low + high) / 2
        engine_s = supply.local * max(0.0, t - x - switches_s) + given_s
        low, high = (x, high) if x <= trainable_s(engine_s) else (low, x)
    return high


def _trainable_s(one: Demand, t: float) -> Callable[[float], float]:
    """Engine seconds → the most training that what they finish in ``t`` allows, in fractions of groups and samples.

    With an early part, samples and groups get the same engine seconds twice, which is more than they have.
    """
    there = one.alone_s <= t
    work, train = one.work_s[there], one.train_s[there]
    rank = np.argsort(-train / work, kind="stable")
    done_work = summed(work[rank])
    done_train = summed(train[rank])
    of_samples = _trainable_s(one.each, t) if one.each is not None else None

    def most_s(engine_s: float) -> float:
        grouped_s = (1 - one.early) * float(np.interp(engine_s, done_work, done_train))
        return grouped_s + (one.early * of_samples(engine_s) if of_samples is not None else 0.0)

    return most_s
