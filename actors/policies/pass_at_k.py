"""What the samples of an evaluation come to: avg@k and pass@k.

pass@k is the probability that at least one of k responses to a prompt passes. Of n responses of which c pass, its
unbiased estimate is ``1 - C(n - c, k) / C(n, k)`` (Chen et al., Evaluating Large Language Models Trained on Code, 2021,
equation 1): the share of all choices of k among the n that hold one which passes.
"""

from __future__ import annotations

import math

import numpy as np


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """The unbiased estimate for one prompt. ``k`` is at most ``samples``."""
    if samples - passed < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(samples - passed + 1, samples + 1))


def ks(samples: int) -> list[int]:
    """The k of which pass@k is told: 1, 2, 4 … and ``samples`` itself."""
    return sorted({*(1 << i for i in range(samples.bit_length())), samples})


def averages(rewards: np.ndarray, pass_reward: float) -> dict[str, float]:
    """avg@k, and pass@k for each of ``ks``. ``rewards``: float64[prompts, k]; NaN where a sample has no verdict.

    A prompt counts with what it has: it is left out where nothing is known of it, and for pass@k where it has fewer
    than k samples with a verdict.
    """
    known = ~np.isnan(rewards)
    counted, passed = known.sum(axis=1), (np.where(known, rewards, -np.inf) >= pass_reward).sum(axis=1)
    some = counted > 0
    means = np.where(known, rewards, 0.0).sum(axis=1)[some] / counted[some]
    found = {"avg_at_k": float(means.mean()) if len(means) else math.nan}
    for k in ks(rewards.shape[1]):
        prompts = zip(counted.tolist(), passed.tolist(), strict=True)
        values = [pass_at_k(n, c, k) for n, c in prompts if n >= k]
        found[f"pass_at_{k}"] = sum(values) / len(values) if values else math.nan
    return found
