"""A Chrome/Perfetto trace that can be read at any moment of the run, and after any crash.

The file is a JSON array of events, one a line; the format allows the closing bracket to be missing, so a run that
died leaves a trace that opens all the same. A track (thread) per worker and one for the trainer; gaps are bubbles.
"""

from __future__ import annotations

import json
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from actors.metrics.messages import Span

_MICROSECONDS = 1_000_000


class TraceFile:
    """Appends spans to ``path``."""

    def __init__(self, path: Path, *, process_name: str) -> None:
        fresh = not path.exists()
        self._tracks: dict[str, int] = {}
        if not fresh:
            _reopen(path)
        self._file: TextIOWrapper = path.open("a", encoding="utf-8")
        if fresh:
            self._file.write("[\n")
            self._write({"name": "process_name", "ph": "M", "pid": 1, "tid": 0, "args": {"name": process_name}})

    def add(self, track: str, spans: list[Span]) -> None:
        """Write ``spans`` as complete events on ``track``."""
        tid = self._track(track)
        for span in spans:
            self._write(
                {
                    "name": span.name,
                    "cat": "headrace",
                    "ph": "X",
                    "pid": 1,
                    "tid": tid,
                    "ts": round(span.start_s * _MICROSECONDS),
                    "dur": max(0, round((span.end_s - span.start_s) * _MICROSECONDS)),
                    "args": span.args,
                }
            )
        self._file.flush()

    def _track(self, name: str) -> int:
        if name not in self._tracks:
            self._tracks[name] = len(self._tracks) + 1
            tid = self._tracks[name]
            self._write({"name": "thread_name", "ph": "M", "pid": 1, "tid": tid, "args": {"name": name}})
        return self._tracks[name]

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write(json.dumps(event) + ",\n")

    def close(self) -> None:
        """Finish the array, so that strict JSON readers accept the file too."""
        if not self._file.closed:
            end = {"name": "end", "ph": "M", "pid": 1, "tid": 0, "args": {}}
            self._file.write(json.dumps(end) + "\n]\n")
            self._file.close()


def _reopen(path: Path) -> None:
    """Take the closing bracket of a finished trace away, so that a resumed run can go on in the same file."""
    text = path.read_text(encoding="utf-8").rstrip()
    if text.endswith("]"):
        path.write_text(text[:-1].rstrip().rstrip(",") + ",\n", encoding="utf-8")
