"""Latency tables: what a worker's steps have taken, by batch and context, without those that prefill."""

from __future__ import annotations

import math

import numpy as np
import pytest

from actors.policies.assigning.latency_table import BATCHES, CONTEXTS, EMPTY, LatencyMeter, step_shapes


def add(meter: LatencyMeter, step_s: float, n: int, *, at: int = 10, tokens: int = 1, prompt: float = 50) -> None:
    add_rows(meter, step_s, [at] * n, [tokens] * n, prompt)


def add_rows(meter: LatencyMeter, step_s: float, offsets: list[int], counts: list[int], prompt: float = 50) -> None:
    [shape] = step_shapes(np.array(offsets, np.int32), np.array(counts, np.int32), np.array([len(counts)]))
    meter.add(step_s, shape, prompt)


def test_the_time_of_a_token_is_that_of_the_steps_of_its_batch_and_context() -> None:
    meter = LatencyMeter()
    for n, ms in ((1, 8.4), (32, 10.3), (256, 21.6)):
        add(meter, ms / 1000, n)
    add(meter, 0.030, 32, at=8000)
    table = meter.table
    assert table.step_s(32, 60) == pytest.approx(0.0103)
    assert table.step_s(32, 8050) == pytest.approx(0.030)
    assert 0.0103 < table.step_s(100, 60) < 0.0216, "between two measured batches"
    assert table.step_s(4000, 60) == pytest.approx(0.0216), "beyond them, the nearest"
    assert table.step_s(32, 3000) == pytest.approx(0.030), "the nearest context that was measured"
    assert table.step_s(32, 300) == pytest.approx(0.0103), "and on the other side"


def test_steps_that_prefill_or_give_no_token_are_left_out() -> None:
    meter = LatencyMeter()
    add_rows(meter, 5.0, [0, 9], [1, 1])
    add_rows(meter, 5.0, [9], [0])
    assert meter.table.empty
    assert math.isnan(EMPTY.step_s(1, 1))


def test_one_slow_step_does_not_make_a_worker_slow() -> None:
    meter = LatencyMeter()
    for _ in range(200):
        add(meter, 0.01, 8)
    add(meter, 10.0, 8)
    assert meter.table.step_s(8, 60) < 0.012


def test_it_follows_a_worker_that_has_become_slower() -> None:
    meter = LatencyMeter()
    for step_s in [0.01] * 50 + [0.03] * 150:
        add(meter, step_s, 8)
    assert meter.table.step_s(8, 60) == pytest.approx(0.03, rel=0.02)


def test_an_engine_that_gives_several_tokens_a_step_is_measured_by_the_token() -> None:
    meter = LatencyMeter()
    add(meter, 0.08, 4, tokens=8)
    assert meter.table.step_s(4, 60) == pytest.approx(0.01)


def test_batches_and_contexts_beyond_the_table_count_in_its_last_cells() -> None:
    meter = LatencyMeter()
    add(meter, 1.0, 5000, at=10**7)
    [(column, (rows, seconds, _))] = meter.table.columns.items()
    assert (column, rows, seconds) == (CONTEXTS - 1, (BATCHES - 1,), (1.0,))
