"""How a process changes its work without being started again: two pipes between it and its launcher.

    launcher ── Order (spec, log file) ──▶ process: serves, until its main actor ends in good order
             ◀── exit code ───────────────          has closed its links and its files, and keeps what it has loaded
             ── Order, of another job ───▶          serves that one
             ── end of file, or silence for ``parked_process_s`` ──▶ it ends

Invariants
- Between two tenancies a process has no links, no actors, no event loop and no open file of a job: what stays is code
  that was imported, and what a role keeps on purpose (``actors/rollout/kept_engine.py``).
- Only a main actor that ended in good order is followed by another tenancy; a crash, a signal or a failed start ends
  the process, as in one that never stays.
- An order is whole or not at all: a launcher that cannot write it at once starts a new process instead.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

VARIABLE: Final = "HEADRACE_TENANCY"
"""Environment variable with the child's two ends, ``orders,news``; unset: the process never stays."""
_ORDER_BYTES_MAX: Final = 1 << 20
"""Size that the pipe of orders is given; a larger order is refused, and a new process started for it."""
_LENGTH: Final = struct.Struct("<I")
_CODE: Final = struct.Struct("<i")


class Order(msgspec.Struct, frozen=True):
    """The next work of a process that stays."""

    spec: bytes
    log_path: str


@dataclass(frozen=True)
class LauncherEnds:
    """The launcher's ends. ``close`` tells a process that waits to end."""

    orders: int
    news: int

    def send(self, order: Order) -> bool:
        """Give the process its next work; False: it is gone, or the order does not fit. Then nothing was sent."""
        body = msgspec.msgpack.encode(order)
        data = _LENGTH.pack(len(body)) + body
        if len(data) > _pipe_bytes(self.orders):
            return False
        try:
            return os.write(self.orders, data) == len(data)  # the pipe is empty: it takes all or nothing
        except (BlockingIOError, BrokenPipeError):
            return False

    def parked(self) -> int | None:
        """Exit code of the tenancy that has ended; None: it has not, or the process is gone."""
        with contextlib.suppress(OSError):
            if len(news := os.read(self.news, _CODE.size)) == _CODE.size:
                return int(_CODE.unpack(news)[0])
        return None

    def close(self) -> None:
        for end in (self.orders, self.news):
            with contextlib.suppress(OSError):
                os.close(end)


@dataclass(frozen=True)
class ProcessEnds:
    """The ends of the process that stays."""

    orders: int
    news: int

    def park(self, code: int, wait_s: float) -> Order | None:
        """Say that the work is over, with ``code``, and wait for other work; None: none came, and the process ends."""
        try:
            os.write(self.news, _CODE.pack(code))
            if not select.select([self.orders], [], [], wait_s)[0]:
                return None
            (length,) = _LENGTH.unpack(_exactly(self.orders, _LENGTH.size))
            return msgspec.msgpack.decode(_exactly(self.orders, length), type=Order)
        except (OSError, EOFError):
            return None


def make_pipes() -> tuple[LauncherEnds, tuple[int, int]]:
    """The launcher's ends, and the child's (orders, news). All are closed on exec, unless the launcher passes them on.

    Raises:
        OSError: too many files are open.
    """
    orders_read, orders_write = os.pipe()
    try:
        news_read, news_write = os.pipe()
    except OSError:
        os.close(orders_read)
        os.close(orders_write)
        raise
    os.set_blocking(orders_write, False)
    os.set_blocking(news_read, False)
    with contextlib.suppress(OSError, AttributeError):  # elsewhere than on Linux the pipe stays as small as it is
        fcntl.fcntl(orders_write, fcntl.F_SETPIPE_SZ, _ORDER_BYTES_MAX)
    return LauncherEnds(orders_write, news_read), (orders_read, news_write)


def take_pipes() -> ProcessEnds | None:
    """The child's ends, once, at its start; None if it is not meant to stay. Its own children do not inherit them."""
    numbers = os.environ.pop(VARIABLE, "").split(",")
    if len(numbers) != 2 or not all(number.isdecimal() for number in numbers):
        return None
    orders, news = map(int, numbers)
    try:
        os.set_inheritable(orders, False)
        os.set_inheritable(news, False)
    except OSError:
        return None
    return ProcessEnds(orders, news)


def redirect_output(log_path: Path) -> None:
    """Send standard output and error to the file of the next tenancy from now on.

    Raises:
        OSError: the file cannot be opened.
    """
    from supervisors.machine.processes.process_log import open_log

    log = open_log(log_path)
    try:
        os.dup2(log, 1)
        os.dup2(log, 2)
    finally:
        os.close(log)


def _exactly(end: int, count: int) -> bytes:
    """Raises:
    EOFError: the launcher has gone.
    """
    data = b""
    while len(data) < count:
        if not (part := os.read(end, count - len(data))):
            raise EOFError
        data += part
    return data


def _pipe_bytes(end: int) -> int:
    try:
        return fcntl.fcntl(end, fcntl.F_GETPIPE_SZ)
    except (OSError, AttributeError):
        return select.PIPE_BUF
