"""The ranks that a training service computes with: itself, and the followers that it leads for all of its jobs.

    start ─▶ meets its followers ─▶ a backend for each bundle, over the same processes (``actors/ranks/shared.py``)
    a call fails ─▶ roll call ─┬─ all ranks have answered ─▶ the error is that job's
                               └─ one has not ─▶ RankLost: the service starts again, with its ranks, for all jobs

Invariant
- After a failed call no other job computes before it is known that no rank waits for another. Whose error it was is not
  asked: ranks that have all answered are in agreement, whatever they answered.
"""

from __future__ import annotations

from actors.core.context import Context
from actors.core.watch import Down
from actors.ranks.errors import RankLost
from actors.ranks.followers import NOBODY, Followers
from actors.ranks.shared import SharedGroup
from actors.trainer.backend import LedRanks, LocalBackend, TrainBackend
from actors.trainer.setup import make_backend


class ServiceRanks:
    """Leads the ranks of one life of a service. ``followers``: the others; nobody if it computes alone."""

    def __init__(self, followers: Followers = NOBODY) -> None:
        self._followers = followers
        self._group: SharedGroup
        self._ctx: Context
        self.are_lost = False
        """Whether this life ends for a lost rank."""

    async def open(self, ctx: Context) -> None:
        """Meet the followers. Raises RankLost."""
        self._ctx = ctx
        self._followers.connect(ctx)
        self._group = SharedGroup(self._followers, settle_s=ctx.limits.rank_settle_s)
        await self._group.roll_call(ctx.limits.ready_timeout_s)

    def make(self, kind: str) -> TrainBackend:
        """A backend of that kind for one more bundle."""
        return make_backend(kind, LedRanks(followers=self._group.bundle(), limits=self._ctx.limits))

    def heard(self, message: Down) -> None:
        """Raises RankLost, at once or in a task of the ctx, if ``message`` means that a follower is gone."""
        try:
            self._followers.heard(message)
        except RankLost:
            self.are_lost = True
            raise

    async def agree(self, backend: TrainBackend) -> None:
        """Find out, after a call of ``backend`` that has failed, that every rank can go on.

        Raises:
            RankLost: one cannot.
        """
        try:
            if self._group.count and isinstance(backend, LocalBackend):
                await backend.settled()
                await self._group.roll_call()
        except RankLost:
            self.are_lost = True
            raise

    async def close(self) -> None:
        """From now on a lost follower is no error: its supervisor ends the ranks together."""
        self._group.close()
        await self._followers.close()
