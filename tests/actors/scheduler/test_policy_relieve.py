"""Idle workers take what a step waits for, and no more than makes all of them equally full."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from actors.scheduler.policies.relieve import Relief, RunningSample, decide, orders, pays

SAMPLES = st.lists(st.tuples(st.integers(3, 5), st.integers(0, 5000)), max_size=60).map(
    lambda drawn: [RunningSample(i, step, tokens) for i, (step, tokens) in enumerate(drawn)]
)


def test_the_oldest_step_goes_first_and_of_it_what_has_the_most_tokens() -> None:
    running = [
        RunningSample(0, step=4, tokens=900),
        RunningSample(1, step=3, tokens=100),
        RunningSample(2, step=3, tokens=800),
        RunningSample(3, step=3, tokens=500),
    ]
    assert decide(running, ["a"], workers=2) == [Relief(2, "a"), Relief(3, "a")]
    assert decide(running, ["a", "b"], workers=3) == [Relief(2, "a"), Relief(3, "b")]


def test_nobody_is_moved_to_nobody_and_nothing_from_nowhere() -> None:
    assert decide([], ["a"], workers=2) == []
    assert decide([RunningSample(0, 0, 10)], [], workers=2) == []


@given(running=SAMPLES, idle=st.integers(1, 4), busy=st.integers(1, 4))
def test_no_worker_gets_more_than_its_share_and_no_newer_step_goes(
    running: list[RunningSample], idle: int, busy: int
) -> None:
    names = [f"idle-{i}" for i in range(idle)]
    moves = decide(running, names, idle + busy)
    assert len({move.sample for move in moves}) == len(moves)
    assert all(count <= -(-len(running) // (idle + busy)) for count in Counter(m.target for m in moves).values())
    step = {one.sample: one.step for one in running}
    assert {step[move.sample] for move in moves} <= {min(step.values(), default=0)}


def test_a_move_pays_where_a_step_is_clearly_shorter_and_never_unmeasured() -> None:
    assert pays(0.10, 0.09)
    assert not pays(0.10, 0.097)
    assert not pays(float("nan"), 0.09)
    assert not pays(0.10, float("nan"))


@given(
    at=st.dictionaries(st.integers(0, 500), st.sampled_from([f"busy-{i}" for i in range(5)]), max_size=60),
    idle=st.integers(1, 6),
)
def test_orders_of_a_relief_are_few_and_give_every_idle_worker_as_many_as_it_was_dealt(
    at: dict[int, str], idle: int
) -> None:
    names = [f"idle-{i}" for i in range(idle)]
    moves = decide([RunningSample(sample, 0, sample) for sample in at], names, 5 + idle)
    by_pair = orders(moves, at)
    assert sorted(sample for samples in by_pair.values() for sample in samples) == sorted(m.sample for m in moves)
    assert all(at[sample] == source for (source, _), samples in by_pair.items() for sample in samples)
    dealt = Counter(move.target for move in moves)
    assert Counter(target for (_, target), samples in by_pair.items() for _ in samples) == dealt
    sources = {at[move.sample] for move in moves}
    assert len(by_pair) <= max(0, len(sources) + len(dealt) - 1)
