"""How long an instance takes for the samples it is given: continuous batching, replayed event by event.

    waiting, in order ──admit while a place and KV room are free──▶ running ── one token each a step ──▶ finish times

Between two events (a finish, and the admissions that it makes room for) the batch stays the same and every context
grows by one token a step, so all of those steps are added up at once: a sample costs two events however long it is.
StreamRL (arXiv 2504.15930) calls the time of a step PTL, per-token latency; here it depends on batch and context.

Invariants
- A sample is admitted only with a place, and with room for its prompt and what is reserved for its response.
- Nothing is preempted. A sample that alone is too large is run alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


class StepTime(Protocol):
    """Tells how long decode steps take, as a measured latency table or a cost model does."""

    def step_s(self, batch: float, context_tokens: float) -> float:
        """Seconds of a step that gives one token to each of ``batch`` sequences of this mean context."""
        ...


@dataclass(frozen=True, slots=True)
class Instance:
    """Describes an engine's pace, its room, and what it decodes already."""

    pace: StepTime
    places: int
    """Samples that the engine decodes together at most."""
    kv_tokens: float = float("inf")
    """Tokens that the KV cache holds."""
    reserve_tokens: int = 0
    """Tokens that are kept free for the response of each admitted sample, whatever it turns out to need."""
    prefill_token_s: float = 0.0
    held_tokens: tuple[int, ...] = ()
    """Tokens still to come of each sample that the engine decodes already."""


def finish_times_s(instance: Instance, prompt_tokens: Sequence[int], output_tokens: Sequence[int]) -> np.ndarray:
    """When each sample is finished, float64[n], if they begin in this order at time 0."""
    wanted = [max(1, int(tokens)) for tokens in output_tokens]
    finished = [0.0] * len(wanted)
    running: list[tuple[int, int]] = []  # (step at which it ends, sample)
    now_s, step, next_up = 0.0, 0, 0
    kv_free, context = instance.kv_tokens, 0
    step_s, places = instance.pace.step_s, instance.places
    while running or next_up < len(wanted):
        while next_up < len(wanted) and len(running) < places:
            prompt = prompt_tokens[next_up]
            need = prompt + instance.reserve_tokens
            if need > kv_free and running:
                break
            heapq.heappush(running, (step + wanted[next_up], next_up))
            kv_free -= need
            context += prompt
            now_s += instance.prefill_token_s * prompt
            next_up += 1
        batch, steps = len(running), running[0][0] - step
        now_s += steps * step_s(batch, context / batch + steps / 2)
        step += steps
        context += steps * batch
        while running and running[0][0] == step:
            _, sample = heapq.heappop(running)
            finished[sample] = now_s
            kv_free += prompt_tokens[sample] + instance.reserve_tokens
            context -= prompt_tokens[sample] + wanted[sample]
    return np.array(finished, np.float64)
