"""One life of a simulated process: all that runs in its context, to be ended or halted between two callbacks.

    process.run(function) ─▶ tasks, timers, callbacks, and whatever these set in motion: all carry the process
    the loop, before it runs any of them: alive? halted? ─▶ run | keep for later | forget

Invariants
- What is started in the context of a process belongs to it, and so on down. A transport calls its receiver in the
  context of the receiver (``memory_transport``), so a message never carries its sender's process along.
- After ``kill`` nothing of it runs ever again, not even a ``finally``: as after SIGKILL.
- While it is halted nothing of it runs, timers included; what became due meanwhile runs afterwards, in order: as
  between SIGSTOP and SIGCONT.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")

PROCESS: contextvars.ContextVar[SimProcess | None] = contextvars.ContextVar("PROCESS", default=None)
"""Process whose code runs; None: the world's, which nothing can kill."""


class SimProcess:
    """See the module's docstring."""

    __slots__ = ("_context", "alive", "clock_error_s", "halted", "held", "name", "slowness")

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.halted = False
        self.held: deque[asyncio.Handle] = deque()
        """Callbacks that became due while it was halted; the loop fills it."""
        self.clock_error_s = 0.0
        """Seconds that its wall clock is ahead."""
        self.slowness = 1.0
        """Factor by which simulated engines and backends take longer."""
        self._context = contextvars.Context()
        self._context.run(PROCESS.set, self)

    def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call ``function`` as this process, now. Only from outside of it."""
        return self._context.copy().run(function, *args, **kwargs)

    def set(self, variable: contextvars.ContextVar[R], value: R) -> None:
        """Let code of this process that has not started yet find ``value`` in ``variable``."""
        self._context.run(variable.set, value)

    def start(self, coroutine: Coroutine[Any, Any, R], name: str) -> asyncio.Task[R]:
        return asyncio.get_running_loop().create_task(coroutine, name=name, context=self._context.copy())

    @staticmethod
    def of_nobody(coroutine: Coroutine[Any, Any, R], name: str) -> asyncio.Task[R]:
        """Run ``coroutine`` as a task that belongs to no process, whoever calls."""
        return asyncio.get_running_loop().create_task(coroutine, name=name, context=contextvars.Context())

    def halt(self) -> None:
        """Nothing of it runs until ``go_on``."""
        self.halted = True

    def go_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run next, in order, what has become due meanwhile. Nothing happens to a process that is not halted."""
        self.halted = False
        held, self.held = self.held, deque()
        ready = cast("deque[asyncio.Handle]", cast("Any", loop)._ready)  # noqa: SLF001
        ready.extend(held)

    def __repr__(self) -> str:
        return f"SimProcess({self.name})"
