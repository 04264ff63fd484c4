"""Output lengths of simulated samples, and what a ranker of a given quality would say of them."""

from __future__ import annotations

import numpy as np

from configs.studies.streamrl import LengthHistogram, Ranker


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


def estimate_lengths(lengths: np.ndarray, ranker: Ranker, rng: np.random.Generator) -> np.ndarray:
    """What the ranker says of them, float64."""
    return lengths * np.exp(ranker.sigma * rng.standard_normal(len(lengths)))


def recall_of_longest(lengths: np.ndarray, estimates: np.ndarray, fraction: float) -> float:
    """Of the truly longest ``fraction``, the part that the estimates count among the longest as well."""
    count = max(1, round(fraction * len(lengths)))
    true = np.argsort(-lengths, kind="stable")[:count]
    guessed = np.argsort(-estimates, kind="stable")[:count]
    return len(np.intersect1d(true, guessed)) / count
