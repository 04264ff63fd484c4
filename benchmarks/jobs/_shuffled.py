"""A control for what learns: GRPO, but siblings have each other's rewards, so nothing can be learnt from them.

Steps are replayed after a crash, so the order follows from rewards and lengths alone.
"""

from __future__ import annotations

import numpy as np
import xxhash


def advantage(rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """float64[g], of float64[g] and int64[g]: one group."""
    order = np.random.default_rng(xxhash.xxh3_64_intdigest(rewards.tobytes() + lengths.tobytes()))
    mixed = order.permutation(rewards)
    return (mixed - mixed.mean()) / (mixed.std() + 1e-6)
