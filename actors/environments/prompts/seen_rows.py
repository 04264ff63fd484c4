"""Which rows have been looked at and which passed over: kept in the run directory, so that no row is looked at twice.

    RUN_DIR/prompt_rows.jsonl     {"data": …, "settings": …, "rows": N}            what the other lines apply to
                                  {"checked": n}                                   rows 0 to n have prompt and answer
                                  {"from": a, "to": b, "passed": [places], "why": {reason: count}, "first": {…}}

The place of a row is where the first epoch visits it; rows are looked at in that order. A later epoch passes over the
same rows. So the ``k``-th prompt of the stream is known without tokenising those before it.

Invariants
- Lines are appended, each in one write. A reader ignores a line that is torn or says what is known already: two
  processes may have looked at the same rows, and must have found the same.
- A file of other data or settings is begun anew: all that it holds can be found out again.
"""

from __future__ import annotations

import bisect
import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from actors.host.whole_file import write_whole


class SeenRows:
    """Knows the rows that were passed over. Without a ``path`` nothing is kept on disk."""

    def __init__(self, data: str, settings: str, rows: int, path: Path | None = None) -> None:
        self.rows = rows
        self.checked = 0
        self.seen = 0
        """Number of places of the first epoch that have been looked at."""
        self.why: dict[str, int] = {}
        """Number of rows that were passed over, by reason."""
        self.first: dict[str, str] = {}
        """The first row that was passed over for each reason, and what is wrong with it."""
        self.replaced = False
        """Whether this run's prompts came from other data before."""
        self._passed: list[int] = []
        self._before: list[int] = []
        """Number of rows kept before each of ``_passed``; it never falls."""
        self._unwritten: dict[str, Any] = {}
        self._path, self._read_bytes = path, 0
        self._head = {"data": data, "settings": settings, "rows": rows}
        if path is not None:
            self._open(path)

    @property
    def kept(self) -> int:
        return self.seen - len(self._passed)

    @property
    def whole(self) -> bool:
        return self.seen >= self.rows

    def place_of(self, kept: int) -> int | None:
        """Place of the first epoch's ``kept``-th row that is used; None if that row has not been reached."""
        place = kept + bisect.bisect_right(self._before, kept)
        return place if place < self.seen else None

    def passed_rows(self, order: np.ndarray) -> np.ndarray:
        """The rows that were passed over; ``order`` is the first epoch's."""
        return order[np.array(self._passed, np.int64)]

    def keep(self) -> None:
        """Note that the row of the next place is used."""
        self._looked()

    def pass_over(self, reason: str, row: str) -> None:
        """Note that the row of the next place is not used; ``row`` names that row and says what is wrong."""
        self._enter(self.seen)
        self.why[reason] = self.why.get(reason, 0) + 1
        self.first.setdefault(reason, row)
        line = self._looked()
        line["passed"].append(self.seen - 1)
        line["why"][reason] = line["why"].get(reason, 0) + 1
        line["first"].setdefault(reason, row)

    def _looked(self) -> dict[str, Any]:
        line = self._unwritten
        if not line:
            line |= {"from": self.seen, "to": 0, "passed": [], "why": {}, "first": {}}
        self.seen += 1
        line["to"] = self.seen
        return line

    def _enter(self, place: int) -> None:
        self._before.append(place - len(self._passed))
        self._passed.append(place)

    # ------------------------------------------------------------ the file

    def _open(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                line = next(file, b"")
            head = json.loads(line)
        except (OSError, ValueError):
            head, line = None, b""
        if head == self._head:
            self._read_bytes = len(line)
            self.catch_up()
            return
        self.replaced = isinstance(head, dict) and head.get("data") != self._head["data"]
        begun = json.dumps(self._head).encode() + b"\n"
        write_whole(path, begun)
        self._read_bytes = len(begun)

    def catch_up(self) -> None:
        """Read what other processes have appended since."""
        if self._path is None or self._unwritten or self.whole:
            return
        with self._path.open("rb") as file:
            file.seek(self._read_bytes)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._read_bytes += len(line)
                self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            told = _read_line(line, self.rows)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return
        self.checked = max(self.checked, told.checked)
        if told.first_place > self.seen or told.end <= self.seen:
            return
        new = [place for place in told.passed if place >= self.seen]
        for place in new:
            self._enter(place)
        self.first = told.first | self.first
        if len(new) == len(told.passed):
            for reason, count in told.why.items():
                self.why[reason] = self.why.get(reason, 0) + count
        self.seen = told.end

    def save(self) -> None:
        """Append what is new. If the disk takes nothing, the next process looks at these rows again."""
        if self._path is not None and self._unwritten:
            self._append(self._unwritten)
        self._unwritten = {}

    def check_done(self, checked: int) -> None:
        """Note that rows 0 to ``checked`` have prompt and answer."""
        self.checked = checked
        if self._path is not None:
            self._append({"checked": checked})

    def _append(self, told: dict[str, Any]) -> None:
        assert self._path is not None
        line = json.dumps(told).encode() + b"\n"
        try:
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
            try:
                self._read_bytes += os.write(file, line)
            finally:
                os.close(file)
        except OSError:
            return


class _Line(NamedTuple):
    """Holds the content of one line of the file."""

    checked: int
    first_place: int
    end: int
    passed: tuple[int, ...]
    why: dict[str, int]
    first: dict[str, str]


def _read_line(line: bytes, rows: int) -> _Line:
    """Parse a line.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: the line was not written by this module.
    """
    told = json.loads(line)
    if "checked" in told:
        return _Line(min(int(told["checked"]), rows), 0, 0, (), {}, {})
    first_place, end, passed = int(told["from"]), int(told["to"]), tuple(int(place) for place in told["passed"])
    bounds = (first_place - 1, *passed, end)
    if not 0 <= first_place <= end <= rows or any(one >= two for one, two in pairwise(bounds)):
        raise ValueError("places that are none")
    why = {str(reason): int(count) for reason, count in told["why"].items()}
    return _Line(0, first_place, end, passed, why, {str(reason): str(row) for reason, row in told["first"].items()})
