"""Reads traces from files in three formats, which are recognized by the file's name and first line:

    Bamboo CSV      milliseconds,add|remove,node          no first line; a removal is a kill without notice
    SkyPilot JSON   {"metadata": {"gap_seconds": 300}, "data": [nodes alive, …]}          one number for each gap
    our own CSV     at_s,node,event,kind  as first line; event is up, notice or kill

A malformed row is an error that names file, line and field; nothing is skipped.
"""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from typing import Any, Final, NoReturn, cast, get_args

from configs.errors import ConfigError, Problem
from supervisors.providers.traces import Trace, TraceEvent, What, in_order

HEADER: Final = ("at_s", "node", "event", "kind")
_NODES_MAX: Final = 100_000
"""Most nodes alive at once in a SkyPilot file: a larger number cannot be a count of machines."""


def read_trace(path: str | Path) -> Trace:
    """The trace in the file at ``path``.

    Raises:
        ConfigError: it cannot be read or is malformed.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = Problem(str(file), "", f"cannot be read: {error}", "Name a trace; some lie in configs/traces/")
        raise ConfigError([problem]) from error
    return _skypilot(file, text) if file.suffix == ".json" else _csv(file, text)


# ------------------------------------------------------------ rows


def _csv(file: Path, text: str) -> Trace:
    rows = [
        (line, [field.strip() for field in row]) for line, row in enumerate(csv.reader(io.StringIO(text)), 1) if row
    ]
    own = bool(rows) and rows[0][1] == list(HEADER)
    lives, events = _Lives(file), list[TraceEvent]()
    for line, row in rows[1:] if own else rows:
        event = _own_row(file, line, row) if own else _bamboo_row(file, line, row)
        lives.follow(line, event)
        events.append(event)
    if not events:
        _wrong(file, 1, "", "holds no event", f"Write rows of milliseconds,add|remove,node or of {','.join(HEADER)}")
    return Trace(str(file), in_order(events), events[-1].at_s)


def _bamboo_row(file: Path, line: int, row: list[str]) -> TraceEvent:
    if len(row) != 3:
        _wrong(file, line, "", f"has {len(row)} fields; expected milliseconds,add|remove,node", "Correct the row")
    verb, node = row[1:]
    if verb not in ("add", "remove"):
        _wrong(file, line, "add|remove", f"found {verb!r}", "Write one of the two")
    at_s = _time(file, line, "milliseconds", row[0]) / 1000
    return TraceEvent(at_s, _named(file, line, node), "up" if verb == "add" else "kill")


def _own_row(file: Path, line: int, row: list[str]) -> TraceEvent:
    if len(row) != len(HEADER):
        _wrong(file, line, "", f"has {len(row)} fields; expected {','.join(HEADER)}", "Correct the row")
    _, node, what, kind = row
    if what not in get_args(What):
        _wrong(file, line, "event", f"found {what!r}; expected {', '.join(get_args(What))}", "Write one of them")
    if not kind:
        _wrong(file, line, "kind", "is empty", "Write what the node is priced as, such as spot")
    return TraceEvent(_time(file, line, "at_s", row[0]), _named(file, line, node), cast("What", what), kind)


class _Lives:
    """Checks that rows describe possible lives: in order of time, up before the end, one life for each name."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._last_s = 0.0
        self._state: dict[str, What] = {}

    def follow(self, line: int, event: TraceEvent) -> None:
        if event.at_s < self._last_s:
            wrong = f"{event.at_s:g} s come after {self._last_s:g} s"
            _wrong(self._file, line, "time", wrong, "Sort the rows by time")
        before, field = self._state.get(event.node), f"node {event.node}"
        if event.what == "up" and before is not None:
            _wrong(self._file, line, field, "comes up a second time", "Give each life of a machine a name of its own")
        if event.what != "up" and before is None:
            _wrong(self._file, line, field, "ends before it came up", "Add the row with which it comes")
        if event.what != "up" and before == "kill":
            _wrong(self._file, line, field, "ends a second time", "Remove the row")
        if event.what == before == "notice":
            _wrong(self._file, line, field, "is given notice a second time", "Remove the row")
        self._last_s, self._state[event.node] = event.at_s, event.what


def _time(file: Path, line: int, field: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        _wrong(file, line, field, f"found {text!r}; expected a number of at least 0", "Count from the trace's start")
    return value


def _named(file: Path, line: int, node: str) -> str:
    if not node:
        _wrong(file, line, "node", "is empty", "Name the machine")
    return node


# ------------------------------------------------------------ counts


def _skypilot(file: Path, text: str) -> Trace:
    """Read counts, which name no machine: when a count falls, the machines that came last have gone."""
    gap_s, counts = _counts(file, text)
    events, alive, born = list[TraceEvent](), list[str](), 0
    for index, count in enumerate(counts):
        at_s = index * gap_s
        while len(alive) > count:
            events.append(TraceEvent(at_s, alive.pop(), "kill"))
        while len(alive) < count:
            born += 1
            alive.append(f"node{born}")
            events.append(TraceEvent(at_s, alive[-1], "up"))
    return Trace(str(file), in_order(events), len(counts) * gap_s)


def _counts(file: Path, text: str) -> tuple[float, list[int]]:
    try:
        whole: Any = json.loads(text)
    except ValueError as error:
        line = getattr(error, "lineno", 1)
        _wrong(file, line, "", f"is no JSON: {error}", "Write one object with metadata and data")
    whole = cast("dict[str, Any]", whole) if isinstance(whole, dict) else {}
    metadata, counts = whole.get("metadata"), whole.get("data")
    gap_s = cast("dict[str, Any]", metadata).get("gap_seconds") if isinstance(metadata, dict) else None
    if isinstance(gap_s, bool) or not isinstance(gap_s, int | float) or not 0 < gap_s < math.inf:
        found = f"found {gap_s!r}; expected seconds above 0"
        _wrong(file, 1, "metadata.gap_seconds", found, "Write the time between two numbers of data")
    if not isinstance(counts, list) or not counts:
        _wrong(file, 1, "data", "is no list of numbers of nodes", "Write how many nodes were there, once a gap")
    for index, count in enumerate(cast("list[Any]", counts)):
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= _NODES_MAX:
            line = _line_of(text, index)
            _wrong(file, line, f"data[{index}]", f"found {count!r}; expected a number of nodes", "Correct it")
    return float(gap_s), cast("list[int]", counts)


def _line_of(text: str, index: int) -> int:
    """Line of item ``index`` of data, found by counting commas."""
    position = text.index("[", text.index('"data"'))
    for _ in range(index):
        position = text.find(",", position + 1)
    rest = text[position + 1 :]
    return text.count("\n", 0, len(text) - len(rest.lstrip())) + 1


def _wrong(file: Path, line: int, field: str, wrong: str, fix: str) -> NoReturn:
    raise ConfigError.of(f"{file}:{line}", field, wrong, fix)
