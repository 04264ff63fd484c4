"""Who computes now: one burst of one job after another, as the policy of slices decides.

    begin(job) ─▶ asking ─▶ chosen ─▶ its state is made resident ─▶ granted: one call is computed ─▶ end(job)
                                                                        ▲                             │
                                     the holder's next call ────────────┴── the burst goes on ◀───────┤
                                                                            nothing for ``gap_s``  ◀──┤
                                                                            the burst has ended    ◀──┘
An attached job's slice ends there, unless its next call is to load a checkpoint: in between it may be idle for long.

Invariants
- At most one call computes, and nothing moves meanwhile; a burst holds no other job's call.
- A decision is made whenever something has changed: a call has come or is done, a burst is over, a gap has passed.
- A move that does not end ends the service: all that it has stored is there for its next life.
- Whoever gives up waiting leaves no trace: a slice that comes too late for it goes to the next.
- A job that is *isolated* computes with nobody else's state in memory: what ends the process ends nothing of theirs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from actors.core.context import Context
from actors.policies.fair_share import FairShare
from actors.policies.slices import Asking, SlicePolicy, SliceView
from actors.train_service.errors import NoSlice
from actors.train_service.lanes import Lanes
from actors.train_service.residency import Residency
from actors.train_service.residency_errors import MoveStuck, ResidencyError
from actors.trainer.errors import TrainerError

_NEWEST_COUNTS: Final = 0.3
"""Weight of the newest burst in what is expected of the next."""
_UNKNOWN_BURST_SECONDS: Final = 1.0
"""Expected burst of a job of which nothing is known: no bound, only a place in the queue."""


@dataclass
class _Job:
    """What is kept of a job between its calls."""

    priority: int
    share: float
    isolated: bool
    estimate_s: float = _UNKNOWN_BURST_SECONDS
    switch_s: float = 0.0
    bursts: int = 0
    has_stepped: bool = False
    """Whether the burst that is under way holds a step, as those of training do."""


@dataclass
class _Waiting:
    """A call that waits."""

    since_s: float
    prepare: Callable[[], Awaitable[float]]
    granted: asyncio.Future[float] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Seconds that it took to have its state where it is computed with."""


