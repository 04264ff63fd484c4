"""trace.json in the Chrome trace format (``ui.perfetto.dev`` and ``chrome://tracing`` open it): a track per actor.

Invariants
- The file is whole, valid JSON after every write: the closing bracket is overwritten and written again.
- Times are wall-clock microseconds; a resumed run adds to the file of the run that it resumes.
- The file is bounded: at half its limit it becomes ``trace.1.json``, and another one begins.

Format: "Trace Event Format", complete events (``ph: X``) and thread metadata (``ph: M``).
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from actors.protocol.metrics import TraceSpan
from configs.limits import DEFAULT_LIMITS

_END: Final = b"\n]\n"
_HEAD_BYTES: Final = 16
_NAMES_A_TRACK: Final = b'{"ph":"M","name":"thread_name"'
_PID: Final = 1
_COLOURS: Final = {
    "generate": "thread_state_running", "train": "rail_response", "pull": "rail_load", "publish": "rail_animation",
    "idle": "grey", "wait": "grey", "asleep": "white", "checkpoint": "thread_state_iowait", "score": "rail_idle",
    "burst": "rail_response", "switch": "rail_load", "prefetch": "rail_idle",
}  # fmt: skip


class TraceFile:
    """Appends spans to a trace. Tracks are shown in the order of their first spans, the trainer's before all others."""

    def __init__(self, path: Path, job: str, max_bytes: int = DEFAULT_LIMITS.trace_max_bytes) -> None:
        self._path = path
        self._job = job
        self._max_bytes = max_bytes
        self._tracks = _known_tracks(path)
        self._open()

    def _open(self) -> None:
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._size = os.fstat(self._file).st_size
        if self._size == 0:
            head = {"ph": "M", "name": "process_name", "pid": _PID, "tid": 0, "args": {"name": self._job}}
            self._write(b"[\n" + _encoded([head]))

    def add(self, track: str, spans: Sequence[TraceSpan]) -> None:
        """Write these spans of one track."""
        if self._size > self._max_bytes // 2:
            self._begin_anew()
        events: list[dict[str, Any]] = []
        number = self._tracks.get(track)
        if number is None:
            number = self._tracks[track] = len(self._tracks) + 1
            events += _names_of(track, number)
        events.extend(_complete_event(span, number) for span in spans)
        if events:
            self._write(b",\n" + _encoded(events))

    def _begin_anew(self) -> None:
        """Rename the file to ``trace.1.json``, in place of an older one, and begin another."""
        os.close(self._file)
        self._path.replace(self._path.with_suffix(".1.json"))
        self._open()
        named = [event for track, number in self._tracks.items() for event in _names_of(track, number)]
        self._write(b",\n" + _encoded(named))

    def _write(self, body: bytes) -> None:
        """Put ``body`` before the closing bracket; where there is no room for it, the file stays as it is."""
        at = max(0, self._size - len(_END))
        try:
            written = os.pwrite(self._file, body + _END, at)
        except OSError:
            written = 0
        if written == len(body) + len(_END):
            self._size = at + written
        elif self._size:
            os.ftruncate(self._file, self._size)
            os.pwrite(self._file, _END, at)

    def close(self) -> None:
        """Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _encoded(events: list[dict[str, Any]]) -> bytes:
    return ",\n".join(json.dumps(event, separators=(",", ":")) for event in events).encode()


def _names_of(track: str, number: int) -> list[dict[str, Any]]:
    order = 0 if track == "trainer" else number
    return [
        {"ph": "M", "name": "thread_name", "pid": _PID, "tid": number, "args": {"name": track}},
        {"ph": "M", "name": "thread_sort_index", "pid": _PID, "tid": number, "args": {"sort_index": order}},
    ]


def _complete_event(span: TraceSpan, track: int) -> dict[str, Any]:
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
    """Tracks of an earlier part of the run; a file that cannot be read is put aside, and the run goes on.

    The file may be large: it is read line by line, and only lines that name a track are decoded.
    """
    tracks: dict[str, int] = {}
    try:
        with path.open("rb") as lines:
            if lines.readline(_HEAD_BYTES) != b"[\n":
                raise ValueError("it does not begin as ours do")
            for line in lines:
                if line.startswith(_NAMES_A_TRACK):
                    event = json.loads(line.rstrip().removesuffix(b","))
                    tracks[event["args"]["name"]] = event["tid"]
            lines.seek(-len(_END), os.SEEK_END)
            if lines.read() != _END:
                raise ValueError("its end is missing")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError):
        path.replace(path.with_suffix(".damaged.json"))
        return {}
    return tracks
