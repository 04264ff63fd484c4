"""One life of a simulated process: all code that runs in its context, and can be ended or halted between callbacks.

    process.run(function) ─▶ tasks, timers, callbacks, and all that these start: all carry the process
    the loop, before it runs any of them: alive? halted? ─▶ run | keep for later | forget

Invariants
- A task, timer or callback that is started in the context of a process belongs to it. A transport calls its receiver
  in the context of the receiver (``memory_transport``), so a message never carries its sender's process along.
- After ``SimulatedLoop.kill`` nothing of the process runs again, not even a ``finally``, as after SIGKILL.
- While a process is halted nothing of it runs, timers included; callbacks that became due run afterwards, in order, as
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
"""Process whose code runs; None: code of the world, which nothing can kill."""


class SimProcess:
    """Holds one life of a simulated process, as the module's docstring says."""

    __slots__ = ("_context", "alive", "clock_error_s", "halted", "held", "memory_strikes", "name", "slowness")

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.halted = False
        self.held: deque[asyncio.Handle] = deque()
        """Callbacks that became due while the process was halted; the loop fills this."""
        self.clock_error_s = 0.0
        """Seconds by which the process's wall clock is ahead."""
        self.slowness = 1.0
        """Factor by which the process's simulated engines and backends take longer."""
        self.memory_strikes = 0
        """Number of micro-batches for which the process's simulated backends will find no memory."""
        self._context = contextvars.Context()
        self._context.run(PROCESS.set, self)

    def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call ``function`` now, as this process. Only for code outside the process."""
        return self._context.copy().run(function, *args, **kwargs)

    def set(self, variable: contextvars.ContextVar[R], value: R) -> None:
        """Set ``variable`` for code that this process starts from now on."""
        self._context.run(variable.set, value)

    def start(self, coroutine: Coroutine[Any, Any, R], name: str) -> asyncio.Task[R]:
        return asyncio.get_running_loop().create_task(coroutine, name=name, context=self._context.copy())

    @staticmethod
    def of_nobody(coroutine: Coroutine[Any, Any, R], name: str) -> asyncio.Task[R]:
        """Run ``coroutine`` as a task that belongs to no process, whoever calls."""
        return asyncio.get_running_loop().create_task(coroutine, name=name, context=contextvars.Context())

    def halt(self) -> None:
        """Let nothing of the process run until ``go_on``."""
        self.halted = True

    def go_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run, in order, the callbacks that became due since ``halt``. Idempotent."""
        self.halted = False
        held, self.held = self.held, deque()
        ready = cast("deque[asyncio.Handle]", cast("Any", loop)._ready)  # noqa: SLF001
        ready.extend(held)

    def __repr__(self) -> str:
        return f"SimProcess({self.name})"
