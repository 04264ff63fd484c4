"""Whose worker is on which slot of the nodes that come and go, when several jobs want them.

    job's pool ── join ──▶ shares ◀── every ``lending_look_s``, with two jobs or more: what each has left to do
                             │ ``policies.lending``: the slots that pass to another job
                             ▼
    lender's pool: its worker hands back its samples and leaves ── left ──▶ shares ──▶ borrower's pool: starts one there

Invariants
- A slot has one worker: the next job's is started when the former one's has left.
- A job that is alone has all slots at once, as if there were no shares.
- What a job has left to do is asked of its scheduler; one that does not answer is taken as it was.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf

import structlog

from actors.core.errors import AskError
from actors.policies.lending import Borrower, LendingRules, LendingView, LentWorker, decide
from configs.limits import Limits

log = structlog.get_logger("headrace.shares")

Place = str
"""Name that a worker on this slot has in every job, ``rollout-<node>.<slot>``."""
Remaining = Callable[[], Awaitable[float]]
"""Asks how many samples of a job are not generated yet. Raises AskError."""


@dataclass
class _Sharer:
    """This job wants slots."""

    look: Callable[[], None]
    remaining: Remaining
    samples_left: float = 1.0
    """Samples as it has said last; before it has said anything, it wants some."""
    rests_since_s: float | None = None
    """Time since which it has had nothing to generate."""
    rest_s: float = inf
    """How long it rests between two steps, as seen so far."""
    places: set[Place] = field(default_factory=set[Place])
    """Places that it can use; it may have given up on some."""
    most: int | None = None
    """Workers that it wants at most; None: any number."""
    holds: set[Place] = field(default_factory=set[Place])
    """Places where its workers are, or have not left yet."""

    def said(self, samples_left: float, now_s: float) -> None:
        """What it has left now. The end of a rest says how long the next one may be."""
        if samples_left > 0 and self.rests_since_s is not None:
            rest_s = now_s - self.rests_since_s
            self.rest_s = rest_s if self.rest_s == inf else (self.rest_s + rest_s) / 2
            self.rests_since_s = None
        elif samples_left <= 0 and self.rests_since_s is None:
            self.rests_since_s = now_s
        self.samples_left = samples_left

    def wants(self, job: str, now_s: float) -> Borrower:
        """What it asks of the division."""
        if self.most == 0:
            return Borrower(job, 0.0)
        return Borrower(job, self.samples_left, self.resumes_in_s(now_s), workers_max=self.most)

    def resumes_in_s(self, now_s: float) -> float:
        """Time until it generates again, as expected; after twice its usual rest, nobody knows."""
        if self.rests_since_s is None:
            return inf
        rested_s = now_s - self.rests_since_s
        return max(0.0, self.rest_s - rested_s) if rested_s <= 2 * self.rest_s else inf


class SlotShares:
    """The shares belong to a head; ``of`` gives a job its own. ``stop`` them before the head ends."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._sharers: dict[str, _Sharer] = {}
        self._rules = LendingRules(stay_s=limits.lending_stay_s)
        self._slots: dict[Place, LentWorker] = {}
        """Slots, each with the job that is to have it."""
        self._ending: dict[str, set[Place]] = {}
        """Places by job that wants none any more, whose workers there have not ended yet."""
        self._looking: asyncio.Task[None] | None = None

    def of(self, job: str, remaining: Remaining) -> JobShare:
        """What a job's pool is given."""
        return JobShare(self, job, remaining)

    def stop(self) -> None:
        """Divide nothing more."""
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None

    # ------------------------------------------------------------ what pools say

    def join(self, job: str, look: Callable[[], None], remaining: Remaining) -> None:
        """A pool wants slots."""
        self._sharers[job] = _Sharer(look, remaining)
        self._divide()
        if len(self._sharers) > 1 and self._looking is None:
            self._looking = asyncio.create_task(self._look_again_and_again(), name="slot shares")

    def leave(self, job: str) -> None:
        """A pool wants none any more; its workers end with its job, and until then their slots are nobody else's."""
        if (sharer := self._sharers.pop(job, None)) is not None:
            self._ending[job] = sharer.holds
        if len(self._sharers) < 2:
            self.stop()
        self._divide()

    def ended(self, job: str) -> None:
        """The workers of a pool that has left are gone."""
        if self._ending.pop(job, None):
            self._tell()

    def granted(self, job: str, places: Sequence[Place], most: int | None) -> set[Place]:
        """Those of ``places``, which are all that it can use, on which ``job`` may have a worker now."""
        if (own := self._sharers.get(job)) is None:
            return set()
        if (own.places, own.most) != (set(places), most):
            own.places, own.most = set(places), most
            self._divide()
        taken = [sharer.holds for name, sharer in self._sharers.items() if name != job]
        free = own.places.difference(*taken, *self._ending.values())
        return {place for place in free if self._slots[place].job == job}

    def took(self, job: str, place: Place) -> None:
        """``job`` has begun to start a worker there."""
        if (sharer := self._sharers.get(job)) is not None:
            sharer.holds.add(place)

    def left(self, job: str, place: Place) -> None:
        """Its worker there is gone."""
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
        """Say anew who is to have which slot."""
        now_s = asyncio.get_running_loop().time()
        able = {job: sharer for job, sharer in self._sharers.items() if sharer.places}
        if len(able) > 1:
            jobs = [sharer.wants(job, now_s) for job, sharer in able.items()]
        else:  # who is alone has all of them, and says itself how many it uses
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

    def _slot(self, place: Place) -> LentWorker:
        """As it was, but not with a job that cannot use it any more."""
        suits = {job for job, sharer in self._sharers.items() if place in sharer.places}
        slot = self._slots.get(place) or LentWorker(place, None)
        return replace(slot, job=slot.job if slot.job in suits else None, suits=suits)

    def _tell(self) -> None:
        """Pools look for themselves what has become of their places, in a turn of their own."""
        for sharer in self._sharers.values():
            asyncio.get_running_loop().call_soon(sharer.look)


class JobShare:
    """This is one job's part of the shares; see ``PoolShare``."""

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

    def granted(self, places: Sequence[Place], most: int | None) -> set[Place]:
        return self._shares.granted(self._job, places, most)

    def took(self, place: Place) -> None:
        self._shares.took(self._job, place)

    def left(self, place: Place) -> None:
        self._shares.left(self._job, place)
