"""Decides which job of a training service computes now: bursts of one job after another, as the slice policy chooses.

    begin(job) ─▶ it waits ─▶ chosen ─▶ its state is made resident ─▶ granted: one call is computed ─▶ end(job)

    FREE ── a job is chosen ─▶ MOVING ── its state is there ─▶ COMPUTING ── end ─▶ HELD ── its next call ─▶ MOVING …
     │ ▲                         │                                 │                │
     │ ├── it failed, or nobody waits for it any more ─────────────┘                │
     │ ├── the call has ended the burst ◀──────────────────────────┘                │
     │ └── nothing for ``gap_s``, another job is chosen, withdrawn ◀────────────────┘
     └── nobody asks ─▶ STORING ─▶ FREE

The burst in which a job attaches ends with that call, unless its next call is to load a checkpoint: after attaching, a
job may be idle for long.

Invariants
- At most one call computes, and nothing moves meanwhile; a burst holds no other job's call.
- A decision is made only in FREE and HELD, whenever something has changed: a call has come or is done, a burst is
  over, a gap has passed.
- A move that hangs ends the service: its next life finds all the state that was stored.
- A caller that gives up waiting leaves no trace: a slice that comes too late for it goes to the next.
- A job that is *isolated* computes with nobody else's state in memory: if it ends the process, no other loses state.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from actors.core.context import Context
from actors.policies.sharing.fair_share import FairShare
from actors.policies.sharing.slices import Asking, SlicePolicy, SliceView
from actors.ranks.errors import RankLost
from actors.train_service.errors import MoveStuck, NoSlice, ResidencyError
from actors.train_service.residency import Residency
from actors.train_service.service_trace import ServiceTrace
from actors.trainer.errors import TrainerError

_NEWEST_COUNTS: Final = 0.3
"""Weight of the newest burst in the estimate of the next one's length."""
_UNKNOWN_BURST_SECONDS: Final = 1.0
"""Estimated length of a new job's first burst. This only orders the queue; no burst is cut off after it."""


@dataclass
class _Job:
    """A job that may ask for slices, as it is remembered between its calls."""

    priority: int
    share: float
    isolated: bool
    kept: bool
    """Whether its state is to outlive the process, and so is stored when nobody asks."""
    estimate_s: float = _UNKNOWN_BURST_SECONDS
    switch_s: float = 0.0
    bursts: int = 0
    has_stepped: bool = False
    """Whether the current burst has computed an optimizer step."""


@dataclass
class _Waiting:
    """A call waits for its slice."""

    since_s: float
    prepare: Callable[[], Awaitable[float]]
    granted: asyncio.Future[float] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Seconds that it took to make the job's state resident."""


class SliceState(enum.Enum):
    """The slice is in one of these states (see the drawing at the head of this file)."""

    FREE = "it is nobody's"
    STORING = "it is nobody's, and what has changed is stored meanwhile"
    MOVING = "the holder's state is brought to where it is computed with"
    COMPUTING = "a call of the holder computes"
    HELD = "the holder computes nothing; if it asks again soon, its burst goes on"


@dataclass
class _Burst:
    """A burst is a series of calls of one job, between which no other job computes."""

    job: str
    computed_s: float = 0.0
    began_s: float | None = None
    """Time at which its first call was let through."""
    idle_since_s: float | None = None
    """Time at which its last call was done; None while a call is under way."""


