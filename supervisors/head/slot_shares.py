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
from dataclasses import dataclass, field

import structlog

from actors.core.errors import AskError
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
    samples_left: float = 0.0
    holds: set[Place] = field(default_factory=set[Place])


class SlotShares:
    """The shares belong to a head; ``of`` gives a job its own. ``stop`` them before the head ends."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._sharers: dict[str, _Sharer] = {}
        self._owners: dict[Place, str] = {}
        """Job that is to have a slot, by slot."""
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
        """A pool wants none any more; its workers end with its job."""
        self._sharers.pop(job, None)
        if len(self._sharers) < 2:
            self.stop()
        self._divide()

    def granted(self, job: str, places: Sequence[Place]) -> set[Place]:
        """Those of ``places``, which are all that there are, on which ``job`` may have a worker now."""
        if set(places) != set(self._owners):
            self._owners = {place: self._owners.get(place, "") for place in places}
            self._divide()
        taken = {place for name, sharer in self._sharers.items() if name != job for place in sharer.holds}
        return {place for place in places if self._owners[place] == job and place not in taken}

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
                    sharer.samples_left = await sharer.remaining()
                except AskError as error:
                    log.info("a job does not say what it has left to do", job=job, error=str(error))
            self._divide()

    def _divide(self) -> None:
        """Say anew who is to have which slot."""
        before, self._owners = self._owners, self._decide()
        if self._owners != before:
            self._tell()

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

    def granted(self, places: Sequence[Place]) -> set[Place]:
        return self._shares.granted(self._job, places)

    def took(self, place: Place) -> None:
        self._shares.took(self._job, place)

    def left(self, place: Place) -> None:
        self._shares.left(self._job, place)
