"""Which job's worker is on which slot of the nodes that come and go, when several jobs want them.

    job's pool ── join ──▶ shares ◀── every ``lending_look_s``, with two jobs or more: what each has left to do
                             │ ``policies.lending``: the slots that pass to another job
                             ▼
    lender's pool: its worker hands back its samples and leaves ── left ──▶ shares ──▶ borrower's pool: starts one there

Invariants
- A slot has one worker: the next job's is started when the former one's has left.
- A job that is alone has all slots at once, as if there were no shares.
- What a job has left to do is asked of its scheduler; if that does not answer, its last answer counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Final, Protocol

import structlog

from actors.core.errors import AskError
from actors.policies.sharing.lending import Borrower, LendingRules, LendingView, LentWorker, decide
from configs.limits import Limits

log = structlog.get_logger("headrace.shares")

SlotName = str
"""Name of a machine's slot: that of a worker on it in every job, ``rollout-<node>.<slot>``."""
Remaining = Callable[[], Awaitable[float]]
"""Asks how many samples of a job are not generated yet. Raises AskError."""


class PoolShare(Protocol):
    """The share of one job's pool: the slots, or places, that the job has now, named by the workers on them."""

    def join(self, look: Callable[[], None]) -> None:
        """The pool wants places; ``look`` is called when others may be granted than before."""
        ...

    def leave(self) -> None:
        """The pool wants no more places; its workers are about to end."""
        ...

    def ended(self) -> None:
        """The pool's workers have ended."""
        ...

    def granted(self, places: Sequence[str], most: int | None) -> set[str]:
        """The places on which the job may have a worker now, out of ``places``, which are all that it can use.

        ``most``: largest number of workers that it wants, on the first places before others; None: one on each.
        """
        ...

    def took(self, place: str) -> None:
        """The pool has begun to start a worker there."""
        ...

    def left(self, place: str) -> None:
        """The pool's worker there is gone."""
        ...


class WholePool:
    """The share of a job that shares nothing: all places are its own, and no other job waits for them."""

    def join(self, look: Callable[[], None]) -> None: ...

    def leave(self) -> None: ...

    def ended(self) -> None: ...

    def granted(self, places: Sequence[str], most: int | None) -> set[str]:
        return set(places[:most])

    def took(self, place: str) -> None: ...

    def left(self, place: str) -> None: ...


WHOLE: Final = WholePool()


@dataclass
class _Sharer:
    """A job that wants slots."""

    look: Callable[[], None]
    remaining: Remaining
    samples_left: float = 1.0
    """Samples that are not generated yet, as the job said last; 1 until it has said anything."""
    rests_since_s: float | None = None
    """Time since which it has nothing to generate; None: it has something."""
    rest_s: float = inf
    """Time for which it has nothing to generate between two steps, as seen so far."""
    places: set[SlotName] = field(default_factory=set[SlotName])
    """Slots that it can use; it may have given up on some."""
    most: int | None = None
    """Workers that it wants at most; None: any number."""
    holds: set[SlotName] = field(default_factory=set[SlotName])
    """Slots where its workers are, or have not left yet."""

    def said(self, samples_left: float, now_s: float) -> None:
        """Note what the job has left now. When a rest ends, its length corrects the expected one, ``rest_s``."""
        if samples_left > 0 and self.rests_since_s is not None:
            rest_s = now_s - self.rests_since_s
            self.rest_s = rest_s if self.rest_s == inf else (self.rest_s + rest_s) / 2
            self.rests_since_s = None
        elif samples_left <= 0 and self.rests_since_s is None:
            self.rests_since_s = now_s
        self.samples_left = samples_left

    def wants(self, job: str, now_s: float) -> Borrower:
        """What the job wants when slots are divided."""
        if self.most == 0:
            return Borrower(job, 0.0)
        return Borrower(job, self.samples_left, self.resumes_in_s(now_s), workers_max=self.most)

    def resumes_in_s(self, now_s: float) -> float:
        """Expected time until a resting job generates again; infinite if unknown, or if the job does not rest."""
        if self.rests_since_s is None:
            return inf
        rested_s = now_s - self.rests_since_s
        return max(0.0, self.rest_s - rested_s) if rested_s <= 2 * self.rest_s else inf


