"""The processes of a benchmark: those beside the measured one, and what each of them costs.

with beside("data_plane._echo", "actor") as process: …     python -m benchmarks.data_plane._echo actor, ended with it
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import subprocess
import sys
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import structlog
import uvloop

T = TypeVar("T")

ROOT: Final = Path(__file__).resolve().parent.parent
_END_S: Final = 10.0
"""How long a process may take to end after its input did."""


@contextlib.contextmanager
def beside(module: str, *words: object) -> Iterator[subprocess.Popen[str]]:
    """``python -m benchmarks.MODULE WORDS…``, talked to by its standard input and output; it ends with the block."""
    with started([sys.executable, "-m", f"benchmarks.{module}", *words]) as process:
        yield process


@contextlib.contextmanager
def started(command: Sequence[object]) -> Iterator[subprocess.Popen[str]]:
    """Any command in the repository's root, talked to in the same way; it ends with the block."""
    process = subprocess.Popen(
        [str(word) for word in command], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process
    finally:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=_END_S)
        process.stdout.close()


async def until_input_ends() -> None:
    """In the process beside: whoever started it has ended, or wants it no more."""
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), ended.set)
    await ended.wait()


def on_uvloop(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` on the loop that Headrace's own processes have; its log goes to stderr: stdout is for results."""
    before = structlog.get_config()
    structlog.configure(
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
    )
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(work)
    finally:
        structlog.configure(**before)


def cpu_s() -> float:
    """CPU seconds of this process, all threads, libzmq's too."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
