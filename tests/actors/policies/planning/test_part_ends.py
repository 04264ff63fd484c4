"""What is added up for a part is what its replay, event by event, comes to."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.policies.assigning.generation_time import Instance, finish_times_s
from actors.policies.assigning.latency_table import EMPTY, LatencyTable, context_columns, mean_table
from actors.policies.planning.parts import PartEnds
from tests.actors.policies.latency_tables import linear, table_of

LENGTHS = st.lists(st.integers(1, 2000), min_size=1, max_size=40).map(lambda some: sorted(some, reverse=True))


def part_ends(tokens: list[int], *, siblings: int = 1, slots: int = 64, table: LatencyTable | None = None) -> PartEnds:
    tall = np.ones(len(tokens))
    return PartEnds(np.array(tokens, float), tall * siblings, tall * 100, table or linear(), slots, tall * 0.0)


def replayed_s(tokens: list[int], *, siblings: int = 1, slots: int = 64, table: LatencyTable | None = None) -> float:
    samples = [length for length in tokens for _ in range(siblings)]
    instance = Instance(table or linear(), slots)
    return float(finish_times_s(instance, [100] * len(samples), samples).max())


@given(LENGTHS, st.integers(1, 4), st.data())
def test_a_part_whose_samples_all_have_places_ends_as_in_the_replay(
    tokens: list[int], siblings: int, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, len(tokens) - 1))
    ends = part_ends(tokens, siblings=siblings, slots=200).ends(first)
    for count in range(1, len(tokens) - first + 1):
        part = tokens[first : first + count]
        assert ends[count - 1] == pytest.approx(replayed_s(part, siblings=siblings, slots=200), rel=1e-9)


@given(LENGTHS, st.integers(1, 12))
def test_a_part_that_needs_several_waves_ends_within_one_sample_of_the_replay(tokens: list[int], slots: int) -> None:
    """No batch makes the replay slower than its last sample, which the estimate pours into all places."""
    flat = table_of(lambda _batch, _context: 0.01)
    ours = float(part_ends(tokens, slots=slots, table=flat).ends(0)[-1])
    theirs = replayed_s(tokens, slots=slots, table=flat)
    assert ours <= theirs * (1 + 1e-9)
    assert ours >= theirs - 0.01 * tokens[0]


def test_a_prompt_with_more_siblings_than_places_takes_several_waves() -> None:
    assert part_ends([100], siblings=8, slots=4).ends(0)[0] == pytest.approx(replayed_s([100], siblings=8, slots=4))


@given(LENGTHS, st.integers(1, 12), st.integers(1, 8))
def test_a_part_with_more_prompts_never_ends_earlier(tokens: list[int], slots: int, siblings: int) -> None:
    """Not even where a larger batch was measured to be faster."""
    table = table_of(lambda batch, context: 0.01 + 0.001 * (batch % 5) + context * 1e-6)
    for first in range(len(tokens)):
        ends = part_ends(tokens, siblings=siblings, slots=slots, table=table).ends(first)
        assert np.isfinite(ends).all()
        assert (np.diff(ends) >= 0).all()


def test_the_common_table_weighs_workers_by_what_they_measured() -> None:
    slow, fast = table_of(lambda *_: 0.03, steps=1), table_of(lambda *_: 0.01, steps=3)
    assert mean_table([slow, EMPTY, fast]).step_s(8, 500) == pytest.approx(0.015)
    assert mean_table([EMPTY]).empty


@given(st.integers(1, 300), st.integers(1, 5000))
def test_curves_say_what_the_table_says(batch: int, context_tokens: int) -> None:
    cells = dict(table_of(lambda batch, context: 0.01 + batch * 1e-4 + context * 1e-6).cells)
    table = LatencyTable({key: cell for key, cell in cells.items() if key[0] in (1, 4, 7) and key[1] in (0, 3)})
    column = context_columns(np.array([context_tokens]))[0]
    assert table.curves(300)[column, batch] == pytest.approx(table.step_s(batch, context_tokens))


def test_a_small_cache_holds_as_many_samples_as_have_half_of_their_responses() -> None:
    """Of 1000 tokens, with prompts of 100: 4 of 300 tokens each, and no more places than there are."""
    tall = np.ones(8)
    small = PartEnds(tall * 300, tall, tall * 100, linear(), 64, tall * 0.0, kv_tokens=1000.0)
    four = part_ends([300] * 8, slots=4)
    assert small.ends(0).tolist() == pytest.approx(four.ends(0).tolist())
