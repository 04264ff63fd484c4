"""Unix sockets between the ranks of one group on one machine, in a directory that only their user can enter.

    each rank  listens at a name of its own ─▶ tells it ─▶ connects to lower ranks, and says its number
               all are there ─▶ the name is removed
    exchange   bytes to others and bytes from others, at once, until all are through

Loopback would not do: any user of the machine can connect to a port there, and take a rank's place before it has come.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from actors.ranks.errors import StreamsEnded

_NUMBER_BYTES: Final = 4
_ONE_READ_BYTES: Final = 1 << 20


class Streams:
    """A stream to each other rank of the group, by its number."""

    def __init__(self, others: dict[int, socket.socket], timeout_s: float) -> None:
        self._others = others
        self.timeout_s = timeout_s
        """Limit of one exchange."""
        self.close = weakref.finalize(self, _close_all, others)
        """End the group here; idempotent. Torch lets go of groups that nobody has ended."""
        for other in others.values():
            other.setblocking(False)

    def exchange(self, outgoing: Mapping[int, memoryview], incoming: Mapping[int, memoryview]) -> None:
        """Send ``outgoing`` to those ranks and fill ``incoming`` from those, which must do their part.

        Raises:
            StreamsEnded: one of them is gone, or has not done its part in time.
        """
        left_out = {rank: data for rank, data in outgoing.items() if len(data)}
        left_in = {rank: data for rank, data in incoming.items() if len(data)}
        deadline = time.monotonic() + self.timeout_s
        with selectors.DefaultSelector() as ready:
            for rank in left_out.keys() | left_in.keys():
                ready.register(self._stream(rank), _events(rank, left_out, left_in), rank)
            while left_out or left_in:
                found = ready.select(deadline - time.monotonic())
                if not found:
                    late = sorted(left_out.keys() | left_in.keys())
                    raise StreamsEnded(f"after {self.timeout_s:g} s nothing more goes to or comes from ranks {late}")
                for key, events in found:
                    rank: int = key.data
                    self._move(rank, events, left_out, left_in)
                    if wanted := _events(rank, left_out, left_in):
                        if wanted != key.events:
                            ready.modify(key.fileobj, wanted, rank)
                    else:
                        ready.unregister(key.fileobj)

    def _stream(self, rank: int) -> socket.socket:
        try:
            return self._others[rank]
        except KeyError:
            raise StreamsEnded(f"there is no stream to rank {rank}: the group has ended") from None

    def _move(self, rank: int, events: int, left_out: dict[int, memoryview], left_in: dict[int, memoryview]) -> None:
        stream = self._others[rank]
        try:
            if events & selectors.EVENT_READ:
                count = stream.recv_into(left_in[rank][:_ONE_READ_BYTES])
                if not count:
                    raise StreamsEnded(f"rank {rank} has ended its stream")
                _shorten(left_in, rank, count)
            if events & selectors.EVENT_WRITE:
                _shorten(left_out, rank, stream.send(left_out[rank]))
        except BlockingIOError:
            pass
        except (ConnectionError, BrokenPipeError) as error:
            raise StreamsEnded(f"rank {rank} has ended its stream: {error.strerror}") from error


def _close_all(others: dict[int, socket.socket]) -> None:
    while others:
        others.popitem()[1].close()


def _events(rank: int, left_out: Mapping[int, memoryview], left_in: Mapping[int, memoryview]) -> int:
    reads, writes = rank in left_in, rank in left_out
    return (selectors.EVENT_READ if reads else 0) | (selectors.EVENT_WRITE if writes else 0)


def _shorten(left: dict[int, memoryview], rank: int, count: int) -> None:
    rest = left[rank][count:]
    if len(rest):
        left[rank] = rest
    else:
        del left[rank]


def meet(
    directory: Path, rank: int, size: int, timeout_s: float, *, tell: Callable[[int, str], None],
    told: Callable[[int], str],
) -> Streams:  # fmt: skip
    """Connect with all other ranks of a group, which must do the same.

    Args:
        tell: makes a rank's name in ``directory`` known to the others.
        told: waits for a rank's name; it has a limit of its own.

    Raises:
        StreamsEnded: a rank is gone, or has not come in time.
    """
    deadline = time.monotonic() + timeout_s
    others: dict[int, socket.socket] = {}
    with _listening(directory, size) as (here, name, listener), contextlib.ExitStack() as undo:
        undo.callback(_close_all, others)
        tell(rank, name)
        for lower in range(rank):
            others[lower] = other = socket.socket(socket.AF_UNIX)
            other.settimeout(_left(deadline))
            try:
                other.connect(f"{here}/{told(lower)}")
                other.sendall(rank.to_bytes(_NUMBER_BYTES, "little"))
            except OSError as error:
                raise StreamsEnded(f"rank {lower} cannot be reached: {error}") from error
        while len(others) < size - 1:
            listener.settimeout(_left(deadline))
            try:
                other, _ = listener.accept()
                other.settimeout(_left(deadline))
                said = other.recv(_NUMBER_BYTES, socket.MSG_WAITALL)
            except OSError as error:
                missing = sorted(set(range(size)) - others.keys() - {rank})
                raise StreamsEnded(f"ranks {missing} have not come: {error}") from error
            others[int.from_bytes(said, "little")] = other
        undo.pop_all()
    return Streams(others, timeout_s)


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())


@contextlib.contextmanager
def _listening(directory: Path, size: int) -> Iterator[tuple[str, str, socket.socket]]:
    """The directory by a short path, a new name in it, and a socket that listens there while the context lasts.

    A socket's path has 107 bytes at most, and a temporary folder's may be longer.
    """
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        short = f"/proc/self/fd/{opened}"
        here = short if Path(short).exists() else str(directory)
        name = secrets.token_hex(8)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{here}/{name}")
            try:
                listener.listen(size)
                yield here, name, listener
            finally:
                with contextlib.suppress(FileNotFoundError):  # a rank has removed the place: the group ends
                    Path(here, name).unlink()
    finally:
        os.close(opened)
