"""Readers of spot traces, and the notice that is added to one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from configs.errors import ConfigError
from supervisors.providers.trace_files import read_trace
from supervisors.providers.traces import Trace, TraceEvent


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
    assert trace.length_s == 3.0


def test_counts_of_a_skypilot_trace_become_nodes_of_which_the_youngest_go_first(tmp_path: Path) -> None:
    text = json.dumps({"metadata": {"gap_seconds": 300}, "data": [2, 2, 1, 3]})
    trace = read_trace(written(tmp_path, "t.json", text))
    assert [(e.at_s, e.node, e.what) for e in trace.events] == [
        (0, "node1", "up"), (0, "node2", "up"), (600, "node2", "kill"), (900, "node3", "up"), (900, "node4", "up"),
    ]  # fmt: skip
    assert trace.length_s == 1200


def test_our_own_format_holds_notices_and_price_kinds(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, "t.csv", "at_s,node,event,kind\n0.5,a,up,h20\n2,a,notice,h20\n3,a,kill,h20\n"))
    assert [e.what for e in trace.events] == ["up", "notice", "kill"]
    assert trace.kinds() == {"a": "h20"}


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


def test_a_notice_comes_before_each_kill_but_not_before_the_node(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, "t.csv", "0,add,a\n9000,add,b\n10000,remove,a\n11000,remove,b\n"))
    noticed = trace.with_notice(5.0)
    check_lives(noticed)
    assert [(e.at_s, e.node) for e in noticed.events if e.what == "notice"] == [(5, "a"), (9, "b")]
    assert noticed.with_notice(1.0).events == noticed.events, "who has a notice gets no second one"
