"""Standard input, output and error of a process that may have been started without, or outlive, its terminal.

    closed at the start   ─▶ the null device: the next file that is opened must not become somebody's standard output
    not to be encoded     ─▶ ``?`` in its place: an ASCII terminal is no reason to end
    not to be written     ─▶ dropped, where the process has more to do than to talk: a closed pipe or terminal (EPIPE,
                             EIO), a full disk (ENOSPC), a reader that is too slow

What a command prints as its one result (``headrace ctl``, ``doctor``) may fail as anywhere: its caller is to know.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any, TextIO, cast


class _Unbreakable(io.FileIO):
    """It drops what cannot be written, and says that it was written."""

    def write(self, data: Any, /) -> int:
        size = memoryview(data).nbytes
        try:
            written = super().write(data)
        except OSError:
            return size
        return size if written is None else written


def open_standard_streams(*, unbreakable: bool) -> None:
    """Give the process the three streams that it may lack; the first thing that it does.

    Args:
        unbreakable: what cannot be written is dropped.
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
    buffer = cast("io.BufferedWriter", raw) if at_once else io.BufferedWriter(raw)  # as Python's own of ``-u``
    encoding = given.encoding if given is not None else "utf-8"
    return io.TextIOWrapper(
        buffer, encoding=encoding, errors="replace", line_buffering=os.isatty(descriptor), write_through=at_once
    )
