"""Samples of random tokens, for tests of what is learned from them."""

from __future__ import annotations

import numpy as np

from actors.trainer.learning.samples import TrainSample


def random_sample(
    rng: np.random.Generator, prompt: int, sibling: int, prompt_ids: np.ndarray, tokens: int, *, vocabulary: int = 96
) -> TrainSample:
    """A response of ``tokens`` tokens, about half of them of an older version, with any advantage."""
    return TrainSample(
        prompt=prompt,
        sibling=sibling,
        prompt_ids=prompt_ids,
        tokens=rng.integers(3, 3 + vocabulary, tokens).astype(np.int32),
        logprobs=rng.normal(-4.6, 0.3, tokens).astype(np.float32),
        stale=rng.random(tokens) < 0.5,
        advantage=float(rng.normal()),
    )


def random_samples(groups: list[tuple[int, list[int]]], seed: int = 0, *, vocabulary: int = 96) -> list[TrainSample]:
    """Groups as (prompt tokens, response tokens of each sibling). A small vocabulary makes siblings alike."""
    rng, samples = np.random.default_rng(seed), list[TrainSample]()
    for prompt, (prompt_tokens, responses) in enumerate(groups):
        ids = rng.integers(3, 99, prompt_tokens).astype(np.int32)
        samples += [random_sample(rng, prompt, n, ids, size, vocabulary=vocabulary) for n, size in enumerate(responses)]
    return samples