class Turns:
    """Gives a service's slices. ``holder``: the job whose burst it is; empty: nobody's."""

    def __init__(self, ctx: Context, decide: SlicePolicy, residency: Residency, lanes: Lanes) -> None:
        self._ctx = ctx
        self._lanes = lanes
        self._decide = decide
        self._residency = residency
        self._fair = FairShare()
        self._jobs: dict[str, _Job] = {}
        self._waiting: dict[str, _Waiting] = {}
        self._busy = False
        """Whether a call is being computed, or state moves."""
        self._idle_since_s: float | None = None
        self._last = ""
        self._unstored: list[str] = []
        """Jobs whose bursts may have left something that only this process has, the oldest first."""
        self._burst_s = 0.0
        self._burst_began_s: float | None = None
        """Time at which the holder's first call was let through."""
        self._timer: asyncio.TimerHandle | None = None
        self._prefetching: asyncio.Task[object] | None = None
        self.holder = ""

    # ------------------------------------------------------------ who takes part

    def join(self, job: str, *, priority: int, share: float, isolated: bool) -> None:
        """``job`` may ask from now on; what is known of it from before still counts."""
        known = self._jobs.get(job)
        self._jobs[job] = _Job(priority, share, isolated)
        if known is not None:
            self._jobs[job].estimate_s, self._jobs[job].switch_s = known.estimate_s, known.switch_s
            self._jobs[job].bursts = known.bursts

    def leave(self, job: str) -> None:
        """``job``, nothing of which waits or computes, does not come back."""
        self._jobs.pop(job, None)
        self._fair.forget(job)

    def withdraw(self, job: str, why: Exception) -> None:
        """A call of ``job`` that waits meets ``why``, and its burst is over as soon as nothing of it computes."""
        waiting = self._waiting.get(job)
        if waiting is not None and not waiting.granted.done():
            waiting.granted.set_exception(why)
        if self.holder == job and not self._busy:
            self._end_burst()
            self._look()

    def bursts(self, job: str) -> int:
        """Number of its bursts with a step."""
        return self._jobs[job].bursts if job in self._jobs else 0

    def asking_s(self, job: str) -> float | None:
        """Seconds for which a call of it has waited."""
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
        """Wait until ``job`` may compute one call; ``end`` follows. Seconds waited, and spent on its state.

        ``prepare``: brings its state there, if not the residency does. ``trains``: the call goes before a step; so
        after one it belongs to the next burst, also where the step in between was not published, as in a replay.

        Raises:
            NoSlice: others have computed for ``wait_s``.
            BundleLost: it was withdrawn.
            ResidencyError, ParkedStateDamaged, OSError: its state cannot be brought there.
        """
        began_s = self._ctx.now()
        if trains and self.holder == job and not self._busy and self._jobs[job].has_stepped:
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
        """Nobody waits for this slice any more; if it has come just now, it is over."""
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
        """The call that ``begin`` had let through is done. ``leaves_news``: it may have made state to be stored."""
        self._busy = False
        self._burst_s += computed_s
        self._idle_since_s = self._ctx.now()
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
        job, self._last = self._jobs.get(self.holder), self.holder
        if self._burst_began_s is not None:
            ended_s = self._ctx.now() if self._idle_since_s is None else self._idle_since_s
            self._lanes.add(self.holder, "burst", self._burst_began_s, ended_s, compute_s=round(self._burst_s, 4))
        if leaves_news and self.holder not in self._unstored:
            self._unstored.append(self.holder)
        if job is not None and job.has_stepped:
            seen = job.estimate_s if job.bursts else self._burst_s
            job.estimate_s = seen + _NEWEST_COUNTS * (self._burst_s - seen)
            job.bursts += 1
            job.has_stepped = False
        self.holder, self._burst_s, self._idle_since_s, self._burst_began_s = "", 0.0, None, None

    def _look(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._busy:
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
            self._rest()
        elif waiting is not None:
            self._let(choice.run, waiting)

    def _view(self) -> SliceView:
        resident = self._resident()
        return SliceView(
            asking=[self._asking(job, waiting, resident) for job, waiting in self._waiting.items()],
            holder=self.holder or None,
            holder_idle_since_s=None if self.holder in self._waiting else self._idle_since_s,
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

    def _let(self, job: str, waiting: _Waiting) -> None:
        """Let a call compute as soon as its state is where it is computed with."""
        if self.holder and self.holder != job:
            self._end_burst()
        self.holder, self._busy, self._idle_since_s = job, True, None
        self._lanes.add(job, "wait", waiting.since_s, self._ctx.now())
        self._ctx.start_task(self._grant(job, waiting), f"a slice for {job}")

    async def _grant(self, job: str, waiting: _Waiting) -> None:
        try:
            if job in self._jobs and self._jobs[job].isolated:
                await self._park_others(job)
            switch_s = 0.0 if waiting.granted.done() else await waiting.prepare()
        except MoveStuck:  # nothing moves any more in this process: its next life has what was stored
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer to this call, and to no other
            if not waiting.granted.done():
                waiting.granted.set_exception(error)
            self._undo(job)
            return
        if waiting.granted.done():  # nobody waits for it any more
            self._undo(job)
            return
        now_s = self._ctx.now()
        if switch_s > 0 and job in self._jobs:
            self._jobs[job].switch_s = switch_s
            self._lanes.add(job, "switch", now_s - switch_s, now_s)
        self._burst_began_s = now_s if self._burst_began_s is None else self._burst_began_s
        waiting.granted.set_result(switch_s)

    def _undo(self, job: str) -> None:
        self._busy, self._idle_since_s = False, self._ctx.now()
        if self.holder == job:
            self._end_burst()
        self._look()

    async def _park_others(self, job: str) -> None:
        for other in sorted(self._resident() - {job}):
            try:
                await self._residency.park(other)
            except ResidencyError as error:
                self._ctx.log.warning("a bundle stays beside an isolated one", job=other, isolated=job, why=str(error))

    def _prefetch(self, job: str, beside: str | None) -> None:
        """Have the state of ``job`` on its way while ``beside`` computes: unless that one is to be alone."""
        busy = self._prefetching is not None and not self._prefetching.done()
        alone = beside in self._jobs and self._jobs[beside].isolated
        if not (busy or alone) and job in {bundle.job for bundle in self._residency.report().bundles}:
            self._prefetching = self._ctx.start_task(self._bring_near(job), f"prefetch {job}")

    async def _bring_near(self, job: str) -> None:
        began_s = self._ctx.now()
        try:
            await self._residency.prefetch(job)
            self._lanes.add(job, "prefetch", began_s, self._ctx.now())
        except (ResidencyError, TrainerError, OSError) as error:  # whoever needs it now will meet it again
            self._ctx.log.warning("a bundle could not be prefetched", job=job, why=str(error))

    def _rest(self) -> None:
        """Nobody asks: have what has changed outlive the process."""
        resident = self._resident()
        self._unstored = [job for job in self._unstored if job in resident]
        if self._unstored:
            self._busy, job = True, self._unstored.pop(0)
            self._ctx.start_task(self._store(job), f"store {job}")

    async def _store(self, job: str) -> None:
        try:
            await self._residency.store(job)
            await self._residency.relieve()
        except (ResidencyError, TrainerError, OSError) as error:
            self._ctx.log.warning("the state is not stored", job=job, why=str(error))
        self._busy = False
        self._look()

    def close(self) -> None:
        """Decide nothing more."""
        if self._timer is not None:
            self._timer.cancel()
