"""Lengths of the responses to the same prompts, epoch after epoch, and what is expected of them.

prompt's own length ── drift, noise ──▶ length of a response ── LengthHistory ──▶ expected in the next epoch
        └── other noise ──▶ reference answer ──▶ expected in the first
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import numpy as np

from actors.policies.lengths.length_predictor import LengthHistory, PromptsView
from benchmarks.papers.cluster.planned_step import StepWork
from benchmarks.papers.setups.rlhfless import Setup, Task

Known = Literal["history", "perfectly"]


def steps(task: Task, setup: Setup, siblings: int, seed: int, *, known: Known = "history") -> Iterator[StepWork]:
    """The steps of all epochs in order; equal seeds give equal lengths, whatever is known of them."""
    for epoch in epochs(task, setup, siblings, seed, known=known):
        yield from epoch


def epochs(task: Task, setup: Setup, siblings: int, seed: int, *, known: Known = "history") -> Iterator[list[StepWork]]:
    """The steps of each epoch."""
    rng = np.random.default_rng(seed)
    count = setup.prompts * setup.steps
    own = _own_lengths(task, count, rng)
    expected = _clipped(own * np.exp(task.reference_noise * rng.standard_normal(count)), task)
    history = LengthHistory(count, alpha=2 / (setup.window + 1))
    keys = np.arange(count, dtype=np.uint64)
    for epoch in range(setup.epochs):
        noise = np.exp(task.noise * rng.standard_normal((count, siblings)))
        lengths = np.rint(_clipped(own[:, None] * (1 + task.drift) ** epoch * noise, task)).astype(np.int64)
        if known == "perfectly":
            expected = lengths.mean(axis=1)
        order = rng.permutation(count)
        yield [
            StepWork(lengths[some], expected[some], task.prompt_tokens, some)
            for some in np.array_split(order, setup.steps)
        ]
        view = PromptsView(keys, lengths, np.ones_like(lengths, bool))
        history.observe(view)
        expected = history.expected(view)


def _own_lengths(task: Task, count: int, rng: np.random.Generator) -> np.ndarray:
    sigma = math.sqrt(math.log1p(task.variation**2))
    own = task.mean_tokens * np.exp(sigma * rng.standard_normal(count) - sigma**2 / 2)
    long = rng.random(count) < task.long_prompts
    own[long] = rng.uniform(task.long_tokens, task.max_tokens, int(long.sum()))
    return own


def _clipped(lengths: np.ndarray, task: Task) -> np.ndarray:
    return np.clip(lengths, 1.0, task.max_tokens)
