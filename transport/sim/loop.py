"""An event loop whose clock moves only when nobody can run: hours pass in milliseconds, equal seeds give equal runs.

Invariants
- ``loop.time()`` starts at 0 and jumps to the next timer when nothing is ready; nothing ever waits in real time.
- Nothing scheduled and nothing ready while somebody waits is a deadlock, reported with who waits where.
- No threads, sockets, signals or subprocesses: what would bring real time in raises.
- With ``shuffle``, tasks that are ready in the same turn run in an order drawn from the seed, so that nothing can lean
  on it. Plain callbacks keep their order, as ``call_soon`` promises.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, TypeVar, cast

from transport.errors import HeadraceError

T = TypeVar("T")


class SimulationError(HeadraceError):
    """The simulated program did what a simulation cannot do. The program's bug."""


class SimulationDeadlock(SimulationError):
    """Everybody waits and no timer is set. The program's bug; the message lists who waits where."""


class _NoSelector:
    """Stands where the real loop waits for sockets: waiting is a jump of the clock."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise SimulationDeadlock("nothing is scheduled and nothing can run; waiting:\n" + waiting(self._loop))
        if timeout > 0:
            self._loop.advance(timeout)
        return []


class SimulatedLoop(asyncio.BaseEventLoop):
    """See the module's docstring."""

    _ready: deque[asyncio.Handle]
    virtual_time = True
    """What others look for: on this loop nothing may bring in real time, threads least of all."""

    def __init__(self, seed: int = 0, *, shuffle: bool = True) -> None:
        super().__init__()
        self._now_s = 0.0
        # timers closer than this to the clock fire together; must exceed the rounding of a clock that reads years
        self._clock_resolution = 1e-6
        self._selector = _NoSelector(self)
        self._order = random.Random(seed) if shuffle else None

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move the clock; called when nothing can run."""
        self._now_s += seconds

    def _process_events(self, event_list: list[Any]) -> None:
        """Called by the base class once a turn, before it runs what is ready."""
        order = self._order
        if order is None or len(self._ready) < 2:
            return
        handles = list(self._ready)
        places = [index for index, handle in enumerate(handles) if _is_task_step(handle)]
        drawn = places.copy()
        order.shuffle(drawn)
        for place, source in zip(places, drawn, strict=True):
            self._ready[place] = handles[source]

    def _write_to_self(self) -> None:
        """Nobody sleeps in a selector, so nobody needs to be woken."""

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> NoReturn:  # type: ignore[override]
        """Threads live in real time."""
        raise SimulationError(
            f"a thread was asked to run {func!r}: a simulation has none, hand in a simulated part instead"
        )


def _is_task_step(handle: asyncio.Handle) -> bool:
    callback = cast("Any", handle)._callback  # noqa: SLF001  asyncio itself tells its tasks apart so
    return isinstance(getattr(callback, "__self__", None), asyncio.Task)


def waiting(loop: asyncio.AbstractEventLoop) -> str:
    """One line a task: its name, and the file and line at which it waits."""
    lines: list[str] = []
    for task in asyncio.all_tasks(loop):
        frames = task.get_stack(limit=4)
        where = " < ".join(f"{f.f_code.co_filename.rsplit('/', 1)[-1]}:{f.f_lineno}" for f in frames) or "not started"
        lines.append(f"  {task.get_name()} at {where}")
    return "\n".join(sorted(lines)) or "  (no task)"


def run_simulated(main: Coroutine[Any, Any, T], *, seed: int = 0, shuffle: bool = True) -> T:
    """Run ``main`` to its end in virtual time.

    Raises:
        SimulationDeadlock: nothing could ever happen again.
    """
    with asyncio.Runner(loop_factory=lambda: SimulatedLoop(seed, shuffle=shuffle)) as runner:
        return runner.run(main)
