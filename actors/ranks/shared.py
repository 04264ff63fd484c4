"""One rank group for the bundles of several jobs: a follower for each bundle in every process, told apart by a number.

    bundle 1 ─ BundleFollowers ─┐                             ┌─▶ Follower of bundle 1
                                ├─ SharedGroup ─ Followers ─▶ │   SharedFollower, one process
    bundle 2 ─ BundleFollowers ─┘  (one order at a time)      └─▶ Follower of bundle 2

order    = what (serve, end), number of the bundle, the order itself; an end for no bundle is a roll call

Invariants
- The group has one order under way, in all of its processes, whichever bundle gave it; the next one waits.
- A call that one rank has ended by its failure is answered at once, and is under way until the others have answered.
- A group that has lost a rank stays lost: every later call raises the same.
- Ranks are in agreement if all of them have answered: nobody then waits for another in an exchange. Else they never
  will be again, and the group, with all of its bundles, starts anew.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Sequence
from typing import Final

from actors.core.context import Context
from actors.core.watch import Down
from actors.ranks.errors import RankLost
from actors.ranks.followers import NOBODY, Follower, Followers

_HEAD: Final = struct.Struct("<BQ")
_SERVE, _END = 0, 1
_NO_BUNDLE: Final = 0


class SharedGroup:
    """The leader's side. ``followers``: the processes, which run a ``SharedFollower`` each."""

    def __init__(self, followers: Followers, *, settle_s: float) -> None:
        """``settle_s``: how long after a failed call all ranks must have answered."""
        self._followers, self._settle_s = followers, settle_s
        self._turn = asyncio.Lock()
        self._under_way: asyncio.Task[list[bytes]] | None = None
        self._bundles = _NO_BUNDLE
        self._closed = False

    def bundle(self) -> Followers:
        """The followers of one more bundle."""
        if not self._followers.count:
            return NOBODY
        self._bundles += 1
        return BundleFollowers(self, self._bundles)

    @property
    def count(self) -> int:
        return self._followers.count

    async def roll_call(self, timeout_s: float | None = None) -> None:
        """Return when every rank has answered all that it was ordered.

        Raises:
            RankLost: one of them has not, ``settle_s`` after this call, or has not answered this within ``timeout_s``,
                which is the same if it is not given.
        """
        await self.end(_NO_BUNDLE, timeout_s)

    async def end(self, bundle: int, timeout_s: float | None = None) -> None:
        """Have all ranks close their followers of that bundle. Raises RankLost as ``roll_call`` does."""
        if self.count and not self._closed:
            await self.call([_HEAD.pack(_END, bundle)] * self.count, timeout_s=timeout_s or self._settle_s)

    async def call(
        self, orders: Sequence[bytes], *, timeout_s: float, ends: Callable[[bytes], bool] | None = None
    ) -> list[bytes]:
        """See ``Followers.call``; waits for the call before this one."""
        async with self._turn:
            await self._settled()
            told: asyncio.Future[list[bytes]] = asyncio.get_running_loop().create_future()

            def heard(answer: bytes) -> bool:
                if ends is not None and not told.done() and ends(answer):
                    told.set_result([answer])
                return False

            def over(task: asyncio.Task[list[bytes]]) -> None:
                if told.done():
                    return
                if task.cancelled():
                    told.set_exception(RankLost("the group was closed before all ranks had answered"))
                elif (error := task.exception()) is not None:
                    told.set_exception(error)
                else:
                    told.set_result(task.result())

            asked = self._followers.call(orders, timeout_s=timeout_s, ends=heard)
            self._under_way = asyncio.create_task(asked, name="orders")  # it goes on if whoever asks is cancelled
            self._under_way.add_done_callback(over)
            return await told

    def close(self) -> None:
        """Wait for no answer any more, and give no orders that end something: the processes are about to end.

        A call under way raises RankLost.
        """
        self._closed = True
        if self._under_way is not None:
            self._under_way.cancel()

    async def _settled(self) -> None:
        """Wait for the call before, whose answers perhaps nobody waits for any more; raises as it did."""
        if self._under_way is None:
            return
        try:
            async with asyncio.timeout(self._settle_s):
                await asyncio.shield(self._under_way)
        except TimeoutError as error:
            text = f"a rank has not answered within {self._settle_s:g} s, after a call that has failed"
            raise RankLost(text) from error


class BundleFollowers:
    """Implements ``Followers`` for one bundle. ``close`` ends its followers, and no other bundle's."""

    def __init__(self, group: SharedGroup, number: int) -> None:
        self._group, self._number = group, number
        self._closed = False

    @property
    def count(self) -> int:
        return self._group.count

    def connect(self, ctx: Context) -> None:
        """The group's owner has connected it."""

    def heard(self, message: Down) -> None:
        """The group's owner hears of its ends."""

    async def call(
        self, orders: Sequence[bytes], *, timeout_s: float, ends: Callable[[bytes], bool] | None = None
    ) -> list[bytes]:
        head = _HEAD.pack(_SERVE, self._number)
        return await self._group.call([head + order for order in orders], timeout_s=timeout_s, ends=ends)

    async def close(self) -> None:
        """Raises RankLost."""
        if not self._closed:
            self._closed = True
            await self._group.end(self._number)


class SharedFollower:
    """Implements ``Follower`` for all bundles. ``make``: makes the follower of one."""

    def __init__(self, make: Callable[[], Follower]) -> None:
        self._make = make
        self._of: dict[int, Follower] = {}

    async def serve(self, order: bytes) -> bytes:
        what, bundle = _HEAD.unpack_from(order)
        if what == _END:
            if (ended := self._of.pop(bundle, None)) is not None:
                await ended.close()
            return b""
        if bundle not in self._of:
            self._of[bundle] = self._make()
        return await self._of[bundle].serve(order[_HEAD.size :])

    async def close(self) -> None:
        while self._of:
            await self._of.popitem()[1].close()
