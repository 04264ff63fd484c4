"""The line that a process sends weights on is never used beyond its rate, whoever sends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.weights.pace import Pace

RATE = 1e6
asks = st.lists(st.tuples(st.floats(0, 10), st.integers(1, 4_000_000)), min_size=1, max_size=30)


def test_without_a_rate_nobody_waits() -> None:
    pace = Pace(None)
    assert [pace.wait_s(0.0, 1 << 30) for _ in range(3)] == [0.0, 0.0, 0.0]


def test_each_chunk_waits_until_those_before_it_have_passed_and_an_idle_line_saves_nothing_up() -> None:
    pace = Pace(RATE)
    assert [pace.wait_s(1.0, 500_000) for _ in range(3)] == pytest.approx([0.0, 0.5, 1.0])
    assert pace.wait_s(9.0, 500_000) == 0.0
    assert pace.wait_s(9.1, 500_000) == pytest.approx(0.4)


@given(asks)
def test_between_any_two_chunks_no_more_is_sent_than_the_rate_allows(pauses: list[tuple[float, int]]) -> None:
    pace, now_s, sent = Pace(RATE), 0.0, list[tuple[float, int]]()
    for pause_s, size in pauses:
        now_s += pause_s
        sent.append((now_s + pace.wait_s(now_s, size), size))
    for first in range(len(sent)):
        total = 0
        for begin_s, size in sent[first:]:
            assert begin_s - sent[first][0] >= total / RATE - 1e-6
            total += size
