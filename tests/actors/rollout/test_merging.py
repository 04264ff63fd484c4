"""Merged or not, the ledger is told the same."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from actors.core.message import Message
from actors.protocol.tokens import FinishReason, TokenReport
from actors.protocol.work import EngineStats
from actors.protocol.workers import WorkerVersion
from actors.rollout.outbox import going_on, merged

Row = tuple[int, int, int, int]
"""Assignment, offset, tokens, how it ended."""


def report(rows: list[Row], sequence: int = 0, version: int = 0) -> TokenReport:
    columns = np.array(rows, np.int64).reshape(-1, 4).T
    tokens = np.concatenate([[]] + [n * 1000 + np.arange(at, at + count) for n, at, count, _ in rows])
    routes = np.stack([tokens % 251, tokens % 241], axis=1).astype(np.uint8) if version % 2 else None
    return TokenReport.of(
        columns[0], columns[1], columns[2], columns[3], tokens, tokens / 8, routes, job="j", worker="w", term=1,
        sequence=sequence, policy_version=version, stats=EngineStats(step_s=1.0, tokens_total=sequence),
    )  # fmt: skip


def entries(reports: list[TokenReport]) -> list[tuple[int, int, int, float, int, int]]:
    """Every token as (assignment, position, id, log-probability, version, how its row ended); and rows without one."""
    found: list[tuple[int, int, int, float, int, int]] = []
    for one in reports:
        ends = np.cumsum(one.counts)
        if one.policy_version % 2 and len(one.tokens):
            assert one.routes is not None
            assert one.routes.tolist() == [[token % 251, token % 241] for token in one.tokens.tolist()]
        else:
            assert one.routes is None
        for row, end in zip(one.rows.tolist(), ends.tolist(), strict=True):
            number, offset, count, finished = row
            for i in range(count):
                at, last = end - count + i, i + 1 == count
                says = (int(one.tokens[at]), float(one.logprobs[at]), one.policy_version, finished if last else 0)
                found.append((number, offset + i, *says))
            if not count:
                found.append((number, offset, -1, 0.0, one.policy_version, finished))
    return sorted(found)


@st.composite
def runs(draw: st.DrawFn) -> list[TokenReport]:
    """What an engine may say: samples begin, end, rest, gain several tokens; versions change."""
    at: dict[int, int] = {0: 0, 1: 3}
    version, said = 0, list[TokenReport]()
    for sequence in range(draw(st.integers(1, 12))):
        version += draw(st.integers(0, 9)) == 0
        if draw(st.integers(0, 4)) == 0:
            at[10 + sequence] = draw(st.integers(0, 5))
        rows: list[Row] = []
        usual = draw(st.integers(1, 3))
        for number in list(at):
            event = draw(st.sampled_from(["goes on"] * 12 + ["rests", "ends", "is aborted", "gains more"]))
            if event == "rests":
                continue
            count = {"gains more": usual + 1, "is aborted": 0}.get(event, usual)
            reason = {"ends": FinishReason.STOP, "is aborted": FinishReason.ABORTED}.get(event, FinishReason.RUNNING)
            rows.append((number, at[number], count, int(reason)))
            at[number] += count
            if reason:
                del at[number]
        if rows:
            said.append(report(rows, sequence, version))
    return said or [report([(0, 0, 1, 0)])]


@given(runs(), st.integers(1, 40))
def test_merged_or_not_the_same_is_said(said: list[TokenReport], tokens_max: int) -> None:
    waiting, left = list[Message](said), list[TokenReport]()
    while waiting:
        steps = going_on(waiting, tokens_max)
        assert list(steps) == waiting[: len(steps)]
        left.append(merged(steps))
        assert len(steps) == 1 or len(left[-1].tokens) <= tokens_max
        del waiting[: len(steps)]
    assert entries(left) == entries(said)
    assert sum(one.stats.step_s for one in left) == len(said)
    assert left[-1].stats.tokens_total == said[-1].stats.tokens_total
    for before, after in pairwise(left):
        assert before.sequence < after.sequence


def test_steps_of_the_same_samples_become_one_row_a_sample() -> None:
    said = [report([(1, at, 1, 0), (2, at + 5, 1, int(at == 2))], at) for at in range(3)]
    steps = going_on(said, 100)
    assert list(steps) == said, "the last one may end a sample"
    one = merged(steps)
    assert one.rows.tolist() == [(1, 0, 3, 0), (2, 5, 3, 1)]
    assert one.tokens.tolist() == [1000, 1001, 1002, 2005, 2006, 2007]
    assert (one.sequence, one.stats.step_s) == (2, 3.0)


def test_steps_of_several_tokens_become_one_row_a_sample_too() -> None:
    said = [
        report([(1, 0, 2, 0), (2, 5, 2, 0)]),
        report([(1, 2, 1, 0), (2, 7, 1, 0)]),
        report([(1, 3, 3, 1), (2, 8, 3, 0)]),
    ]
    assert list(going_on(said, 100)) == said
    one = merged(said)
    assert one.rows.tolist() == [(1, 0, 6, 1), (2, 5, 6, 0)]
    assert one.tokens.tolist() == [*range(1000, 1006), *range(2005, 2011)]
    assert len(going_on(said, 11)) == 2


def test_what_does_not_go_on_is_said_apart() -> None:
    first = report([(1, 0, 1, 0), (2, 0, 1, 0)])
    news = WorkerVersion(job="j", worker="w", policy_version=1, pull_s=0.0, pull_bytes=0)
    for other in (
        news,
        report([(1, 1, 1, 0)]),  # one rests
        report([(1, 1, 1, 0), (3, 1, 1, 0)]),  # another one has taken its place
        report([(2, 1, 1, 0), (1, 1, 1, 0)]),
        report([(1, 2, 1, 0), (2, 2, 1, 0)]),  # a gap: the ledger is to see it
        report([(1, 1, 2, 0), (2, 1, 0, 0)]),
        report([(1, 1, 0, 3), (2, 1, 0, 3)]),
        report([(1, 1, 1, 0), (2, 1, 1, 0)], version=1),
    ):
        assert list(going_on([first, other], 100)) == [first]
    ended = report([(1, 0, 1, 0), (2, 0, 1, 1)])
    assert list(going_on([ended, report([(1, 1, 1, 0), (2, 1, 1, 0)])], 100)) == [ended]
    assert len(going_on([first, report([(1, 1, 1, 0), (2, 1, 1, 0)])], 3)) == 1, "no more tokens than asked for"
