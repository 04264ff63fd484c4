"""Readers of spot traces, what is made of traces, and the generator."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.errors import ConfigError
from supervisors.providers.trace_files import read_trace, write_trace
from supervisors.providers.trace_generator import Market, generate
from supervisors.providers.traces import Trace, TraceEvent

CARRIED = Path(__file__).resolve().parents[3] / "configs" / "traces"


def written(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def check_lives(trace: Trace) -> None:
    """What every trace promises."""
    state: dict[str, str] = {}
    for before, event in zip((None, *trace.events), trace.events, strict=False):
        assert before is None or before.at_s <= event.at_s
        assert 0 <= event.at_s <= trace.length_s
        assert (event.what == "up") == (event.node not in state)
        assert state.get(event.node) != "kill"
        state[event.node] = event.what


def test_a_bamboo_trace_becomes_comings_and_kills(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, "t.csv", "0,add,a\n1500,add,b\n3000,remove,a\n"))
    assert trace.events == (TraceEvent(0.0, "a", "up"), TraceEvent(1.5, "b", "up"), TraceEvent(3.0, "a", "kill"))
    assert (trace.nodes_max, trace.preemptions, trace.length_s) == (2, 1, 3.0)
    assert trace.nodes_mean == pytest.approx((1.5 * 1 + 1.5 * 2) / 3)


def test_counts_of_a_skypilot_trace_become_nodes_of_which_the_youngest_go_first(tmp_path: Path) -> None:
    text = json.dumps({"metadata": {"gap_seconds": 300}, "data": [2, 2, 1, 3]})
    trace = read_trace(written(tmp_path, "t.json", text))
    assert [(e.at_s, e.node, e.what) for e in trace.events] == [
        (0, "node1", "up"), (0, "node2", "up"), (600, "node2", "kill"), (900, "node3", "up"), (900, "node4", "up"),
    ]  # fmt: skip
    assert list(trace.changes()) == [(0, 2), (600, 1), (900, 3)]
    assert trace.length_s == 1200


def test_our_own_format_holds_notices_and_price_kinds_and_survives_being_written(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, "t.csv", "at_s,node,event,kind\n0.5,a,up,h20\n2,a,notice,h20\n3,a,kill,h20\n"))
    assert [e.what for e in trace.events] == ["up", "notice", "kill"]
    assert trace.kinds() == {"a": "h20"}
    write_trace(trace, tmp_path / "again.csv")
    assert read_trace(tmp_path / "again.csv").events == trace.events


OWN = "at_s,node,event,kind\n"


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("t.csv", "0,add,a\n5,remove\n", "t.csv:2: has 2 fields"),
        ("t.csv", "0,add,a\nsoon,remove,a\n", "t.csv:2: milliseconds: found 'soon'"),
        ("t.csv", "-5,add,a\n", "t.csv:1: milliseconds: found '-5'"),
        ("t.csv", "nan,add,a\n", "t.csv:1: milliseconds: found 'nan'"),
        ("t.csv", "0,join,a\n", "t.csv:1: add|remove: found 'join'"),
        ("t.csv", "0,add,\n", "t.csv:1: node: is empty"),
        ("t.csv", "0,add,a\n1,add,a\n", "t.csv:2: node a: comes up a second time"),
        ("t.csv", "0,add,a\n1,remove,b\n", "t.csv:2: node b: ends before it came up"),
        ("t.csv", "0,add,a\n1,remove,a\n2,remove,a\n", "t.csv:3: node a: ends a second time"),
        ("t.csv", "9,add,a\n\n1,add,b\n", "t.csv:3: time: 0.001 s come after 0.009 s"),
        ("t.csv", "", "t.csv:1: holds no event"),
        ("t.csv", OWN + "0,a,up\n", "t.csv:2: has 3 fields"),
        ("t.csv", OWN + "0,a,gone,spot\n", "t.csv:2: event: found 'gone'"),
        ("t.csv", OWN + "0,a,up,\n", "t.csv:2: kind: is empty"),
        ("t.csv", OWN + "0,a,up,s\n1,a,notice,s\n2,a,notice,s\n", "t.csv:4: node a: is given notice a second time"),
        ("t.json", "[1, 2", "t.json:1: is no JSON"),
        ("t.json", "[1, 2]", "t.json:1: metadata.gap_seconds: found None"),
        ("t.json", '{"metadata": {"gap_seconds": 0}, "data": [1]}', "metadata.gap_seconds: found 0"),
        ("t.json", '{"metadata": {"gap_seconds": 300}, "data": 4}', "t.json:1: data: is no list"),
        ("t.json", '{"metadata": {"gap_seconds": 300},\n "data": [4,\n4,\n-1]}', "t.json:4: data[2]: found -1"),
        ("t.json", '{"metadata": {"gap_seconds": 300}, "data": [4, "4"]}', "data[1]: found '4'"),
    ],
)
def test_a_row_that_does_not_fit_is_an_error_that_names_file_line_and_field(
    tmp_path: Path, name: str, text: str, says: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        read_trace(written(tmp_path, name, text))
    assert says in str(raised.value)


def test_a_missing_file_is_an_error_that_says_where_traces_lie(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="configs/traces/"):
        read_trace(tmp_path / "none.csv")


@pytest.mark.parametrize(
    ("name", "nodes_max", "preemptions", "hours"),
    [("bamboo_p3.csv", 32, 167, 11.4), ("bamboo_g4dn.csv", 24, 74, 10.8), ("three_nodes.csv", 3, 3, 34 / 3600)],
)
def test_the_carried_traces_are_what_their_page_says(name: str, nodes_max: int, preemptions: int, hours: float) -> None:
    trace = read_trace(CARRIED / name)
    check_lives(trace)
    assert (trace.nodes_max, trace.preemptions) == (nodes_max, preemptions)
    assert trace.length_s / 3600 == pytest.approx(hours, abs=0.06)


def test_a_part_of_a_trace_begins_with_who_is_there(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, "t.csv", "0,add,a\n1000,add,b\n3000,remove,a\n7000,add,c\n9000,remove,c\n"))
    part = trace.between(2.0, 8.0)
    assert [(e.at_s, e.node, e.what) for e in part.events] == [
        (0, "a", "up"), (0, "b", "up"), (1, "a", "kill"), (5, "c", "up"),
    ]  # fmt: skip
    assert part.length_s == 6


def test_a_notice_comes_before_each_kill_but_not_before_the_node(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, "t.csv", "0,add,a\n9000,add,b\n10000,remove,a\n11000,remove,b\n"))
    noticed = trace.with_notice(5.0)
    check_lives(noticed)
    assert [(e.at_s, e.node) for e in noticed.events if e.what == "notice"] == [(5, "a"), (9, "b")]
    assert noticed.with_notice(1.0).events == noticed.events, "who has a notice gets no second one"


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
    for made in (trace, trace.kept(part, seed), trace.between(3000.0, 9000.0), trace.faster(factor)):
        check_lives(made)
        assert made.nodes_max <= nodes
    assert trace.faster(factor).nodes_mean == pytest.approx(trace.nodes_mean)


def test_equal_seeds_give_equal_traces_and_other_seeds_others() -> None:
    market = Market()
    assert generate(market, 40_000, 3).events == generate(market, 40_000, 3).events
    assert generate(market, 40_000, 3).events != generate(market, 40_000, 4).events


def test_generated_lives_last_as_long_as_the_market_says_and_crunches_end_many_at_once() -> None:
    calm = generate(Market(nodes_max=50, crunch_every_s=math.inf, notice_s=0), 400_000, 1)
    assert calm.nodes_mean == pytest.approx(50 * 5400 / 7200, rel=0.05)
    crunched = generate(Market(nodes_max=50, crunch_every_s=20_000, notice_s=0), 400_000, 1)
    ends = [event.at_s for event in crunched.events if event.what == "kill"]
    assert max(ends.count(at_s) for at_s in set(ends)) > 20
    assert len({e.at_s for e in calm.events if e.what == "kill"}) == calm.preemptions, "without crunches one by one"


@pytest.mark.parametrize("times", [2, 5])
def test_shorter_lives_leave_as_many_machines_at_each_instant_and_multiply_preemptions(times: int) -> None:
    trace = read_trace(CARRIED / "bamboo_g4dn.csv").kept(0.5, 0)
    shorter = trace.shorter_lived(times, 0)
    check_lives(shorter)
    assert steps_of(shorter) == steps_of(trace)
    born = sum(event.what == "up" for event in trace.events)
    assert shorter.preemptions == trace.preemptions + (times - 1) * born
    assert shorter.shorter_lived(1, 0) == shorter
    assert trace.shorter_lived(times, 1) != shorter == trace.shorter_lived(times, 0)


def steps_of(trace: Trace) -> list[tuple[float, int]]:
    """Instants at which the number of machines becomes another one."""
    before, steps = 0, list[tuple[float, int]]()
    for at_s, count in trace.changes():
        if count != before:
            steps.append((at_s, count))
        before = count
    return steps


def test_a_notice_is_given_to_the_machine_that_is_there_and_lives_are_cut_into_at_least_one_part() -> None:
    trace = Trace("t", (TraceEvent(0, "a", "up"), TraceEvent(99.9, "a", "notice"), TraceEvent(100, "a", "kill")), 100)
    check_lives(trace.shorter_lived(4, 0))
    assert [e.node for e in trace.shorter_lived(4, 0).events if e.what == "notice"] == ["a+3"]
    with pytest.raises(ValueError, match="cut into 0 parts; expected at least 1"):
        trace.shorter_lived(0, 0)
