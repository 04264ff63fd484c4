"""An event loop whose clock moves only when nothing can run: hours pass in milliseconds, equal seeds give equal runs.

Invariants
- ``loop.time()`` starts at 0 and jumps to the next timer when nothing is ready; nothing ever waits in real time.
- If nothing is scheduled or ready while tasks wait, that is a deadlock, reported with where each task waits.
- No threads, sockets, signals or subprocesses: calls that would bring in real time raise.
- With ``shuffle``, tasks that are ready in the same turn run in an order drawn from the seed, so that no code can
  depend on it. Plain callbacks keep their order, as ``call_soon`` promises. Tasks are sorted by birth before shuffling,
  so that a set of tasks, which has the order of addresses in memory, cannot make two runs differ.
- Callbacks of a killed process (``process.py``) never run; those of a halted one run later.
"""

# ruff: noqa: SLF001  a loop of asyncio is made of its base class's private parts
from __future__ import annotations

import asyncio
import contextvars
import heapq
import random
import warnings
from collections import deque
from collections.abc import Callable, Coroutine
from operator import itemgetter
from types import FrameType
from typing import Any, NoReturn, TypeVar, cast

from transport.errors import HeadraceError
from transport.sim.process import PROCESS, SimProcess

T = TypeVar("T")

_Timer = tuple[float, int, asyncio.TimerHandle]
"""Timer: its time, its number, and its handle."""
_PLACES_MAX = 4
_CANCELLED_MAX = 100
"""Number of cancelled timers beyond which they are removed, if they are the majority."""


class SimulationError(HeadraceError):
    """The simulated program did something that a simulation cannot do. The program's bug."""


class SimulationDeadlock(SimulationError):
    """All tasks wait and no timer is set. The program's bug; the message lists where each task waits."""


class SimTask(asyncio.Task[Any]):
    """A task that knows its place in the order of births, and its process."""

    birth = 0
    process: SimProcess | None = None


class _NoSelector:
    """Replaces the selector of a real loop, and returns at once: the clock jumps instead of waiting."""

    def select(self, timeout: float | None) -> list[Any]:
        return []


