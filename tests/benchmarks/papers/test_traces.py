"""Figures of spot traces, what studies make of them, and the generator."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.papers.trace_generator import Market, generate
from benchmarks.papers.traces import (
    between,
    changes,
    kept,
    nodes_max,
    nodes_mean,
    preemptions,
    shorter_lived,
    write_trace,
)
from supervisors.providers.trace_files import read_trace
from supervisors.providers.traces import Trace, TraceEvent

CARRIED = Path(__file__).resolve().parents[3] / "configs" / "traces"


def check_lives(trace: Trace) -> None:
    """What every trace promises."""
    state: dict[str, str] = {}
    for before, event in zip((None, *trace.events), trace.events, strict=False):
        assert before is None or before.at_s <= event.at_s
        assert 0 <= event.at_s <= trace.length_s
        assert (event.what == "up") == (event.node not in state)
        assert state.get(event.node) != "kill"
        state[event.node] = event.what


def trace_of(*rows: tuple[float, str, str]) -> Trace:
    return Trace("t", tuple(TraceEvent(at_s, node, what) for at_s, node, what in rows), max(row[0] for row in rows))


def test_figures_of_a_trace_count_the_machines_that_are_there() -> None:
    trace = trace_of((0.0, "a", "up"), (1.5, "b", "up"), (3.0, "a", "kill"))
    assert list(changes(trace)) == [(0.0, 1), (1.5, 2), (3.0, 1)]
    assert (nodes_max(trace), preemptions(trace)) == (2, 1)
    assert nodes_mean(trace) == pytest.approx((1.5 * 1 + 1.5 * 2) / 3)


def test_a_trace_survives_being_written(tmp_path: Path) -> None:
    trace = Trace("t", (TraceEvent(0.5, "a", "up", "h20"), TraceEvent(2.0, "a", "notice", "h20")), 2.0)
    write_trace(trace, tmp_path / "t.csv")
    assert read_trace(tmp_path / "t.csv").events == trace.events


@pytest.mark.parametrize(
    ("name", "most", "killed", "hours"),
    [("bamboo_p3.csv", 32, 167, 11.4), ("bamboo_g4dn.csv", 24, 74, 10.8), ("three_nodes.csv", 3, 3, 34 / 3600)],
)
def test_the_carried_traces_are_what_their_page_says(name: str, most: int, killed: int, hours: float) -> None:
    trace = read_trace(CARRIED / name)
    check_lives(trace)
    assert (nodes_max(trace), preemptions(trace)) == (most, killed)
    assert trace.length_s / 3600 == pytest.approx(hours, abs=0.06)


def test_a_part_of_a_trace_begins_with_who_is_there() -> None:
    trace = trace_of((0, "a", "up"), (1, "b", "up"), (3, "a", "kill"), (7, "c", "up"), (9, "c", "kill"))
    part = between(trace, 2.0, 8.0)
    assert [(e.at_s, e.node, e.what) for e in part.events] == [
        (0, "a", "up"), (0, "b", "up"), (1, "a", "kill"), (5, "c", "up"),
    ]  # fmt: skip
    assert part.length_s == 6


@given(
    seed=st.integers(0, 10_000),
    nodes=st.integers(1, 6),
    crunch=st.sampled_from([600.0, 7200.0, math.inf]),
    notice_s=st.sampled_from([0.0, 30.0, 4000.0]),
    part=st.floats(0, 1),
    factor=st.floats(0.5, 100),
)
def test_whatever_is_generated_thinned_cut_or_sped_up_tells_of_possible_lives(
    seed: int, nodes: int, crunch: float, notice_s: float, part: float, factor: float
) -> None:
    trace = generate(Market(nodes_max=nodes, crunch_every_s=crunch, notice_s=notice_s), 20_000.0, seed)
    for made in (trace, kept(trace, part, seed), between(trace, 3000.0, 9000.0), trace.faster(factor)):
        check_lives(made)
        assert nodes_max(made) <= nodes
    assert nodes_mean(trace.faster(factor)) == pytest.approx(nodes_mean(trace))


def test_equal_seeds_give_equal_traces_and_other_seeds_others() -> None:
    market = Market()
    assert generate(market, 40_000, 3).events == generate(market, 40_000, 3).events
    assert generate(market, 40_000, 3).events != generate(market, 40_000, 4).events


def test_generated_lives_last_as_long_as_the_market_says_and_crunches_end_many_at_once() -> None:
    calm = generate(Market(nodes_max=50, crunch_every_s=math.inf, notice_s=0), 400_000, 1)
    assert nodes_mean(calm) == pytest.approx(50 * 5400 / 7200, rel=0.05)
    crunched = generate(Market(nodes_max=50, crunch_every_s=20_000, notice_s=0), 400_000, 1)
    ends = [event.at_s for event in crunched.events if event.what == "kill"]
    assert max(ends.count(at_s) for at_s in set(ends)) > 20
    assert len({e.at_s for e in calm.events if e.what == "kill"}) == preemptions(calm), "without crunches one by one"


@pytest.mark.parametrize("times", [2, 5])
def test_shorter_lives_leave_as_many_machines_at_each_instant_and_multiply_preemptions(times: int) -> None:
    trace = kept(read_trace(CARRIED / "bamboo_g4dn.csv"), 0.5, 0)
    shorter = shorter_lived(trace, times, 0)
    check_lives(shorter)
    assert steps_of(shorter) == steps_of(trace)
    born = sum(event.what == "up" for event in trace.events)
    assert preemptions(shorter) == preemptions(trace) + (times - 1) * born
    assert shorter_lived(shorter, 1, 0) == shorter
    assert shorter_lived(trace, times, 1) != shorter == shorter_lived(trace, times, 0)


def steps_of(trace: Trace) -> list[tuple[float, int]]:
    """Instants at which the number of machines becomes another one."""
    before, steps = 0, list[tuple[float, int]]()
    for at_s, count in changes(trace):
        if count != before:
            steps.append((at_s, count))
        before = count
    return steps


def test_a_notice_is_given_to_the_machine_that_is_there_and_lives_are_cut_into_at_least_one_part() -> None:
    trace = Trace("t", (TraceEvent(0, "a", "up"), TraceEvent(99.9, "a", "notice"), TraceEvent(100, "a", "kill")), 100)
    check_lives(shorter_lived(trace, 4, 0))
    assert [e.node for e in shorter_lived(trace, 4, 0).events if e.what == "notice"] == ["a+3"]
    with pytest.raises(ValueError, match="cut into 0 parts; expected at least 1"):
        shorter_lived(trace, 0, 0)
