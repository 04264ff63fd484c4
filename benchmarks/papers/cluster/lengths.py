"""Output lengths of simulated samples, and what a ranker of a given quality would say of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from actors.policies.lengths.length_predictor import longest_first
from benchmarks.papers.cluster.moving_engine import Sample
from benchmarks.papers.setups.streamrl import LengthHistogram, Ranker

_SIGMA_MAX = 16.0
"""Noise that makes any ranking here one by chance."""


def draw_lengths(histogram: LengthHistogram, count: int, rng: np.random.Generator) -> np.ndarray:
    """``count`` lengths in tokens, int64."""
    weights = np.asarray(histogram.weights, np.float64)
    bins = rng.choice(len(weights), count, p=weights / weights.sum())
    tokens = histogram.first_tokens + histogram.bin_tokens * (bins + rng.random(count))
    return np.maximum(1, np.rint(tokens * histogram.scale)).astype(np.int64)


def even_lengths(histogram: LengthHistogram, count: int) -> np.ndarray:
    """The ``count`` evenly spaced quantiles of the histogram, ascending: a batch without the luck of a draw."""
    weights = np.asarray(histogram.weights, np.float64)
    edges = np.concatenate([[0.0], np.cumsum(weights / weights.sum())])
    tokens = histogram.first_tokens + histogram.bin_tokens * np.arange(len(edges))
    quantiles = (np.arange(count) + 0.5) / count
    return np.maximum(1, np.rint(np.interp(quantiles, edges, tokens) * histogram.scale)).astype(np.int64)


def as_lengths(estimates: np.ndarray, recent_lengths: np.ndarray) -> np.ndarray:
    """Lengths for estimates that only rank: the quantile of recent lengths at each one's rank, float64."""
    lengths = np.empty(len(estimates))
    quantiles = (np.arange(len(estimates)) + 0.5) / max(1, len(estimates))
    lengths[longest_first(estimates)] = np.quantile(recent_lengths, quantiles)[::-1]
    return lengths


def estimate_lengths(lengths: np.ndarray, ranker: Ranker, rng: np.random.Generator) -> np.ndarray:
    """What the ranker says of them, float64."""
    if ranker.knows == "nothing":
        return np.full(len(lengths), float(np.mean(lengths)))
    if ranker.by_chance:
        return rng.permutation(lengths).astype(np.float64)
    said = lengths * np.exp(ranker.sigma * rng.standard_normal(len(lengths)))
    return as_lengths(said, lengths) if ranker.knows == "order" else said


def ranked(ranker: Ranker, seed: int) -> Callable[[int, Sequence[Sample]], np.ndarray]:
    """(step, its samples) → what the ranker says of them, float64[n]; equal seeds say the same."""

    def expect(step: int, samples: Sequence[Sample]) -> np.ndarray:
        lengths = np.array([s.length for s in samples], np.float64)
        return estimate_lengths(lengths, ranker, np.random.default_rng([seed, step, 1]))

    return expect


def recall_of_longest(lengths: np.ndarray, estimates: np.ndarray, fraction: float) -> float:
    """The part of the truly longest ``fraction`` that the estimates count among the longest as well."""
    count = max(1, round(fraction * len(lengths)))
    true = np.argsort(-lengths, kind="stable")[:count]
    guessed = np.argsort(-estimates, kind="stable")[:count]
    return len(np.intersect1d(true, guessed)) / count


def sigma_of_recall(lengths: np.ndarray, recall: float, fraction: float, rng: np.random.Generator) -> float:
    """The noise with which a ranker finds that part of the longest ``fraction`` of ``lengths``, by bisection.

    Raises:
        ValueError: a ranking by chance finds as many.
    """
    if recall <= fraction:
        raise ValueError(f"recall {recall:g} of the longest {fraction:g}: chance finds {fraction:g}; ask for more")
    noise, low, high = rng.standard_normal(len(lengths)), 0.0, _SIGMA_MAX
    for _ in range(30):
        sigma = (low + high) / 2
        found = recall_of_longest(lengths, np.log(lengths) + sigma * noise, fraction)
        low, high = (sigma, high) if found > recall else (low, sigma)
    return low if recall < 1 else 0.0