class SlotShares:
    """Divides slots among the jobs of a head; ``of`` gives a job its share. ``stop`` it before the head ends."""

    def __init__(self, limits: Limits, owner_of: Callable[[SlotName], str] = lambda _: "") -> None:
        """``owner_of``: the only job that may use a place; empty: any may."""
        self._limits = limits
        self._owner_of = owner_of
        self._sharers: dict[str, _Sharer] = {}
        self._rules = LendingRules(stay_s=limits.lending_stay_s)
        self._slots: dict[SlotName, LentWorker] = {}
        """Slots, each with the job that is to have it."""
        self._ending: dict[str, set[SlotName]] = {}
        """Jobs that want no slots any more → those where their workers have not ended yet."""
        self._looking: asyncio.Task[None] | None = None

    def of(self, job: str, remaining: Remaining) -> JobShare:
        """The share of one job's pool."""
        return JobShare(self, job, remaining)

    def stop(self) -> None:
        """Divide nothing more."""
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None

    # ------------------------------------------------------------ what pools say

    def join(self, job: str, look: Callable[[], None], remaining: Remaining) -> None:
        """The pool of ``job`` wants slots."""
        self._sharers[job] = _Sharer(look, remaining)
        self._divide()
        if len(self._sharers) > 1 and self._looking is None:
            self._looking = asyncio.create_task(self._look_again_and_again(), name="slot shares")

    def leave(self, job: str) -> None:
        """The pool of ``job`` wants no more slots; its workers keep theirs until they end with the job."""
        if (sharer := self._sharers.pop(job, None)) is not None:
            self._ending[job] = sharer.holds
        if len(self._sharers) < 2:
            self.stop()
        self._divide()

    def ended(self, job: str) -> None:
        """The workers of ``job`` are gone, whose pool has left before."""
        if self._ending.pop(job, None):
            self._tell()

    def granted(self, job: str, places: Sequence[SlotName], most: int | None) -> set[SlotName]:
        """As ``PoolShare.granted``, for ``job``."""
        if (own := self._sharers.get(job)) is None:
            return set()
        places = [place for place in places if self._owner_of(place) in ("", job)]
        if (own.places, own.most) != (set(places), most):
            own.places, own.most = set(places), most
            self._divide()
        taken = [sharer.holds for name, sharer in self._sharers.items() if name != job]
        free = own.places.difference(*taken, *self._ending.values())
        return set([place for place in places if place in free and self._slots[place].job == job][:most])

    def took(self, job: str, place: SlotName) -> None:
        """``job`` has begun to start a worker there."""
        if (sharer := self._sharers.get(job)) is not None:
            sharer.holds.add(place)

    def left(self, job: str, place: SlotName) -> None:
        """The worker of ``job`` there is gone."""
        if (sharer := self._sharers.get(job)) is not None:
            sharer.holds.discard(place)
        self._tell()

    # ------------------------------------------------------------ dividing

    async def _look_again_and_again(self) -> None:
        while True:
            await asyncio.sleep(self._limits.lending_look_s)
            for job, sharer in list(self._sharers.items()):
                try:
                    async with asyncio.timeout(self._limits.ask_timeout_s):
                        samples_left = await sharer.remaining()
                    sharer.said(samples_left, asyncio.get_running_loop().time())
                except (AskError, TimeoutError) as error:
                    log.info("a job does not say what it has left to do", job=job, error=str(error))
            self._divide()

    def _divide(self) -> None:
        """Decide anew which job is to have which slot."""
        now_s = asyncio.get_running_loop().time()
        able = {job: sharer for job, sharer in self._sharers.items() if sharer.places}
        if len(able) > 1:
            jobs = [sharer.wants(job, now_s) for job, sharer in able.items()]
        else:  # a job that is alone has all slots, and says itself how many it uses
            jobs = [Borrower(job, 1.0) for job in able]
        there = sorted({place for sharer in self._sharers.values() for place in sharer.places})
        self._slots = {place: self._slot(place) for place in there}
        moves = decide(self._rules, LendingView(list(self._slots.values()), jobs), now_s)
        for move in moves:
            slot = self._slots[move.worker]
            log.info("a slot passes to another job", slot=slot.name, job=move.job, former=slot.job)
            self._slots[slot.name] = replace(slot, job=move.job, since_s=now_s)
        if moves:
            self._tell()

    def _slot(self, place: SlotName) -> LentWorker:
        """The slot as it was, but without a job that cannot use it any more."""
        suits = {job for job, sharer in self._sharers.items() if place in sharer.places}
        slot = self._slots.get(place) or LentWorker(place, None)
        return replace(slot, job=slot.job if slot.job in suits else None, suits=suits)

    def _tell(self) -> None:
        """Have each pool look at its places again, once the present callback is over."""
        for sharer in self._sharers.values():
            asyncio.get_running_loop().call_soon(sharer.look)


class JobShare:
    """One job's part of the shares; see ``PoolShare``."""

    def __init__(self, shares: SlotShares, job: str, remaining: Remaining) -> None:
        self._shares = shares
        self._job = job
        self._remaining = remaining

    def join(self, look: Callable[[], None]) -> None:
        self._shares.join(self._job, look, self._remaining)

    def leave(self) -> None:
        self._shares.leave(self._job)

    def ended(self) -> None:
        self._shares.ended(self._job)

    def granted(self, places: Sequence[SlotName], most: int | None) -> set[SlotName]:
        return self._shares.granted(self._job, places, most)

    def took(self, place: SlotName) -> None:
        self._shares.took(self._job, place)

    def left(self, place: SlotName) -> None:
        self._shares.left(self._job, place)
