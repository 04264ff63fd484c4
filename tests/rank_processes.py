"""The followers of a rank group as plain processes with pipes, for suites that need no supervision.

    RankProcesses("fsdp", 2).followers() ── order ─▶ python -m tests.rank_processes fsdp 1 2 ─▶ Follower.serve
                                         ◀─ answer ─

Processes are dear to start, so they are used again: each ``followers()`` is a group of its own, with a Follower of its
own in every process. What a Follower raises is RankLost here, as is a process that ended or was silent for too long.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Final

from actors.core.context import Context
from actors.core.watch import Down
from actors.ranks.errors import RankLost
from actors.ranks.followers import FOLLOWERS, Follower, Followers

ROOT: Final = Path(__file__).resolve().parents[1]
_HEAD: Final = struct.Struct("<cIQ")  # what it is, number of the group, bytes that follow
_ORDER, _CLOSE, _DONE, _RAISED = b"o", b"c", b"d", b"r"


class _Process:
    """One rank; exchanges take turns."""

    def __init__(self, kind: str, rank: int, size: int) -> None:
        self.rank = rank
        self._turn = threading.Lock()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.rank_processes", kind, str(rank), str(size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    def exchange(self, what: bytes, group: int, body: bytes) -> bytes:
        assert self.process.stdin is not None and self.process.stdout is not None
        with self._turn:
            try:
                _write(self.process.stdin, what, group, body)
                answer, _, text = _read(self.process.stdout)
            except (OSError, EOFError, ValueError) as error:
                raise RankLost(f"rank {self.rank} ended: {error}") from error
        if answer == _RAISED:
            raise RankLost(f"rank {self.rank} raised {text.decode()}")
        return text

    def end(self) -> None:
        self.process.kill()
        self.process.wait(timeout=30)
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()


class RankProcesses:
    """Holds the processes of ranks 1 and above of a world of ``size``; ``close`` ends them."""

    def __init__(self, kind: str, size: int) -> None:
        self._kind, self._size = kind, size
        self._ranks = [_Process(kind, rank, size) for rank in range(1, size)]
        self._groups = itertools.count(1)

    @property
    def processes(self) -> list[subprocess.Popen[bytes]]:
        """The processes, rank 1 first, for whoever stops or kills one."""
        return [rank.process for rank in self._ranks]

    def followers(self) -> Followers:
        """A group of its own; the processes stay when it is closed. One that has ended is started anew."""
        for at, rank in enumerate(self._ranks):
            if rank.process.poll() is not None:
                rank.end()
                _leave_world()
                self._ranks[at] = _Process(self._kind, rank.rank, self._size)
        return _Group(list(self._ranks), next(self._groups))

    def close(self) -> None:
        for rank in self._ranks:
            rank.end()
        _leave_world()


def _leave_world() -> None:
    """Leave the world of which this process is rank 0: leaders that a test has killed in it have not left it."""
    world = sys.modules.get("actors.trainer.backends.fsdp.world")
    while world is not None and world._users:
        world.leave()


class _Group:
    """Implements ``Followers``."""

    def __init__(self, ranks: Sequence[_Process], number: int) -> None:
        self._ranks = ranks
        self._number = number

    @property
    def count(self) -> int:
        return len(self._ranks)

    def connect(self, ctx: Context) -> None:
        """They are reached by pipes."""

    def heard(self, message: Down) -> None:
        """Their ends are seen at the pipes."""

    async def call(
        self, orders: Sequence[bytes], *, timeout_s: float, ends: Callable[[bytes], bool] | None = None
    ) -> list[bytes]:
        asked = [
            asyncio.ensure_future(asyncio.to_thread(rank.exchange, _ORDER, self._number, order))
            for rank, order in zip(self._ranks, orders, strict=True)
        ]
        try:
            async with asyncio.timeout(timeout_s):
                if ends is not None:
                    for answered in asyncio.as_completed(asked):
                        if ends(answer := await answered):
                            return [answer]
                return await asyncio.gather(*asked)
        except TimeoutError as error:
            self._kill()
            raise RankLost(f"no answer within {timeout_s:g} s") from error
        except asyncio.CancelledError:
            self._kill()
            raise
        finally:
            for answer_to_come in asked:
                answer_to_come.cancel()

    async def close(self) -> None:
        try:
            async with asyncio.timeout(30):
                await asyncio.gather(*(asyncio.to_thread(r.exchange, _CLOSE, self._number, b"") for r in self._ranks))
        except TimeoutError:
            self._kill()
        except RankLost:
            pass

    def _kill(self) -> None:
        """End the processes, so that no thread waits for an answer for ever, and keeps the test's loop from closing."""
        for rank in self._ranks:
            rank.process.kill()


def _write(pipe: IO[bytes], what: bytes, group: int, body: bytes) -> None:
    pipe.write(_HEAD.pack(what, group, len(body)) + body)
    pipe.flush()


def _read(pipe: IO[bytes]) -> tuple[bytes, int, bytes]:
    what, group, length = _HEAD.unpack(_exactly(pipe, _HEAD.size))
    return what, group, _exactly(pipe, length)


def _exactly(pipe: IO[bytes], count: int) -> bytes:
    data = pipe.read(count)
    if len(data) != count:
        raise EOFError("its pipe is closed")
    return data


def _follow(kind: str, rank: int, size: int) -> None:
    """Obey whoever holds the other ends of stdin and stdout until they are closed. What is printed goes to stderr."""
    orders, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    module, _, name = FOLLOWERS[kind].partition(":")
    make = getattr(importlib.import_module(module), name)
    groups: dict[int, Follower] = {}
    with asyncio.Runner() as runner, contextlib.suppress(EOFError):
        while True:
            what, group, order = _read(orders)
            try:
                if what == _CLOSE:
                    if group in groups:
                        runner.run(groups.pop(group).close())
                    _write(answers, _DONE, group, b"")
                    continue
                if group not in groups:
                    groups[group] = make(rank, size)
                _write(answers, _DONE, group, runner.run(groups[group].serve(order)))
            except Exception as error:
                _write(answers, _RAISED, group, f"{type(error).__name__}: {error}".encode())


if __name__ == "__main__":
    _follow(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    os._exit(0)  # threads of a library that wait for other ranks are not waited for
