"""A thread with an event loop, on which runs are asked and followed: one a process, begun when it is needed.

    caller with a loop that runs (a notebook) ── await ─┐
    caller without one (a script)  ── blocks ───────────┴─▶ submit(coroutine) ─▶ the thread's loop

So nothing depends on whether a loop runs where a program stands, nor on how busy that loop is.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

_starting = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def submit(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Begin ``work`` on the thread. Cancelling the future cancels the work."""
    global _loop
    with _starting:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="headrace-api", daemon=True).start()
    return asyncio.run_coroutine_threadsafe(work, _loop)


def block(work: Coroutine[Any, Any, T]) -> T:
    """Do ``work`` on the thread and wait for it here; an interrupted wait ends it. Its deadlines are its own."""
    future = submit(work)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def _forget() -> None:
    """In a forked process, which has none of the parent's threads."""
    global _loop, _starting
    _loop, _starting = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
