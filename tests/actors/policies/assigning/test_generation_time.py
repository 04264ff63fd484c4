"""The replay of one instance, against the same thing done step by step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.policies.assigning.generation_time import Instance, finish_times_s


@dataclass(frozen=True)
class Affine:
    """Fixed cost, a cost for each sequence, and one for each token of context."""

    fixed_s: float = 0.01
    sequence_s: float = 0.001
    context_s: float = 1e-6

    def step_s(self, batch: float, context_tokens: float) -> float:
        return self.fixed_s + batch * (self.sequence_s + self.context_s * context_tokens)


def step_by_step(instance: Instance, prompts: list[int], outputs: list[int]) -> np.ndarray:
    """One token at a time; a step's context counts half of the token that it adds."""
    finished, running, waiting, now_s = np.zeros(len(outputs)), dict[int, int](), list(range(len(outputs))), 0.0
    while waiting or running:
        while waiting and len(running) < instance.places:
            held = sum(prompts[i] + instance.reserve_tokens for i in running)
            need = prompts[waiting[0]] + instance.reserve_tokens
            if running and held + need > instance.kv_tokens:
                break
            sample = waiting.pop(0)
            running[sample] = 0
            now_s += instance.prefill_token_s * prompts[sample]
        context = sum(prompts[i] + done + 0.5 for i, done in running.items()) / len(running)
        now_s += instance.pace.step_s(len(running), context)
        for sample in list(running):
            running[sample] += 1
            if running[sample] >= outputs[sample]:
                finished[sample] = now_s
                del running[sample]
    return finished


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 30)), min_size=1, max_size=20),
    st.integers(1, 6),
    st.integers(30, 120),
    st.integers(0, 30),
)
def test_adding_up_whole_stretches_gives_the_times_of_going_step_by_step(
    samples: list[tuple[int, int]], places: int, kv_tokens: int, reserve: int
) -> None:
    prompts, outputs = [p for p, _ in samples], [o for _, o in samples]
    instance = Instance(Affine(), places, kv_tokens, reserve, prefill_token_s=0.002)
    assert finish_times_s(instance, prompts, outputs) == pytest.approx(step_by_step(instance, prompts, outputs))


def test_what_does_not_fit_waits_although_places_are_free() -> None:
    """Two of three fit at once; with room for all they end together."""
    tight = Instance(Affine(0.0, 0.0, 0.0), 8, kv_tokens=2 * 110, reserve_tokens=100)
    steady = Instance(Affine(1.0, 0.0, 0.0), 8, kv_tokens=2 * 110, reserve_tokens=100)
    assert finish_times_s(tight, [10] * 3, [50] * 3).tolist() == [0.0] * 3
    assert finish_times_s(steady, [10] * 3, [50] * 3).tolist() == [50.0, 50.0, 100.0]
    assert finish_times_s(Instance(Affine(1.0, 0.0, 0.0), 8), [10] * 3, [50] * 3).tolist() == [50.0] * 3


def test_nothing_to_do_takes_no_time() -> None:
    assert finish_times_s(Instance(Affine(), 4), [], []).tolist() == []
