"""Blocking work of one actor, on one thread of its own.

Invariants
- Calls run one after the other, in the order in which they were made.
- The thread keeps nothing of a call that has ended: not its arguments, nor its result.
- The loop is never blocked; on a virtual-time loop, where no thread may run, calls run inline.
- One thread per actor, not a pool for all: a dead disk then holds up the actors that use it and no others, and an
  actor's calls need no lock among themselves.
- A call that does not return within ``limits.blocking_call_s`` is called stuck: nobody waits for ever for a dead disk.
- ``close`` has a deadline. A thread that is stuck in a call past it is left behind (it is a daemon) and reported.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from actors.core.errors import ActorError

P = ParamSpec("P")
R = TypeVar("R")

_Job = tuple[Callable[[], Any], "asyncio.Future[Any]"]


def threads_allowed(loop: asyncio.AbstractEventLoop) -> bool:
    """False on a virtual-time loop: there, real threads would make runs differ."""
    return not getattr(loop, "virtual_time", False)


class BlockingQueueFull(ActorError):
    """The actor has a bug: more calls wait for its thread than it may have handlers running."""


class BlockingCallStuck(ActorError):
    """A function on an actor's thread has not returned in time, most likely as a disk hangs; it is still running."""


class BlockingThread:
    """The thread runs functions away from the loop; it is started at the first call."""

    def __init__(self, name: str, calls_max: int, call_s: float) -> None:
        self._name = name
        self._call_s = call_s
        self._calls_max = calls_max
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ended: asyncio.Future[None] | None = None
        self._closed = False
        self.running = ""
        """Name of the function that runs now, for the stall report."""

    async def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run ``function`` and return its result, or raise what it raises.

        A cancelled caller does not interrupt the function: it runs to its end and its result is dropped.

        Raises:
            BlockingCallStuck: the function, or one called before it, takes longer than ``limits.blocking_call_s``.
        """
        loop = asyncio.get_running_loop()
        if not threads_allowed(loop):
            return function(*args, **kwargs)
        if self._closed:
            raise RuntimeError(f"the actor {self._name} has ended: it cannot run {_name_of(function)}")
        if self._thread is None:
            self._start(loop)
        if self._jobs.qsize() >= self._calls_max:  # a SimpleQueue has no bound of its own
            raise BlockingQueueFull(f"{self._name}: {self._calls_max} blocking calls wait already; await some first")
        future: asyncio.Future[R] = loop.create_future()

        def call() -> R:
            self.running = _name_of(function)
            try:
                return function(*args, **kwargs)
            finally:
                self.running = ""

        self._jobs.put((call, future))
        deadline = asyncio.timeout(self._call_s)
        try:
            async with deadline:
                return await future
        except TimeoutError:
            if not deadline.expired():
                raise  # it is what the function has raised
            text = f"{self._name}: {_name_of(function)} has not returned within {self._call_s:g} s"
            raise BlockingCallStuck(f"{text}; on the thread is {self.running or 'nothing'}") from None

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._ended = loop.create_future()
        self._thread = threading.Thread(
            target=_serve, args=(self._jobs, loop, self._ended), name=f"blocking-{self._name}", daemon=True
        )
        self._thread.start()

    async def close(self, timeout_s: float) -> bool:
        """Let the thread end after what is queued; False if it had not ended within ``timeout_s``."""
        self._closed = True
        if self._ended is None:
            return True
        self._jobs.put(None)
        try:
            async with asyncio.timeout(timeout_s):
                await self._ended
        except TimeoutError:
            return False
        return True


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))


def _serve(jobs: queue.SimpleQueue[_Job | None], loop: asyncio.AbstractEventLoop, ended: asyncio.Future[None]) -> None:
    while _serve_one(jobs, loop):
        pass
    _report(loop, ended, None, None)


def _serve_one(jobs: queue.SimpleQueue[_Job | None], loop: asyncio.AbstractEventLoop) -> bool:
    """Do the next job; False at the end. Its arguments and result are released on return, not at the next job."""
    if (job := jobs.get()) is None:
        return False
    call, future = job
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001 - all of it belongs to the caller, who is on the loop
        _report(loop, future, None, error)
    else:
        _report(loop, future, result, None)
    return True


def _report(
    loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], result: object, error: BaseException | None
) -> None:
    def settle() -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    # The loop may be closed by the time a stuck call returns; then nobody waits for it any more.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(settle)
