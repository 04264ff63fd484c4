"""trace.json in the Chrome trace format (``ui.perfetto.dev`` and ``chrome://tracing`` open it): a track per actor.

Invariants
- The file is whole, valid JSON after every write: the closing bracket is overwritten and written again.
- Times are wall-clock microseconds; a resumed run adds to the file of the run that it resumes.

Format: "Trace Event Format", complete events (``ph: X``) and thread metadata (``ph: M``).
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from actors.protocol.metrics import Span

_END: Final = b"\n]\n"
_PID: Final = 1
_COLOURS: Final = {
    "generate": "thread_state_running", "train": "rail_response", "pull": "rail_load", "publish": "rail_animation",
    "idle": "grey", "wait": "grey", "asleep": "white", "checkpoint": "thread_state_iowait", "score": "rail_idle",
}  # fmt: skip


class TraceFile:
    """It appends spans. A track's number is its order of appearance, after the trainer, which comes first."""

    def __init__(self, path: Path, job: str) -> None:
        self._tracks = _known_tracks(path)
        self._file = path.open("r+b" if path.exists() else "w+b")
        self._file.seek(0, os.SEEK_END)
        if self._file.tell() == 0:
            self._file.write(b"[")
            self._append(
                [{"ph": "M", "name": "process_name", "pid": _PID, "tid": 0, "args": {"name": job}}], first=True
            )

    def add(self, track: str, spans: Sequence[Span]) -> None:
        """Write these spans of one track."""
        events: list[dict[str, Any]] = []
        number = self._tracks.get(track)
        if number is None:
            number = self._tracks[track] = len(self._tracks) + 1
            order = 0 if track == "trainer" else number
            events.append({"ph": "M", "name": "thread_name", "pid": _PID, "tid": number, "args": {"name": track}})
            events.append(
                {"ph": "M", "name": "thread_sort_index", "pid": _PID, "tid": number, "args": {"sort_index": order}}
            )
        events.extend(_complete_event(span, number) for span in spans)
        self._append(events)

    def _append(self, events: list[dict[str, Any]], *, first: bool = False) -> None:
        if not events:
            return
        if not first:
            self._file.seek(-len(_END), os.SEEK_END)
        body = ",\n".join(json.dumps(e, separators=(",", ":")) for e in events).encode()
        self._file.write((b"\n" if first else b",\n") + body + _END)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _complete_event(span: Span, track: int) -> dict[str, Any]:
    event: dict[str, Any] = {
        "ph": "X", "name": span.name, "pid": _PID, "tid": track,
        "ts": round(span.start_s * 1e6, 1), "dur": round(max(0.0, span.end_s - span.start_s) * 1e6, 1),
    }  # fmt: skip
    if span.name in _COLOURS:
        event["cname"] = _COLOURS[span.name]
    if span.args:
        event["args"] = span.args
    return event


def _known_tracks(path: Path) -> dict[str, int]:
    """Tracks of an earlier part of the run; a file that cannot be read is put aside, a trace is not worth a run."""
    if not path.exists():
        return {}
    try:
        events = json.loads(path.read_bytes())
        return {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    except (ValueError, KeyError, TypeError):
        path.replace(path.with_suffix(".damaged.json"))
        return {}
