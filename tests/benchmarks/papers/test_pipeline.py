"""Modes of an iteration: what each waits for, in arithmetic that can be done by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.papers.cluster.pipeline import Batch, Stages, iteration_s, train_arrivals_s

STAGES = Stages(transfer_s=3.0, switch_s=5.0, step_s=1.0)


def batch(*finished_s: float, train_s: float) -> Batch:
    return Batch(np.array(finished_s), np.full(len(finished_s), train_s))


def test_each_mode_takes_what_its_waits_add_up_to() -> None:
    """Four samples at 10, 20, 30 and 40 s, 5 s of training each; optimizer 1 s, transfer 3 s, switch 5 s."""
    batches = [batch(10.0, 20.0, 30.0, 40.0, train_s=5.0)] * 8
    assert iteration_s("colocated", batches, STAGES) == pytest.approx(40 + 20 + 5 + 1)
    assert iteration_s("dynamic", batches, STAGES) == pytest.approx(40 + 5 + 1 + 3)
    assert iteration_s("minibatch", batches, STAGES) == pytest.approx(40 + 5 + 1 + 3)  # chunks of one sample
    assert iteration_s("one_step_barrier", batches, STAGES) == pytest.approx(40 + 3)
    assert iteration_s("async", batches, STAGES) == pytest.approx(40)


def test_what_a_slow_trainer_has_not_done_when_the_last_sample_comes_is_left_over() -> None:
    batches = [batch(10.0, 20.0, 30.0, 40.0, train_s=15.0)] * 8
    assert iteration_s("dynamic", batches, STAGES) == pytest.approx(10 + 60 + 1 + 3)
    assert iteration_s("async", batches, STAGES) == pytest.approx(60 + 1)


def test_a_fixed_chunk_waits_for_its_last_sample() -> None:
    """Eight samples in chunks of two, against taking what is there."""
    batches = [batch(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 50.0, train_s=4.0)] * 8
    assert iteration_s("minibatch", batches, Stages()) == pytest.approx(50 + 8)
    assert iteration_s("dynamic", batches, Stages()) == pytest.approx(50 + 4)


finishes = st.lists(st.floats(0.1, 100.0), min_size=1, max_size=30)


@given(finishes, st.floats(0.01, 5.0), st.floats(0.0, 10.0), st.floats(0.0, 5.0))
def test_no_mode_is_faster_than_its_stages_and_async_is_the_fastest_of_those_that_stream(
    finished: list[float], each_s: float, transfer_s: float, step_s: float
) -> None:
    batches = [batch(*finished, train_s=each_s)] * 6
    stages = Stages(transfer_s=transfer_s, step_s=step_s)
    generating, training = max(finished), each_s * len(finished) + step_s
    free = iteration_s("async", batches, stages)
    assert free >= max(generating, training) - 1e-6
    assert free <= iteration_s("dynamic", batches, stages) + 1e-6
    assert iteration_s("dynamic", batches, stages) <= generating + training + transfer_s + 1e-6
    assert iteration_s("dynamic", batches, stages) <= iteration_s("colocated", batches, stages) + transfer_s + 1e-6


@given(finishes, st.floats(0.01, 5.0), st.floats(0.0, 20.0), st.floats(0.0, 20.0))
def test_a_trainer_that_waits_for_enough_still_trains_all(
    arrivals: list[float], each_s: float, least_s: float, free_s: float
) -> None:
    end_s = train_arrivals_s(np.array(arrivals), np.full(len(arrivals), each_s), free_s, least_s=least_s)
    assert end_s >= max(free_s, *arrivals) - 1e-9
    assert end_s >= free_s + each_s * len(arrivals) - 1e-9
    assert end_s <= max(free_s, *arrivals) + each_s * len(arrivals) + least_s * (len(arrivals) + 1)
