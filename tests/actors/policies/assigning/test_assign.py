"""The assignment policy: credit, staleness, balance, siblings together."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from actors.policies.assigning.assign import decide
from actors.policies.assigning.view import AssignView, GroupView, WorkerView


def view(workers: list, groups: list, staleness: int = 0, message_samples: int = 1000) -> AssignView:
    return AssignView(workers, groups, staleness, pull_patience_s=2.0, message_samples=message_samples)


def groups(n: int, size: int = 8, step: int = 0) -> list[GroupView]:
    return [GroupView(step, p, np.arange(p * size, (p + 1) * size, dtype=np.int32)) for p in range(n)]


def given_to(decisions: list, worker: str) -> list[int]:
    return sorted(int(r) for d in decisions if d.worker == worker for r in d.rows)


def test_two_equal_workers_get_equal_shares_of_whole_groups() -> None:
    decisions = decide(view([WorkerView("a", 0, 256, 0), WorkerView("b", 0, 256, 0)], groups(4)), 0.0)
    a, b = given_to(decisions, "a"), given_to(decisions, "b")
    assert len(a) == len(b) == 16
    assert all(len({r for r in a if r // 8 == p}) in (0, 8) for p in range(4))


def test_a_single_group_is_split_when_a_worker_would_idle() -> None:
    decisions = decide(view([WorkerView("a", 0, 256, 0), WorkerView("b", 0, 256, 0)], groups(1)), 0.0)
    assert len(given_to(decisions, "a")) == len(given_to(decisions, "b")) == 4


def test_a_group_that_must_be_split_has_its_prompt_on_the_fewest_workers() -> None:
    """Three workers with one place come first, and of the others each has room for three below the common level."""
    small, large = [WorkerView(name, 0, 1, 0) for name in "abc"], [WorkerView(name, 0, 5, 0) for name in "de"]
    decisions = decide(view([*small, *large], groups(1)), 0.0)
    assert sorted(len(d.rows) for d in decisions) == [1, 1, 3, 3]
    assert {d.worker for d in decisions if len(d.rows) == 3} == {"d", "e"}


def test_a_group_goes_whole_past_shorter_queues_that_it_does_not_fit_into() -> None:
    workers = [WorkerView("a", 0, 2, 0), WorkerView("b", 0, 100, 20)]
    decisions = decide(view(workers, groups(3, size=4)), 0.0)
    assert given_to(decisions, "a") == [8, 9], "of the last group, of which there is too much for the other's share"
    assert given_to(decisions, "b") == [*range(8), 10, 11]


def test_a_worker_that_is_loading_the_version_gets_its_share_ahead() -> None:
    loading = WorkerView("b", 0, 256, 0, pulling_version=1, pulling_since_s=10.0)
    both = [WorkerView("a", 1, 256, 0), loading]
    in_time = decide(view(both, groups(4, step=1)), 10.5)
    assert (len(given_to(in_time, "a")), len(given_to(in_time, "b"))) == (16, 16)
    late = decide(view(both, groups(4, step=1)), 12.5)
    assert (len(given_to(late, "a")), len(given_to(late, "b"))) == (32, 0), "but nobody waits for it for ever"


def test_what_has_moved_goes_to_a_worker_that_serves_already() -> None:
    moved = [GroupView(g.step, g.prompt, g.rows, moved=True) for g in groups(2, step=1)]
    loading = WorkerView("b", 0, 256, 0, pulling_version=1, pulling_since_s=10.0)
    assert given_to(decide(view([WorkerView("a", 1, 256, 100), loading], moved), 10.5), "b") == []
    assert len(given_to(decide(view([loading], moved), 10.5), "b")) == 16, "where there is none, to one that will"


def test_what_a_small_worker_cannot_hold_goes_to_the_others() -> None:
    decisions = decide(view([WorkerView("a", 0, 4, 0), WorkerView("b", 0, 256, 0)], groups(5)), 0.0)
    assert (len(given_to(decisions, "a")), len(given_to(decisions, "b"))) == (4, 36)


def test_a_sample_never_goes_on_with_an_older_version_than_its_tokens_are_of() -> None:
    moved = [GroupView(g.step, g.prompt, g.rows, moved=True, version=2) for g in groups(1, step=2)]
    lagging = WorkerView("lagging", 1, 256, 0, pulling_version=2, pulling_since_s=10.0)
    assert decide(view([lagging], moved, staleness=1), 10.5) == [], "though it may begin others of that step"
    decisions = decide(view([lagging, WorkerView("newer", 3, 256, 200)], moved, staleness=1), 10.5)
    assert {decision.worker for decision in decisions} == {"newer"}


def test_work_goes_only_to_workers_within_the_staleness_bound() -> None:
    workers = [WorkerView("old", 3, 256, 0), WorkerView("new", 5, 256, 0)]
    assert given_to(decide(view(workers, groups(2, step=5), staleness=1), 0.0), "old") == []
    assert len(given_to(decide(view(workers, groups(2, step=4), staleness=1), 0.0), "old")) == 8


def test_moved_samples_go_before_all_others() -> None:
    first, second = groups(2)
    moved = GroupView(0, second.prompt, second.rows, moved=True)
    assert given_to(decide(view([WorkerView("a", 0, 8, 0)], [first, moved]), 0.0), "a") == second.rows.tolist()


def test_a_suspect_goes_whole_to_a_worker_that_holds_no_other() -> None:
    suspects = [GroupView(g.step, g.prompt, g.rows, moved=True, suspect=True) for g in groups(3)]
    two = [WorkerView("a", 0, 256, 0), WorkerView("b", 0, 256, 0)]
    decisions = decide(view(two, suspects), 0.0)
    assert {tuple(given_to(decisions, "a")), tuple(given_to(decisions, "b"))} == {
        tuple(range(8)),
        tuple(range(8, 16)),
    }, "one each, and the third waits"
    held = [WorkerView("a", 0, 256, 8, has_suspect=True)]
    assert decide(view(held, suspects), 0.0) == []
    assert given_to(decide(view(held, groups(4)[3:]), 0.0), "a") == list(range(24, 32)), "innocent work goes on"


def test_a_worker_that_rests_with_nothing_has_no_slot_and_gets_nothing() -> None:
    fleet = [WorkerView("rests", 0, 0, 0), WorkerView("a", 0, 8, 0)]
    assert given_to(decide(view(fleet, groups(1)), 0.0), "a") == list(range(8))
    suspect = [GroupView(0, 0, np.arange(8, dtype=np.int32), moved=True, suspect=True)]
    assert given_to(decide(view(fleet, suspect), 0.0), "a") == list(range(8))
    assert decide(view(fleet[:1], suspect), 0.0) == []


def test_a_message_holds_no_more_than_its_bound() -> None:
    decisions = decide(view([WorkerView("a", 0, 256, 0)], groups(4), message_samples=10), 0.0)
    assert [len(d.rows) for d in decisions] == [10, 10, 10, 2]


@given(
    st.lists(st.tuples(st.integers(-1, 4), st.integers(0, 20), st.integers(0, 20)), max_size=5),
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 8), st.booleans()), max_size=8),
    st.integers(0, 2),
)
def test_credit_is_never_exceeded_and_no_sample_is_given_twice(
    fleet: list[tuple[int, int, int]], work: list[tuple[int, int, bool]], staleness: int
) -> None:
    workers = [WorkerView(f"w{i}", v, s, min(s, f)) for i, (v, s, f) in enumerate(fleet)]
    queued = [GroupView(s, p, np.arange(p * 8, p * 8 + n, dtype=np.int32), m) for p, (s, n, m) in enumerate(work)]
    decisions = decide(view(workers, queued, staleness), 0.0)
    given_rows = [(d.step, int(r)) for d in decisions for r in d.rows]
    assert len(given_rows) == len(set(given_rows))
    assert set(given_rows) <= {(g.step, int(r)) for g in queued for r in g.rows}
    for w in workers:
        mine = [d for d in decisions if d.worker == w.name]
        assert sum(len(d.rows) for d in mine) <= w.slots - w.in_flight
        assert all(w.policy_version >= d.step - staleness for d in mine)
    ready_room = sum(w.slots - w.in_flight for w in workers if w.policy_version >= 5 - staleness)
    if ready_room and len(given_rows) < sum(len(g.rows) for g in queued):
        assert given_rows or any(w.in_flight for w in workers), "nobody idles while there is work"
