"""Whose worker is on which slot of the nodes that come and go, when several jobs want them.

    job's pool ── join ──▶ shares ◀── every ``lending_look_s``, with two jobs or more: what each has left to do
                             │ ``policies.lending``: the slots that pass to another job
                             ▼
    lender's pool: its worker hands back its samples and leaves ── left ──▶ shares ──▶ borrower's pool: starts one there

Invariants
- A slot has one worker: the next job's starts when the former one's has left.
- One job has all slots, at once, as if there were no shares.
- What a job has left to do is asked of its scheduler; one that does not answer is taken as it was.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from configs.limits import Limits

Place = str
"""Name that a worker on this slot has in every job, ``rollout-<node>.<slot>``."""


@dataclass
class _Sharer:
    """A job that wants slots."""

    look: Callable[[], None]
    remaining: Callable[[], Awaitable[float]]
    left_tokens: float = 0.0
    holds: set[Place] = field(default_factory=set[Place])


class SlotShares:
    """The shares belong to the head; each job's pool joins them for as long as it starts workers."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._sharers: dict[str, _Sharer] = {}
        self._places: dict[Place, str] = {}
        """Job by the slot that it is to have; slots that nobody has been given yet are not in it."""
        self._looking: asyncio.Task[None] | None = None

    # ------------------------------------------------------------ pools

    def join(self, job: str, look: Callable[[], None], remaining: Callable[[], Awaitable[float]]) -> None:
        """A pool wants slots. ``look`` tells it that it may have others now; ``remaining``: tokens left in its step."""
        self._sharers[job] = _Sharer(look, remaining)
        self._divide()
        if len(self._sharers) > 1 and self._looking is None:
            self._looking = asyncio.create_task(self._look_again_and_again(), name="slot shares")

    def leave(self, job: str) -> None:
        """A job's pool starts nothing more; its slots are for others once its workers have left."""
        self._sharers.pop(job, None)
        self._places = {place: owner for place, owner in self._places.items() if owner != job}
        if len(self._sharers) < 2 and self._looking is not None:
            self._looking.cancel()
            self._looking = None
        self._divide()

    def granted(self, job: str, places: Iterable[Place]) -> set[Place]:
        """Those of ``places`` on which ``job`` may have a worker now."""
        places = list(places)
        if set(self._places) != set(places):
            self._places = {place: owner for place, owner in self._places.items() if place in set(places)}
            self._give_away([place for place in places if place not in self._places])
        held_by_others = {place for name, sharer in self._sharers.items() if name != job for place in sharer.holds}
        return {place for place in places if self._places.get(place) == job and place not in held_by_others}

    def took(self, job: str, place: Place) -> None:
        """``job`` has begun to start a worker there."""
        if (sharer := self._sharers.get(job)) is not None:
            sharer.holds.add(place)

    def left(self, job: str, place: Place) -> None:
        """Its worker there is gone."""
        if (sharer := self._sharers.get(job)) is not None:
            sharer.holds.discard(place)
        for name, other in self._sharers.items():
            if name != job:
                other.look()