class SliceQueue:
    """The queue grants slices of a service to the calls that wait for one."""

    def __init__(self, ctx: Context, decide: SlicePolicy, residency: Residency, trace: ServiceTrace) -> None:
        self._ctx = ctx
        self._trace = trace
        self._decide = decide
        self._residency = residency
        self._fair = FairShare()
        self._jobs: dict[str, _Job] = {}
        self._waiting: dict[str, _Waiting] = {}
        self._state = SliceState.FREE
        self._burst: _Burst | None = None
        """Burst of the holder, in MOVING, COMPUTING and HELD."""
        self._last = ""
        """Job that had the burst before."""
        self._unstored: list[str] = []
        """Jobs whose bursts may have left state that only this process has, the oldest first."""
        self._timer: asyncio.TimerHandle | None = None
        self._prefetching: asyncio.Task[object] | None = None

    @property
    def holder(self) -> str:
        """The job that has the slice; empty if none has."""
        return "" if self._burst is None else self._burst.job

    @property
    def is_busy(self) -> bool:
        """Whether a call computes, or state moves: nothing is decided then."""
        return self._state not in (SliceState.FREE, SliceState.HELD)

    # ------------------------------------------------------------ who takes part

    def join(self, job: str, *, priority: int, share: float, isolated: bool, kept: bool = True) -> None:
        """Let ``job`` ask from now on; estimates from an earlier time are kept."""
        known = self._jobs.get(job)
        self._jobs[job] = _Job(priority, share, isolated, kept)
        if known is not None:
            self._jobs[job].estimate_s, self._jobs[job].switch_s = known.estimate_s, known.switch_s
            self._jobs[job].bursts = known.bursts

    def leave(self, job: str) -> None:
        """Forget ``job``, which must not be waiting or computing."""
        self._jobs.pop(job, None)
        self._fair.forget(job)

    def withdraw(self, job: str, why: Exception) -> None:
        """Fail the waiting call of ``job`` with ``why``, and end its burst unless a call of it computes right now."""
        waiting = self._waiting.get(job)
        if waiting is not None and not waiting.granted.done():
            waiting.granted.set_exception(why)
        if self.holder == job and not self.is_busy:
            self._end_burst()
            self._look()

    def bursts(self, job: str) -> int:
        """Number of bursts of ``job`` with an optimizer step."""
        return self._jobs[job].bursts if job in self._jobs else 0

    def asking_s(self, job: str) -> float | None:
        """Seconds for which a call of ``job`` has waited; None if none waits."""
        waiting = self._waiting.get(job)
        return None if waiting is None else self._ctx.now() - waiting.since_s

    # ------------------------------------------------------------ a call's slice

    async def begin(
        self,
        job: str,
        wait_s: float,
        prepare: Callable[[], Awaitable[float]] | None = None,
        *,
        trains: bool = False,
    ) -> tuple[float, float]:
        """Wait until ``job`` may compute one call; the caller calls ``end`` after it.

        Returns the seconds waited, and the seconds spent on making its state resident. ``prepare``: makes it resident
        in place of the residency. ``trains``: the call prepares an optimizer step, so if the burst has had a step
        already, it begins a new burst, even if that step was not published, as in a replay.

        Raises:
            NoSlice: others have computed for ``wait_s``.
            BundleLost: the call was withdrawn.
            ResidencyError, ParkedStateDamaged, OSError: its state cannot be made resident.
        """
        began_s = self._ctx.now()
        if trains and self.holder == job and not self.is_busy and self._jobs[job].has_stepped:
            self._end_burst()
        waiting = _Waiting(began_s, prepare or (lambda: self._residency.make_resident(job)))
        self._waiting[job] = waiting
        self._fair.asks(job)
        self._look()
        try:
            async with asyncio.timeout(wait_s):
                await asyncio.shield(waiting.granted)
        except TimeoutError:
            self._abandon(job, waiting)
            holder = f"the job {self.holder} has the service" if self.holder else "it was not this job's turn"
            raise NoSlice(f"no slice within {wait_s:g} s (limits.service_wait_s): {holder}") from None
        finally:
            if self._waiting.get(job) is waiting:
                del self._waiting[job]
        switch_s = waiting.granted.result()
        return max(0.0, self._ctx.now() - began_s - switch_s), switch_s

    def _abandon(self, job: str, waiting: _Waiting) -> None:
        """Nobody waits for this slice any more; end it if it was granted just now."""
        if not waiting.granted.done():
            waiting.granted.cancel()
        elif not waiting.granted.cancelled() and waiting.granted.exception() is None:
            self.end(job, 0.0)

    def end(
        self,
        job: str,
        computed_s: float,
        *,
        is_step: bool = False,
        ends_burst: bool = False,
        leaves_news: bool = True,
    ) -> None:
        """The call that ``begin`` let through is done. ``leaves_news``: it may have changed state to be stored."""
        assert self._burst is not None, "begin has let no call through"
        self._state = SliceState.HELD
        self._burst.computed_s += computed_s
        self._burst.idle_since_s = self._ctx.now()
        if job in self._jobs:
            self._jobs[job].has_stepped |= is_step
            self._fair.charge(job, computed_s, self._jobs[job].share)
        if ends_burst or job not in self._jobs:
            self._end_burst(leaves_news=leaves_news)
        if job not in self._waiting:
            self._fair.rests(job)
        self._look()

    # ------------------------------------------------------------ deciding

    def _end_burst(self, *, leaves_news: bool = True) -> None:
        """The holder's burst is over: the slice is free."""
        burst, self._burst, self._state = self._burst, None, SliceState.FREE
        assert burst is not None, "the slice is nobody's"
        self._last = burst.job
        if burst.began_s is not None:
            ended_s = self._ctx.now() if burst.idle_since_s is None else burst.idle_since_s
            name = "burst" if leaves_news else "load"  # only making a backend leaves no news: it trains nothing
            self._trace.add(burst.job, name, burst.began_s, ended_s, compute_s=round(burst.computed_s, 4))
        job = self._jobs.get(burst.job)
        if leaves_news and burst.job not in self._unstored and (job is None or job.kept):
            self._unstored.append(burst.job)
        if job is not None and job.has_stepped:
            seen = job.estimate_s if job.bursts else burst.computed_s
            job.estimate_s = seen + _NEWEST_COUNTS * (burst.computed_s - seen)
            job.bursts += 1
            job.has_stepped = False

    def _look(self) -> None:
        """Unless a call computes or state moves: let a call through, or store changed state if none waits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.is_busy:
            return
        choice = self._decide(self._view(), self._ctx.now())
        if choice.look_again_s is not None:
            self._timer = asyncio.get_running_loop().call_later(choice.look_again_s, self._look)
        if choice.prefetch is not None:
            self._prefetch(choice.prefetch, choice.run)
        waiting = self._waiting.get(choice.run or "")
        if choice.run is None:
            if self.holder:
                self._end_burst()
            self._store_changed()
        elif waiting is not None:
            self._let_through(choice.run, waiting)

    def _view(self) -> SliceView:
        resident = self._resident()
        return SliceView(
            asking=[self._asking(job, waiting, resident) for job, waiting in self._waiting.items()],
            holder=self.holder or None,
            holder_idle_since_s=None if self.holder in self._waiting or not self._burst else self._burst.idle_since_s,
            resident=resident,
            last=self._last or None,
        )

    def _asking(self, job: str, waiting: _Waiting, resident: frozenset[str]) -> Asking:
        known = self._jobs[job]
        return Asking(
            job=job,
            since_s=waiting.since_s,
            estimate_s=known.estimate_s,
            switch_s=0.0 if job in resident else known.switch_s,
            priority=known.priority,
            share=known.share,
            used_s=self._fair.used_s(job, known.share),
        )

    def _resident(self) -> frozenset[str]:
        return frozenset(bundle.job for bundle in self._residency.report().bundles if bundle.resident_bytes)

    # ------------------------------------------------------------ moving state

    def _let_through(self, job: str, waiting: _Waiting) -> None:
        """Let a call compute as soon as its job's state is resident."""
        if self.holder and self.holder != job:
            self._end_burst()
        self._burst, self._state = self._burst or _Burst(job), SliceState.MOVING
        self._burst.idle_since_s = None
        self._trace.add(job, "wait", waiting.since_s, self._ctx.now())
        self._ctx.start_task(self._grant(self._burst, waiting), f"a slice for {job}")

    async def _grant(self, burst: _Burst, waiting: _Waiting) -> None:
        """Make the state of the burst's job resident, then let its call through."""
        job, switch_s = burst.job, 0.0
        try:
            if job in self._jobs and self._jobs[job].isolated:
                await self._park_others(job)
            if not waiting.granted.done():
                switch_s = await waiting.prepare()
        except (MoveStuck, RankLost):  # nothing moves any more in this process: its next life has what was stored
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer to this call, and to no other
            if not waiting.granted.done():
                waiting.granted.set_exception(error)
        if waiting.granted.done():  # the move failed, or the caller no longer waits
            burst.idle_since_s = self._ctx.now()
            self._end_burst()
            self._look()
            return
        now_s = self._ctx.now()
        if switch_s > 0 and job in self._jobs:
            self._jobs[job].switch_s = switch_s
            self._trace.add(job, "switch", now_s - switch_s, now_s)
        burst.began_s = now_s if burst.began_s is None else burst.began_s
        self._state = SliceState.COMPUTING
        waiting.granted.set_result(switch_s)

    async def _park_others(self, job: str) -> None:
        for other in sorted(self._resident() - {job}):
            try:
                await self._residency.park(other)
            except ResidencyError as error:
                self._ctx.log.warning("a bundle stays beside an isolated one", job=other, isolated=job, why=str(error))

    def _prefetch(self, job: str, beside: str | None) -> None:
        """Prefetch the state of ``job`` while ``beside`` computes, unless that one has to compute alone."""
        busy = self._prefetching is not None and not self._prefetching.done()
        alone = beside in self._jobs and self._jobs[beside].isolated
        if not (busy or alone) and job in {bundle.job for bundle in self._residency.report().bundles}:
            self._prefetching = self._ctx.start_task(self._bring_near(job), f"prefetch {job}")

    async def _bring_near(self, job: str) -> None:
        began_s = self._ctx.now()
        try:
            await self._residency.prefetch(job)
            self._trace.add(job, "prefetch", began_s, self._ctx.now())
        except (ResidencyError, TrainerError, OSError) as error:  # the call that needs it will meet the same error
            self._ctx.log.warning("a bundle could not be prefetched", job=job, why=str(error))

    def _store_changed(self) -> None:
        """Nobody asks: store changed state, so that it outlives the process."""
        resident = self._resident()
        self._unstored = [job for job in self._unstored if job in resident]
        if self._unstored:
            job, self._state = self._unstored.pop(0), SliceState.STORING
            self._ctx.start_task(self._store(job), f"store {job}")

    async def _store(self, job: str) -> None:
        try:
            await self._residency.store(job)
            await self._residency.relieve()
        except (ResidencyError, TrainerError, OSError) as error:
            self._ctx.log.warning("the state is not stored", job=job, why=str(error))
        self._state = SliceState.FREE
        self._look()

    def close(self) -> None:
        """Decide nothing more."""
        if self._timer is not None:
            self._timer.cancel()
