"""Standard input, output and error of a process that may have been started without, or outlive, its terminal.

    a stream is closed at the start  ─▶ the null device, so that the next opened file does not become standard output
    a character cannot be encoded    ─▶ ``?`` in its place: an ASCII terminal is no reason to end
    output cannot be written         ─▶ dropped, where the process has other work: a closed pipe or terminal (EPIPE,
                                        EIO), a full disk (ENOSPC), a reader that is too slow

A command whose output is its result (``headrace ctl``, ``doctor``) fails if it cannot print: its caller has to know.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any, TextIO, cast


class _Unbreakable(io.FileIO):
    """Drops what cannot be written, and reports it as written."""

    def write(self, data: Any, /) -> int:
        size = memoryview(data).nbytes
        try:
            written = super().write(data)
        except OSError:
            return size
        return size if written is None else written


def open_standard_streams(*, unbreakable: bool) -> None:
    """Open those of the three streams that the process lacks; to be called before it opens any file.

    Args:
        unbreakable: whether output that cannot be written is dropped.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
    if sys.stdin is None:  # pyright: ignore[reportUnnecessaryComparison] - so it is in a process without one
        sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115 - for ever
    sys.stdout = _stream(sys.stdout, 1, unbreakable=unbreakable)
    sys.stderr = _stream(sys.stderr, 2, unbreakable=unbreakable)


def _stream(given: TextIO | None, descriptor: int, *, unbreakable: bool) -> TextIO:
    if isinstance(given, io.TextIOWrapper) and not unbreakable:
        given.reconfigure(errors="replace")
        return given
    raw = (_Unbreakable if unbreakable else io.FileIO)(descriptor, "w", closefd=False)
    at_once = bool(os.environ.get("PYTHONUNBUFFERED")) or descriptor == 2
    buffer = cast("io.BufferedWriter", raw) if at_once else io.BufferedWriter(raw)  # as Python does with ``-u``
    encoding = given.encoding if given is not None else "utf-8"
    return io.TextIOWrapper(
        buffer, encoding=encoding, errors="replace", line_buffering=os.isatty(descriptor), write_through=at_once
    )
