"""Slots that say the same share a row, and no row is lost, copied too late or read after it was written over."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from actors.rollout.engines.torch.branches import Arrangement, rearranged


def columns(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_slots_that_say_something_else_get_a_row_of_their_own() -> None:
    new = rearranged(columns(0, 0, 0, 1, 1), columns(5, 6, 5, 9, 9))
    assert new.branches.tolist() == [0, 2, 0, 1, 1]
    assert (new.sources.tolist(), new.targets.tolist(), new.rows) == ([0], [2], 3)


def test_nothing_moves_while_nothing_differs() -> None:
    new = rearranged(columns(1, 0, 1), columns(7, 7, 7))
    assert new.branches.tolist() == [1, 0, 1]
    assert (len(new.sources), new.rows) == (0, 2)


def test_the_row_of_whoever_has_left_is_used_again() -> None:
    new = rearranged(columns(2, 0, 2), columns(3, 4, 5))  # nobody is left on row 1
    assert new.branches.tolist() == [2, 0, 1]
    assert (new.sources.tolist(), new.targets.tolist(), new.rows) == ([2], [1], 3)


def test_without_slots_there_are_no_rows() -> None:
    assert rearranged(columns(), columns()).rows == 0


def apply(cache: list[str], new: Arrangement) -> list[str]:
    """As a decoder does it: all sources are read before anything is written."""
    assert not set(new.sources.tolist()) & set(new.targets.tolist()), "a decoder may copy in any order"
    rows = [*cache, *([""] * new.rows)][: max(len(cache), new.rows)]
    for source, target in zip(new.sources.tolist(), new.targets.tolist(), strict=True):
        rows[target] = cache[source]
    return rows[: new.rows]


@given(st.data())
def test_every_slot_finds_its_own_history_on_its_row_at_the_cost_of_one_row_for_each_history(
    data: st.DataObject,
) -> None:
    said = [str(prompt) for prompt in data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=8))]
    cache = sorted(set(said))
    branches = columns(*(cache.index(one) for one in said))
    for _ in range(6):
        tokens = columns(*data.draw(st.lists(st.integers(0, 2), min_size=len(said), max_size=len(said))))
        stays = np.array(data.draw(st.lists(st.booleans(), min_size=len(said), max_size=len(said))), bool)
        said, tokens, branches = (
            [one for one, on in zip(said, stays, strict=True) if on],
            tokens[stays],
            branches[stays],
        )
        new = rearranged(branches, tokens)
        cache, branches = apply(cache, new), new.branches
        assert [cache[branch] for branch in branches] == said
        cache = ["" for _ in cache]
        said = [f"{one}{token}" for one, token in zip(said, tokens, strict=True)]
        for branch, one in zip(branches.tolist(), said, strict=True):
            assert cache[branch] in ("", one), "two that differ share a row"
            cache[branch] = one
        assert len(cache) == len(set(said))
