"""A thread with an event loop, on which runs are queried and followed: one per process, started on first use.

    caller with a loop that runs (a notebook) ── await ─┐
    caller without one (a script)  ── blocks ───────────┴─▶ submit(coroutine) ─▶ the thread's loop

So nothing depends on whether the caller has a running loop, nor on how busy that loop is.
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
    """Do ``work`` on the thread and wait for it here; an interrupted wait cancels it. ``work`` sets its deadlines."""
    future = submit(work)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def _forget() -> None:
    """Start anew in a forked process, which has none of the parent's threads."""
    global _loop, _starting
    _loop, _starting = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
