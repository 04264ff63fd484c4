"""Which workers serve which job: the rules one by one, and what holds for any jobs and workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.policies.sharing.lending import Borrower, Lend, LendingRules, LendingView, LentWorker, decide, targets

RULES = LendingRules(stay_s=30.0)


def workers(**held: int) -> list[LentWorker]:
    """So many for each job, of which ``none`` serve nobody."""
    names = [job for job, count in held.items() for _ in range(count)]
    return [LentWorker(f"w{i}", None if job == "none" else job) for i, job in enumerate(names)]


def after(some: Sequence[LentWorker], moves: Sequence[Lend], now_s: float = 0.0) -> list[LentWorker]:
    to = {move.worker: move.job for move in moves}
    assert len(to) == len(moves), "each once"
    return [replace(one, job=to[one.name], since_s=now_s) if one.name in to else one for one in some]


def divided(some: Sequence[LentWorker], *jobs: Borrower, now_s: float = 100.0) -> tuple[dict[str | None, int], int]:
    """Who holds how many after the decision, and how many moved."""
    moves = decide(RULES, LendingView(some, jobs), now_s)
    return dict(Counter(one.job for one in after(some, moves))), len(moves)


def test_workers_are_divided_by_what_is_left_to_generate() -> None:
    assert divided(workers(none=8), Borrower("a", 300.0), Borrower("b", 100.0)) == ({"a": 6, "b": 2}, 8)
    assert divided(workers(a=8), Borrower("a", 300.0), Borrower("b", 100.0)) == ({"a": 6, "b": 2}, 2)
    assert divided(workers(none=8), Borrower("a", 100.0, share=3.0), Borrower("b", 100.0)) == ({"a": 6, "b": 2}, 8)


def test_a_job_with_demand_has_one_worker_before_anybody_has_two() -> None:
    assert divided(workers(a=3), Borrower("a", 1e9), Borrower("b", 1.0)) == ({"a": 2, "b": 1}, 1)
    held, _ = divided(workers(none=2), Borrower("a", 1.0), Borrower("b", 2.0), Borrower("c", 3.0))
    assert held == {"c": 1, "b": 1}
    assert divided(workers(a=1), Borrower("a", 1.0), Borrower("b", 99.0)) == ({"a": 1}, 0)


def test_what_a_job_cannot_use_goes_to_the_others() -> None:
    jobs = [Borrower("a", 900.0, workers_max=2), Borrower("b", 60.0), Borrower("c", 40.0)]
    assert targets(jobs, 10) == pytest.approx({"a": 2.0, "b": 4.8, "c": 3.2})


def test_two_jobs_that_are_a_little_apart_are_left_alone() -> None:
    """Off by 1.4 in sum: a move would gain nothing."""
    assert divided(workers(a=5, b=5), Borrower("a", 57.0), Borrower("b", 43.0)) == ({"a": 5, "b": 5}, 0)
    assert divided(workers(a=50, b=50), Borrower("a", 54.0), Borrower("b", 46.0)) == ({"a": 50, "b": 50}, 0)
    assert divided(workers(a=50, b=50), Borrower("a", 56.0), Borrower("b", 44.0)) == ({"a": 56, "b": 44}, 6)


def test_a_job_that_generates_nothing_keeps_its_workers_only_if_it_will_again_soon() -> None:
    resting, other = Borrower("a", 0.0, resumes_in_s=60.0), Borrower("b", 10.0)
    assert divided(workers(a=3, b=1), resting, other) == ({"b": 4}, 3)
    soon = replace(resting, resumes_in_s=20.0)
    assert divided(workers(a=3, b=1), soon, other) == ({"a": 3, "b": 1}, 0)
    assert divided(workers(a=3), soon, other) == ({"a": 2, "b": 1}, 1), "but for who has none"
    assert divided(workers(a=3), resting) == ({"a": 3}, 0), "nobody else could use them"


def test_a_worker_stays_for_a_while_unless_somebody_has_none() -> None:
    came = [replace(one, since_s=80.0) for one in workers(a=8, b=1)]
    jobs = (Borrower("a", 10.0), Borrower("b", 90.0))
    assert divided(came, *jobs, now_s=100.0)[1] == 0
    assert divided(came, *jobs, now_s=110.0) == ({"a": 1, "b": 8}, 7)
    assert divided(came, *jobs, Borrower("c", 1.0), now_s=100.0)[0]["c"] == 1


def test_the_warmest_and_then_the_idlest_of_the_donor_goes() -> None:
    some = [
        LentWorker("busy", "a", running=9),
        LentWorker("idle", "a", running=1),
        LentWorker("warm", "a", running=5, warm={"b"}),
        LentWorker("unfit", "a", suits={"a"}, warm={"b"}),
    ]
    jobs = [Borrower("a", 1e6), Borrower("b", 1.0)]
    assert decide(RULES, LendingView(some, jobs), 100.0) == [Lend("warm", "b")]
    assert decide(RULES, LendingView([some[0], some[1], some[3]], jobs), 100.0) == [Lend("idle", "b")]


borrowers = st.lists(
    st.builds(
        Borrower,
        st.just(""),
        st.sampled_from([0.0, 1.0, 5.0, 80.0, 1e5]),
        st.sampled_from([5.0, 1e3]),
        st.sampled_from([1.0, 3.0]),
        st.sampled_from([None, None, 1, 4]),
    ),
    min_size=1,
    max_size=5,
).map(lambda some: [replace(one, name=f"job-{i}") for i, one in enumerate(some)])
fleets = st.lists(
    st.builds(
        LentWorker,
        st.just(""),
        st.sampled_from([None, "job-0", "job-0", "job-1", "job-2", "gone"]),
        st.sampled_from([0.0, 90.0]),
        st.integers(0, 3),
        warm=st.sampled_from([(), ("job-0",)]),
    ),
    max_size=20,
).map(lambda some: [replace(one, name=f"w{i}") for i, one in enumerate(some)])


@given(borrowers, fleets)
def test_nobody_with_demand_is_without_a_worker_while_another_has_two(
    jobs: list[Borrower], fleet: list[LentWorker]
) -> None:
    held = Counter(one.job for one in after(fleet, decide(RULES, LendingView(fleet, jobs), 100.0)))
    without = [job for job in jobs if job.remaining and not held[job.name]]
    spare = [job for job in jobs if held[job.name] > bool(job.remaining)]
    assert not without or not spare
    assert not without or not held[None]


@given(borrowers, fleets)
def test_the_same_view_asks_for_no_further_move_nor_does_time_alone_undo_one(
    jobs: list[Borrower], fleet: list[LentWorker]
) -> None:
    moves = decide(RULES, LendingView(fleet, jobs), 100.0)
    assert decide(RULES, LendingView(fleet[::-1], jobs[::-1]), 100.0) == moves
    now = after(fleet, moves, 100.0)
    assert decide(RULES, LendingView(now, jobs), 100.0) == []
    moved = {move.worker for move in moves}
    later = decide(RULES, LendingView(now, jobs), 200.0)
    back = [move for move in later if move.worker in moved]
    assert not back, "whoever came is not sent on while the work stays the same"


@given(borrowers, fleets)
def test_no_two_jobs_swap_workers_and_nobody_falls_below_its_target_for_another(
    jobs: list[Borrower], fleet: list[LentWorker]
) -> None:
    moves = decide(RULES, LendingView(fleet, jobs), 100.0)
    was = {one.name: one.job for one in fleet}
    pairs = {(was[move.worker], move.job) for move in moves}
    assert not any((to, source) in pairs for source, to in pairs)


@given(st.lists(st.floats(0.8, 1.2), min_size=12, max_size=12))
def test_work_that_varies_by_a_fifth_moves_nobody(factors: list[float]) -> None:
    """Eight workers, two jobs of like work: whatever comes, after the first division nobody moves."""
    fleet = after(
        workers(none=8), decide(RULES, LendingView(workers(none=8), [Borrower("a", 50.0), Borrower("b", 50.0)]), 0)
    )
    for i, factor in enumerate(factors):
        view = LendingView(fleet, [Borrower("a", 50.0 * factor), Borrower("b", 50.0)])
        assert decide(RULES, view, 100.0 * (i + 1)) == []
