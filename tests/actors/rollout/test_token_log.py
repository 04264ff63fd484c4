"""What follows on, from wherever the scheduler stands: no gap, no repeat, each token with the version that made it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from actors.protocol.tokens import FinishReason, TokenReport
from actors.protocol.work import EngineStats
from actors.rollout.token_log import KeptAssignment, TokenLog

NUMBERS = (1, 2, 3)


def token(number: int, position: int) -> int:
    return 1000 * number + position


def report(version: int, rows: list[tuple[int, int, int, int]]) -> TokenReport:
    """Rows of (number, offset, count, finished)."""
    tokens = [token(number, offset + i) for number, offset, count, _ in rows for i in range(count)]
    return TokenReport.of(
        job="j", worker="w", term=1, sequence=0, policy_version=version,
        assignments=np.array([r[0] for r in rows], np.int64), offsets=np.array([r[1] for r in rows], np.int32),
        counts=np.array([r[2] for r in rows], np.int32), finished=np.array([r[3] for r in rows], np.uint8),
        tokens=np.array(tokens, np.int32), logprobs=np.array(tokens, np.float32), stats=EngineStats(),
        routes=None if version % 3 == 2 else routes(tokens),
    )  # fmt: skip


def routes(tokens: list[int]) -> np.ndarray:
    """Two bytes a token; versions 2, 5, … tell none."""
    return np.array([(token % 251 + 1, token % 241 + 1) for token in tokens], np.uint8).reshape(len(tokens), 2)


def told(reports: list[TokenReport]) -> dict[int, list[tuple[int, int]]]:
    """Number → (token, version) in order of arrival; asserts that offsets go on."""
    found: dict[int, list[tuple[int, int]]] = {}
    at: dict[int, int] = {}
    for one in reports:
        assert one.term == 2 and len(set(one.assignments.tolist())) == len(one.assignments)
        start = 0
        for number, offset, count in zip(
            one.assignments.tolist(), one.offsets.tolist(), one.counts.tolist(), strict=True
        ):
            assert at.get(number, offset) == offset
            at[number] = offset + count
            found.setdefault(number, []).extend((t, one.policy_version) for t in one.tokens[start : start + count])
            start += count
        assert one.logprobs.tolist() == one.tokens.tolist()
        if one.policy_version % 3 == 2 or not len(one.tokens):
            assert one.routes is None
        else:
            assert one.routes is not None and one.routes.tolist() == routes(one.tokens.tolist()).tolist()
    return found


@given(
    steps=st.lists(st.tuples(st.integers(0, 1), st.lists(st.integers(0, 2), min_size=3, max_size=3)), max_size=12),
    known=st.lists(st.integers(0, 24), min_size=3, max_size=3),
)
def test_a_continuation_is_what_the_scheduler_lacks(steps: list[tuple[int, list[int]]], known: list[int]) -> None:
    log, made, version = TokenLog(10_000, 10_000), {number: list[tuple[int, int]]() for number in NUMBERS}, 0
    ends: dict[int, set[int]] = {number: {0} for number in NUMBERS}
    for newer, counts in steps:
        version += newer
        rows = [(n, len(made[n]), count, 0) for n, count in zip(NUMBERS, counts, strict=True) if count]
        for n, at, count, _ in rows:
            made[n] += [(token(n, at + i), version) for i in range(count)]
            ends[n].add(at + count)
        log.add(report(version, rows))
    lengths = {n: max(end for end in ends[n] if end <= length) for n, length in zip(NUMBERS, known, strict=True)}
    kept = {n: KeptAssignment(100 + n, length) for n, length in lengths.items()}
    found = told(log.continuation(kept, term=2))
    assert found == {100 + n: made[n][lengths[n] :] for n in NUMBERS if made[n][lengths[n] :]}


def test_rows_behind_a_gap_and_after_an_end_are_left_out() -> None:
    log = TokenLog(100, 100)
    log.add(report(0, [(1, 0, 2, 0), (2, 0, 1, FinishReason.STOP)]))
    log.add(report(0, [(1, 4, 1, 0), (3, 5, 1, 0)]))
    [only] = log.continuation({1: KeptAssignment(11, 0), 2: KeptAssignment(12, 0), 3: KeptAssignment(13, 2)}, term=2)
    assert (only.assignments.tolist(), only.counts.tolist()) == ([11, 12], [2, 1])
    assert only.finished.tolist() == [FinishReason.RUNNING, FinishReason.STOP]


def test_the_oldest_goes_while_there_is_a_scheduler_and_nothing_without_one() -> None:
    log = TokenLog(newest_tokens=4, orphan_tokens=6)
    for at in range(10):
        log.add(report(0, [(1, at, 1, 0)]))
    assert not log.full
    assert told(log.continuation({1: KeptAssignment(11, 6)}, 2)) == {11: [(token(1, at), 0) for at in range(6, 10)]}
    assert log.continuation({1: KeptAssignment(11, 5)}, 2) == []
    log.lose()
    for at in range(10, 16):
        assert not log.full
        log.add(report(0, [(1, at, 1, 0)]))
    assert log.full
    assert log.unheard_tokens == 6
    log.clear()
    assert not log.full
