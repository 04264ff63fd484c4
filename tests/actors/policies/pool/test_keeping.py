"""How many machines are asked for, and which are given back, as a table."""

from __future__ import annotations

import pytest

from actors.policies.pool.keeping import Keeping, KeepingView, decide


@pytest.mark.parametrize(
    ("view", "keeping"),
    [
        (KeepingView([], 3), Keeping([], 3)),
        (KeepingView(["a", "b"], 3), Keeping([], 1)),
        (KeepingView(["a", "b"], 2), Keeping([], 0)),
        (KeepingView(["a", "b", "c"], 2), Keeping(["c"], 0)),
        (KeepingView(["a", "b", "c"], 2, in_use={"b", "c"}), Keeping(["a"], 0)),
        (KeepingView(["a", "b", "c"], 1, in_use={"b", "c"}), Keeping(["c", "a"], 0)),
        (KeepingView(["a"], 0, in_use={"a"}), Keeping(["a"], 0)),
    ],
    ids=["none yet", "too few", "enough", "the youngest goes", "an idle one goes first", "idle, and youngest", "all"],
)
def test_machines_are_asked_for_and_given_back(view: KeepingView, keeping: Keeping) -> None:
    assert decide(view) == keeping
