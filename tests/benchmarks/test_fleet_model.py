"""The fleet model: times by hand, what it conserves, and the scheduler's rule at the size of a thousand workers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.decisions._fleet_model import Fleet, FleetRules
from benchmarks.decisions.fleet import hour


@dataclass(frozen=True)
class Steady:
    token_s: float = 0.1
    sequence_s: float = 0.0

    def step_s(self, batch: float, context_tokens: float) -> float:
        return self.token_s + self.sequence_s * batch


def rules(**changes: object) -> FleetRules:
    values: dict[str, object] = {
        "max_staleness": 0, "streaming": False, "group_size": 2, "prompt_tokens": 5,
        "train_sample_s": lambda lengths: np.full(len(lengths), 0.5), "step_s": 1.0, "transfer_s": 2.0,
        "round_s": 0.1,
    }  # fmt: skip
    return FleetRules(**(values | changes))  # type: ignore[arg-type]


def test_a_step_takes_generation_training_optimizer_and_transfer() -> None:
    """Two workers with two places, four samples of 100 tokens at 0.1 s: 10 + 4 x 0.5 + 1, then 2 until the next."""
    fleet = Fleet([(Steady(), 2)] * 2, lambda step: np.full(4, 100), rules())
    fleet.run(steps=3)
    assert fleet.trained_s == pytest.approx([13.0, 28.0, 43.0], abs=0.3)


def test_a_place_that_becomes_free_is_given_away_at_the_next_round() -> None:
    """Four samples for two places: two go first, and two follow."""
    fleet = Fleet([(Steady(), 2)], lambda step: np.array([50, 100, 100, 50]), rules())
    fleet.run(steps=1)
    assert fleet.trained_s == pytest.approx([15.0 + 2.0 + 1.0], abs=0.3)


def test_ahead_by_one_step_the_tail_of_a_step_is_decoded_beside_the_next() -> None:
    lengths = np.array([10, 10, 10, 200])
    strict, ahead = (
        Fleet([(Steady(), 4)], lambda step: lengths, rules(max_staleness=k, streaming=k > 0)) for k in (0, 1)
    )
    strict.run(steps=10)
    ahead.run(steps=10)
    assert ahead.trained_s[-1] < 0.65 * strict.trained_s[-1]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 5), st.integers(1, 6), st.integers(0, 2))
def test_nothing_is_lost_and_nobody_is_overfull(seed: int, workers: int, places: int, staleness: int) -> None:
    """Steps are trained in order, each after its own samples; all of them finish."""
    drawn = np.random.default_rng(seed).integers(1, 60, (6, 8))
    fleet = Fleet(
        [(Steady(sequence_s=0.01), places)] * workers, lambda step: drawn[step % 6], rules(max_staleness=staleness)
    )
    hand = fleet._hand
    seen: list[tuple[int, int]] = []

    def watching(worker, number, rows) -> None:
        hand(worker, number, rows)
        assert len(worker.running) <= worker.places
        assert number <= fleet._version + staleness
        seen.extend((number, int(row)) for row in rows)

    fleet._hand = watching  # type: ignore[method-assign]
    fleet.run(steps=6)
    assert fleet.trained_s == sorted(fleet.trained_s)
    assert len(fleet.trained_s) == 6
    assert len(seen) == len(set(seen))
    assert {(step, row) for step in range(6) for row in range(8)} <= set(seen)


def test_a_thousand_workers_are_modelled() -> None:
    """How quickly, `headrace bench fleet` says."""
    assert hour(1000, 120.0)["samples_finished"] > 10_000
