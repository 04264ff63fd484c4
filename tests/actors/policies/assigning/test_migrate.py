"""Samples of a worker that leaves: RLBoost's token-level migration."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from actors.policies.assigning.migrate import HeldSample, decide

HELD = [
    HeldSample(1, tokens=0, running=False),
    HeldSample(2, tokens=30, running=True),
    HeldSample(3, tokens=70, running=True),
]


def test_a_worker_that_is_gone_gives_up_all_samples_with_their_tokens_the_longest_first() -> None:
    assert decide(HELD, 0) == [HELD[2], HELD[1], HELD[0]]


def test_with_notice_pending_samples_leave_at_once_and_running_ones_stay() -> None:
    assert decide(HELD, 30, margin_s=2) == [HELD[0]]


def test_running_ones_leave_a_margin_before_the_end() -> None:
    assert [move.sample for move in decide(HELD, 2, margin_s=2)] == [3, 2, 1]


@given(st.lists(st.tuples(st.integers(0, 100), st.booleans())), st.floats(0, 60))
def test_each_sample_leaves_at_most_once(held: list[tuple[int, bool]], left_s: float) -> None:
    samples = [HeldSample(i, tokens, running) for i, (tokens, running) in enumerate(held)]
    moves = decide(samples, left_s, margin_s=5)
    names = [move.sample for move in moves]
    assert len(set(names)) == len(names)
    assert {s.sample for s in samples if not s.running} <= set(names)
    assert len(names) == len(samples) or left_s > 5
