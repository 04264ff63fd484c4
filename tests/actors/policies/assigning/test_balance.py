"""Continuous balancing: RLBoost's Algorithm 2."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from actors.policies.assigning.balance import Move, QueueView, decide, plateau


def worker(name: str, pending: int = 0, executing: int = 0, slots: int = 64, at: int | None = None) -> QueueView:
    return QueueView(name, pending, executing, slots, at)


def test_pending_samples_move_from_the_longest_queue_to_a_worker_with_room_until_it_is_full() -> None:
    assert decide([worker("a", 10, 64), worker("b", 4, 64), worker("new", 0, 59)]) == [Move("a", "new", 5)]
    moves = decide([worker("a", 3, 64), worker("b", 2, 64), worker("new")])
    assert sorted((m.source, m.count) for m in moves) == [("a", 3), ("b", 2)]


def test_pending_samples_stay_where_nobody_has_room() -> None:
    assert decide([worker("a", 10, 64), worker("b", 0, 64)]) == []


def test_two_newcomers_share_what_is_pending() -> None:
    moves = decide([worker("a", 10, 64), worker("x"), worker("y")])
    assert sorted((m.target, m.count) for m in moves) == [("x", 5), ("y", 5)]


def test_an_idle_worker_is_given_what_the_fullest_one_runs_above_its_plateau() -> None:
    assert decide([worker("a", 0, 60, at=24), worker("b", 0, 40, at=24), worker("idle")]) == [
        Move("a", "idle", 36, running=True)
    ]


def test_nothing_that_runs_is_moved_below_the_plateau_or_before_it_is_measured() -> None:
    assert decide([worker("a", 0, 20, at=24), worker("idle")]) == []
    assert decide([worker("a", 0, 60), worker("idle")]) == []


def test_nothing_that_runs_is_moved_while_something_is_pending() -> None:
    moves = decide([worker("a", 5, 60, at=24), worker("idle")])
    assert moves == [Move("a", "idle", 5)]


def test_the_plateau_is_the_smallest_batch_that_no_larger_one_beats_by_much() -> None:
    table = {8: 800.0, 32: 2500.0, 64: 3900.0, 128: 4000.0, 256: 4050.0}
    assert plateau(table) == 64
    assert plateau({8: 800.0, 32: 2500.0, 64: 3900.0}) is None, "it still grows where the table ends"
    assert plateau({64: 3900.0}) is None
    assert plateau({}) is None


queues = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 64), st.one_of(st.none(), st.integers(1, 64))), min_size=1, max_size=6
)


@given(queues)
def test_moves_conserve_samples_fill_nobody_above_its_slots_and_leave_nothing_to_move(
    state: list[tuple[int, int, int | None]],
) -> None:
    workers = [worker(f"w{i}", pending, executing, at=at) for i, (pending, executing, at) in enumerate(state)]
    moves = decide(workers)
    pending = {w.name: w.pending for w in workers}
    executing = {w.name: w.executing for w in workers}
    for move in moves:
        assert move.count > 0
        assert move.source != move.target
        source = executing if move.running else pending
        source[move.source] -= move.count
        executing[move.target] += move.count
        assert source[move.source] >= 0
    assert all(executing[w.name] <= w.slots for w in workers)
    after = [worker(w.name, pending[w.name], executing[w.name], at=w.plateau) for w in workers]
    assert not [move for move in decide(after) if not move.running], "pending ones have come to rest"