class SimulatedLoop(asyncio.BaseEventLoop):
    """Jumps from timer to timer, and runs due tasks in an order that the seed decides."""

    _ready: deque[asyncio.Handle]
    _timer_cancelled_count: int
    virtual_time = True
    """Mark for other code: on this loop nothing may bring in real time, such as threads."""

    def __init__(self, seed: int = 0, *, shuffle: bool = True) -> None:
        super().__init__()
        self._now_s = 0.0
        # timers closer than this to the clock fire together; must exceed the rounding of a clock that reads years
        self._clock_resolution = 1e-6
        self._selector = _NoSelector()
        self._order = random.Random(seed) if shuffle else None
        self._timers: list[_Timer] = []
        self._timers_set = 0
        self._births = 0
        self._graves: list[SimTask] = []
        self.set_task_factory(self._new_task)  # type: ignore[arg-type]  # typeshed knows only the older signature

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now_s

    def time_of_day(self) -> float:
        """The wall clock of the running process: the virtual time, plus the clock error of a fault."""
        process = PROCESS.get()
        return self._now_s + (0.0 if process is None else process.clock_error_s)

    def _run_once(self) -> None:
        """Run one turn, in place of the base class's: no polling, halted and killed processes skipped, order drawn."""
        ready, timers = self._ready, self._timers
        self._forget_cancelled(timers)
        if not ready and not self._stopping:  # type: ignore[attr-defined]  # the base class's own mark
            if not timers:
                raise SimulationDeadlock("nothing is scheduled and nothing can run; waiting:\n" + waiting(self))
            self._now_s = max(self._now_s, timers[0][0])
        due_s = self._now_s + self._clock_resolution
        while timers and timers[0][0] < due_s:
            timer = cast("Any", heapq.heappop(timers)[2])
            timer._scheduled = False
            ready.append(timer)
        if self._order is not None and len(ready) > 1:
            self._shuffle(self._order)
        for _ in range(len(ready)):
            handle = cast("Any", ready.popleft())
            if handle._cancelled:
                continue
            process = handle._context.get(PROCESS)
            if process is None or (process.alive and not process.halted):
                handle._run()
            elif process.alive:
                process.held.append(handle)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """Do as the base class does; timers of one moment fire in the order in which they were set."""
        self._check_closed()  # type: ignore[attr-defined]
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._timers_set += 1
        heapq.heappush(self._timers, (when, self._timers_set, timer))
        cast("Any", timer)._scheduled = True
        return timer

    def _forget_cancelled(self, timers: list[_Timer]) -> None:
        if self._timer_cancelled_count > _CANCELLED_MAX and 2 * self._timer_cancelled_count > len(timers):
            kept = [timer for timer in timers if not timer[2].cancelled()]
            heapq.heapify(kept)
            timers[:] = kept
            self._timer_cancelled_count = 0
        while timers and timers[0][2].cancelled():
            self._timer_cancelled_count -= 1
            heapq.heappop(timers)

    def _shuffle(self, order: random.Random) -> None:
        steps: list[tuple[int, asyncio.Handle]] = []
        places: list[int] = []
        for place, handle in enumerate(self._ready):
            task = getattr(cast("Any", handle)._callback, "__self__", None)
            if type(task) is SimTask:
                steps.append((task.birth, handle))
                places.append(place)
        if len(steps) < 2:
            return
        steps.sort(key=itemgetter(0))
        order.shuffle(steps)
        for place, (_, handle) in zip(places, steps, strict=True):
            self._ready[place] = handle

    def _new_task(
        self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **options: Any
    ) -> SimTask:
        task = SimTask(coroutine, loop=loop, **options)
        self._births += 1
        task.birth = self._births
        context: contextvars.Context | None = options.get("context")
        task.process = PROCESS.get() if context is None else context.get(PROCESS)
        return task

    def _process_events(self, event_list: list[Any]) -> None:
        """Do nothing: nothing is polled."""

    def _write_to_self(self) -> None:
        """Do nothing: the loop never sleeps in a selector, so need not be woken."""

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> NoReturn:  # type: ignore[override]
        """Refuse: threads run in real time."""
        raise SimulationError(
            f"a thread was asked to run {func!r}: a simulation has none, hand in a simulated part instead"
        )

    def kill(self, process: SimProcess) -> None:
        """End ``process`` as SIGKILL does. Idempotent.

        Its tasks are kept until ``dismantle``: a coroutine that is garbage-collected runs its ``finally`` blocks.
        """
        process.alive = False
        for task in cast("set[SimTask]", asyncio.all_tasks(self)):
            if task.process is process:
                self._graves.append(task)
        process.held.clear()  # its tasks are kept above

    def dismantle(self) -> None:
        """Close the loop and all tasks left on it, killed or not; their ``finally`` blocks run, errors are ignored."""
        left = dict.fromkeys([*self._graves, *cast("set[SimTask]", asyncio.all_tasks(self))])
        graves = sorted(left, key=lambda task: task.birth)
        self._graves.clear()
        self._timers.clear()
        self.close()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for task in graves:
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                coroutine = task.get_coro()
                try:
                    cast("Coroutine[Any, Any, Any]", coroutine).close()
                except BaseException:  # noqa: BLE001, S110  nobody is left to report it to
                    pass


def waiting(loop: asyncio.AbstractEventLoop) -> str:
    """One line for each task: its name, and the files and lines at which it waits, innermost first."""
    lines: list[str] = []
    for task in asyncio.all_tasks(loop):
        process = cast("SimProcess | None", getattr(task, "process", None))
        if process is not None and not process.alive:
            continue
        where = " < ".join(_places(task.get_coro())[::-1][:_PLACES_MAX]) or "nowhere yet"
        lines.append(f"  {f'{process.name}: ' if process is not None else ''}{task.get_name()} at {where}")
    return "\n".join(sorted(lines)) or "  (no task)"


def _places(coroutine: object) -> list[str]:
    """Files and lines at which a coroutine and those that it awaits stand, outermost first."""
    found: list[str] = []
    while coroutine is not None:
        frame: FrameType | None = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "ag_frame", None)
        if frame is not None:
            found.append(f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}")
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "ag_await", None)
    return found
