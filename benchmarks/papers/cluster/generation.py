"""One batch through a pool of instances: who gets what, and when each sample is finished.

    lengths, estimates ─▶ dispatch (random, or policies.dispatch_long) ─▶ policies.generation_time, per instance

Every instance is replayed on its own, since a batch is dispatched once, as StreamRL and colocated trainers do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from actors.policies.assigning import dispatch_long
from actors.policies.assigning.dispatch_long import Past
from actors.policies.assigning.generation_time import Instance, finish_times_s
from benchmarks.papers.cluster.closed_form import closed_form

Dispatching = Literal["random", "longest_first", "simulated", "hindsight", "closed_form"]
"""``random``: equal counts in any order, first come first served; the others: see ``dispatch_long``. ``hindsight``:
``simulated`` with the batches before, as in live runs."""


def generate(
    instances: Sequence[Instance],
    lengths: np.ndarray,
    prompt_tokens: int,
    *,
    dispatching: Dispatching,
    estimates: np.ndarray,
    rng: np.random.Generator,
    past: Sequence[Past] = (),
    believed: Sequence[Instance] | None = None,
) -> np.ndarray:
    """When each sample is finished after the batch's begin, float64[n]; ``believed``: what the policy is told."""
    finished = np.zeros(len(lengths))
    known = instances if believed is None else believed
    for worker, samples in _hands(known, lengths, prompt_tokens, dispatching, estimates, rng, past):
        finished[samples] = finish_times_s(instances[worker], [prompt_tokens] * len(samples), lengths[samples].tolist())
    return finished


def _hands(
    instances: Sequence[Instance],
    lengths: np.ndarray,
    prompt_tokens: int,
    dispatching: Dispatching,
    estimates: np.ndarray,
    rng: np.random.Generator,
    past: Sequence[Past],
) -> list[tuple[int, np.ndarray]]:
    if dispatching == "random":
        return list(enumerate(np.array_split(rng.permutation(len(lengths)), len(instances))))
    dedicated = None
    if dispatching == "longest_first" or len(instances) < 2:
        dedicated = 0
    elif dispatching == "closed_form":
        fastest = min(instances, key=lambda one: one.pace.step_s(1, prompt_tokens))
        dedicated = closed_form(estimates, fastest, len(instances))
    seen = past if dispatching == "hindsight" else None
    chosen = dispatch_long.decide(estimates, instances, prompt_tokens=prompt_tokens, dedicated=dedicated, past=seen)
    return list(zip(chosen.workers, chosen.samples, strict=True))
