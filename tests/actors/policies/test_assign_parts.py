"""Assignment of a planned step: each part waits for its own worker, as long as that is there."""

from __future__ import annotations

import numpy as np

from actors.policies.assigning.assign import AssignSamples, decide
from actors.policies.assigning.view import AssignView, GroupView, WorkerView


def given(workers: list[WorkerView], groups: list[GroupView]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    decisions: list[AssignSamples] = decide(AssignView(workers, groups, 0, 2.0, 1000, keeps_parts=True), 0.0)
    for decision in decisions:
        found.setdefault(decision.worker, []).extend(decision.rows.tolist())
    return {worker: sorted(rows) for worker, rows in found.items()}


def group(prompt: int, *kept_for: str, moved: bool = False) -> GroupView:
    rows = np.arange(4 * prompt, 4 * prompt + 4, dtype=np.int32)
    return GroupView(0, prompt, rows, moved=moved, version=0 if moved else -1, kept_for=frozenset(kept_for))


def test_a_part_goes_to_its_worker_alone_and_waits_where_that_has_no_room() -> None:
    workers = [WorkerView("a", 0, 6, 0), WorkerView("b", 0, 16, 0)]
    assert given(workers, [group(0, "a"), group(1, "a"), group(2, "b")]) == {
        "a": [0, 1, 2, 3, 4, 5], "b": [8, 9, 10, 11],
    }  # fmt: skip


def test_the_part_of_a_worker_that_is_gone_takes_what_room_the_others_have_left() -> None:
    workers = [WorkerView("a", 0, 6, 0), WorkerView("b", 0, 6, 0)]
    assert given(workers, [group(0, "gone"), group(1, "a"), group(2, "b")]) == {
        "a": [0, 1, 4, 5, 6, 7], "b": [2, 3, 8, 9, 10, 11],
    }  # fmt: skip


def test_what_holds_tokens_goes_before_all_parts_and_beyond_its_worker_if_that_is_full() -> None:
    workers = [WorkerView("a", 0, 8, 6), WorkerView("b", 0, 6, 0)]
    found = given(workers, [group(0, "b"), group(1, "a", moved=True)])
    assert found == {"a": [4, 5], "b": [0, 1, 2, 3, 6, 7]}


def test_who_has_joined_later_shares_the_part_of_another() -> None:
    workers = [WorkerView("a", 0, 16, 8), WorkerView("late", 0, 16, 0)]
    assert set(given(workers, [group(0, "a", "late"), group(1, "a", "late")])["late"]) == set(range(8))
