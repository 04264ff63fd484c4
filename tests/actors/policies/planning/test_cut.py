"""Cuts release a worker whole or not at all, never the one with the longest part, and lose nothing."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from actors.policies.planning.cut import Cut, CutView, CutWorker, decide


def worker(name: str, assigned: int, done: int, free: int = 10, **more: float) -> CutWorker:
    values = {"movable": assigned - done, "rest_tokens": 100.0, **more}
    return CutWorker(name, assigned, done, free, **values)  # pyright: ignore[reportArgumentType]


def cuts(*workers: CutWorker, cut_at: float = 0.7) -> list[Cut]:
    return decide(CutView(workers, cut_at), now=0.0)


LONGEST = worker("longest", 10, 2, holds_longest=True)


def test_a_worker_that_has_finished_enough_hands_over_all_that_is_left() -> None:
    assert cuts(LONGEST, worker("a", 10, 7)) == [Cut("a", "longest", 3)]
    assert cuts(LONGEST, worker("a", 10, 6)) == []


def test_the_longest_part_is_never_cut() -> None:
    assert cuts(worker("a", 10, 2), LONGEST._replace(done=9)) == []


def test_without_room_for_all_of_it_nothing_moves() -> None:
    assert cuts(LONGEST._replace(free=1), worker("a", 10, 8)) == []
    assert cuts(LONGEST._replace(free=1), worker("b", 10, 2, free=1), worker("a", 10, 8)) == [
        Cut("a", "b", 1),
        Cut("a", "longest", 1),
    ]


def test_one_sample_that_may_no_longer_move_keeps_its_worker() -> None:
    assert cuts(LONGEST, worker("a", 10, 8, movable=1)) == []


def test_the_nearest_takes_it_and_of_those_the_one_that_is_busy_longest() -> None:
    near, far = worker("near", 10, 1, distance_s=0.1, rest_tokens=50.0), LONGEST._replace(distance_s=0.3)
    assert cuts(far, near, worker("a", 10, 8)) == [Cut("a", "near", 2)]
    longer = worker("longer", 10, 1, distance_s=0.1, rest_tokens=500.0)
    unknown = worker("unknown", 10, 1, distance_s=0.1, rest_tokens=float("nan"))
    assert cuts(far, near, longer, unknown, worker("a", 10, 8)) == [Cut("a", "longer", 2)]


def test_who_takes_something_is_not_cut_in_the_same_look() -> None:
    assert cuts(worker("a", 10, 9), worker("b", 10, 8), worker("c", 10, 5)) == [Cut("a", "b", 1)]


def test_the_last_worker_has_nobody_to_hand_over_to() -> None:
    assert cuts(worker("a", 10, 9), worker("b", 10, 10)) == []


def test_a_worker_that_is_done_is_no_target() -> None:
    assert cuts(LONGEST._replace(done=10), worker("a", 10, 8)) == []


def test_nobody_is_cut_at_1() -> None:
    assert cuts(LONGEST, worker("a", 100, 99), cut_at=1.0) == []


WORKERS = st.lists(
    st.tuples(st.integers(0, 20), st.floats(0, 1), st.integers(0, 6), st.booleans(), st.booleans(), st.floats(0, 2)),
    max_size=6,
).map(
    lambda some: [
        worker(
            f"w{i}", assigned, round(assigned * part), free, holds_longest=longest, distance_s=distance_s,
            movable=assigned - round(assigned * part) - stuck,
        )
        for i, (assigned, part, free, longest, stuck, distance_s) in enumerate(some)
    ]
)  # fmt: skip


@given(WORKERS, st.floats(0.01, 1))
def test_cuts_are_whole_within_room_and_in_one_direction(some: list[CutWorker], cut_at: float) -> None:
    found = cuts(*some, cut_at=cut_at)
    by_name = {one.name: one for one in some}
    given_away, taken = Counter[str](), Counter[str]()
    for cut in found:
        given_away[cut.source] += cut.samples
        taken[cut.target] += cut.samples
    for name, samples in given_away.items():
        source = by_name[name]
        assert samples == source.assigned - source.done > 0, "all of it"
        assert source.done >= cut_at * source.assigned
        assert not source.holds_longest
        assert source.movable >= samples
    for name, samples in taken.items():
        assert samples <= by_name[name].free
        assert by_name[name].done < by_name[name].assigned
    assert not given_away.keys() & taken.keys()
