"""A helper process: a module of Headrace in a process of its own, for work that may hang, crash or take long.

    start ─▶ exec, in a session of its own, stderr to its log ─▶ feed ─▶ stdin, stdout ─▶ line, exactly
    end   ─▶ a signal, stdin closed, reaped within a deadline

``command`` and ``environment`` serve every helper, also one that is not driven from an event loop (a program's run) or
only by its exit (preparations, ``supervisors/machine/processes/helper_process.py``).

Invariants
- No helper imports a folder of the user's project in place of Headrace's code (``configs/python_path.py``).
- A caller that reads sets the deadline: only the caller knows how long an answer may take.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import IO, Final

from configs.python_path import python_path

_LINE_BYTES: Final = 1 << 16


def command(module: str, *words: str) -> list[str]:
    """The command line of a helper. ``-P`` keeps the working directory from coming first."""
    return [sys.executable, "-P", "-m", module, *words]


def environment(folders: str | None = None, **added: str) -> dict[str, str]:
    """This process's environment, with the path to Headrace's code. ``folders``: further ones for modules."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [python_path(), folders])), **added}


class HelperProcess:
    """Runs one helper, with pipes to and from the event loop. Make it with ``start``, and ``end`` it in any case."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None, "made with pipes"
        assert process.stdout is not None, "made with pipes"
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout

    @classmethod
    async def start(
        cls, module: str, log: Path | None, *, line_bytes: int = _LINE_BYTES, **variables: str
    ) -> HelperProcess:
        """Start ``module``.

        Args:
            log: file for the helper's stderr; None: the helper shares this process's stderr.
            line_bytes: size of the longest line that is read from the helper.
            variables: added to the helper's environment.

        Raises:
            OSError: the helper cannot be started, or the log cannot be opened.
        """
        pipe = asyncio.subprocess.PIPE
        with contextlib.ExitStack() as ours:
            errors: IO[bytes] | None = ours.enter_context(log.open("ab")) if log is not None else None
            process = await asyncio.create_subprocess_exec(
                *command(module), stdin=pipe, stdout=pipe, stderr=errors, start_new_session=True,
                env=environment(**variables), limit=line_bytes,
            )  # fmt: skip
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code, -n for signal n; None if the helper's end has not been seen."""
        return self._process.returncode

    def tell(self, data: bytes) -> None:
        """Write ``data`` without waiting. If the helper is gone, the next read shows it."""
        with contextlib.suppress(OSError):
            self._stdin.write(data)

    async def feed(self, data: bytes, timeout_s: float) -> None:
        """Write ``data`` and wait until the pipe has room again.

        Raises:
            ConnectionError: the helper reads no more.
            TimeoutError: the helper has not read enough in time.
        """
        self._stdin.write(data)
        async with asyncio.timeout(timeout_s):
            await self._stdin.drain()

    async def line(self) -> bytes:
        """The helper's next line; empty at the end. Raises ValueError if the line is too long."""
        return await self._stdout.readline()

    async def exactly(self, count: int) -> bytes:
        """The helper's next ``count`` bytes. Raises asyncio.IncompleteReadError if the output ends before."""
        return await self._stdout.readexactly(count)

    async def reaped(self, timeout_s: float) -> None:
        """Wait until the helper has ended. Raises TimeoutError after ``timeout_s``."""
        async with asyncio.timeout(timeout_s):
            await self._process.wait()

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send the helper a signal; harmless if the helper has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def end(self, timeout_s: float, number: signal.Signals = signal.SIGKILL) -> None:
        """Send signal ``number``, and wait until the helper has ended. Raises TimeoutError after ``timeout_s``."""
        self.kill(number)
        try:
            await self.reaped(timeout_s)
        finally:
            self._stdin.close()
