"""A leader's followers in processes of their own: looked up once, then given their orders directly.

    first call ─▶ LookupService(name of each) ─▶ scheduler, patiently ─▶ FollowLeader ─▶ it obeys us
                  (a training service was told their addresses when it was started)
    call ─▶ RankOrder(n) to all at once ─▶ RankDone of all         the link breaks: the same number again, for a while
    Down of a follower ─▶ RankLost

Invariants
- A follower that has been met and is lost is never looked up again: all ranks of a group start and end together.
- Every failure is RankLost. It is permanent if the follower has ended with a permanent error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from actors.core.context import Context
from actors.core.errors import AskError, NotSent, RemoteError, SentNoReply, Unanswerable
from actors.core.leader import Leader
from actors.core.message import Done
from actors.core.patience import RETRYABLE, Patience, ask_patiently, is_still_there
from actors.core.watch import Down, Gone
from actors.protocol.ranks import FollowLeader, RankDone, RankOrder
from actors.protocol.services import LookupService, ServiceFound
from actors.ranks.errors import NotItsTurn, RankLost
from actors.roles import RoleArgs, ServiceArgs
from configs.names import rank_name
from transport.address import ActorAddress

R = TypeVar("R")


class _Ending(Exception):
    """An answer has come that ends its call."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer


class GroupFollowers:
    """Implements ``Followers`` for processes of their own."""

    def __init__(self, args: RoleArgs | ServiceArgs) -> None:
        """``args``: the arguments of the leader's process."""
        self._job = args.name_of_job
        self._lookup: _Lookup = _Given(args) if isinstance(args, ServiceArgs) else _AtScheduler(args)
        self._names = [rank_name(args.name, rank) for rank in range(1, args.size)]
        self._ctx: Context | None = None
        self._met: list[ActorAddress] = []
        self._number = 0
        self._closed = False

    def connect(self, ctx: Context) -> None:
        self._ctx = ctx

    @property
    def count(self) -> int:
        return len(self._names)

    async def call(
        self, orders: Sequence[bytes], *, timeout_s: float, ends: Callable[[bytes], bool] | None = None
    ) -> list[bytes]:
        """Give each follower its order, rank 1 first; returns their answers in that order, or the one that ``ends`` it.

        Raises:
            RankLost: a follower is not there, has failed, or has not answered within ``timeout_s``.
        """
        assert len(orders) == self.count, f"{len(orders)} orders for {self.count} followers"
        if not self._met:
            self._met = await self._of_all([self._meet(name) for name in self._names])
        self._number += 1
        number = self._number
        asked = [self._order(rank, number, order, timeout_s, ends) for rank, order in enumerate(orders)]
        try:
            return await self._of_all(asked)
        except _Ending as ending:
            return [ending.answer]

    async def close(self) -> None:
        """From now on a lost follower is no error. The supervisor ends the followers with their group."""
        self._closed = True

    def heard(self, message: Down) -> None:
        """Raises:
        RankLost: a follower is gone, and not merely a link to it.
        """
        for name, address in zip(self._names, self._met, strict=False):
            if not self._closed and message.address == address and self._ctx is not None:
                if message.reason is not Gone.UNREACHABLE:
                    raise self._lost(name, message.detail or message.reason, permanent=message.permanent)
                self._ctx.start_task(self._see_to_it(self._ctx, name, address, message), f"see whether {name} is there")

    async def _see_to_it(self, ctx: Context, name: str, address: ActorAddress, message: Down) -> None:
        if await is_still_there(ctx, address, ctx.limits.rank_patience_s):
            ctx.watch(address)
        elif not self._closed:
            raise self._lost(name, message.detail or message.reason)

    # ------------------------------------------------------------ asking

    @property
    def _context(self) -> Context:
        assert self._ctx is not None, "connect comes before the first call"
        return self._ctx

    async def _meet(self, name: str) -> ActorAddress:
        """Find a follower that is starting too; a former life's follower may still be registered under its name."""
        ctx, limits = self._context, self._context.limits
        patience = Patience(limits, ctx.rng("patience"), limits.ready_timeout_s)
        failure = "it has not registered"
        while True:
            try:
                found = await self._lookup.find(ctx, name, patience.left_s)
                if found is not None:
                    await ctx.ref(found).ask(FollowLeader(job=self._job), Done)
                    ctx.watch(found)
                    return found
            except RETRYABLE as error:
                failure = str(error)
            except AskError as error:
                if not _is_of_a_former_life(error):
                    raise self._lost(name, error) from error
                failure = str(error)
            if not await patience.again():
                raise self._lost(name, failure)

    async def _order(
        self, index: int, number: int, order: bytes, timeout_s: float, ends: Callable[[bytes], bool] | None
    ) -> bytes:
        ctx, name, address = self._context, self._names[index], self._met[index]
        question = RankOrder(number=number, order=np.frombuffer(order, np.uint8))
        while True:
            try:
                done = await ctx.ref(address).ask(question, RankDone, timeout_s)
                answer = done.result.tobytes()
                if ends is not None and ends(answer):
                    raise _Ending(answer)
                return answer
            except (NotSent, SentNoReply) as error:
                if not await is_still_there(ctx, address, ctx.limits.rank_patience_s):
                    raise self._lost(name, error) from error
                ctx.log.info("an order is repeated", rank=name, number=number, after=str(error))
            except AskError as error:
                raise self._lost(name, error) from error

    async def _of_all(self, asked: Sequence[Coroutine[Any, Any, R]]) -> list[R]:
        """Await all of ``asked``; returns the results in order. The first failure cancels the rest, and is raised."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one) for one in asked]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from failures.exceptions[0].__cause__
        return [task.result() for task in tasks]

    def _lost(self, name: str, why: object, *, permanent: bool = False) -> RankLost:
        lost = RankLost(f"{name} is lost: {why}")
        if permanent:
            lost.__cause__ = Unanswerable("", str(why), declared=False)
        return lost


class _Lookup(Protocol):
    """Where a leader finds its followers."""

    async def find(self, ctx: Context, name: str, patience_s: float) -> ActorAddress | None:
        """The address of the follower ``name``; None: it has not registered yet. Raises AskError."""
        ...


class _AtScheduler:
    """Implements ``_Lookup`` for a job's process: its followers register with the scheduler."""

    def __init__(self, args: RoleArgs) -> None:
        self._job, self._address = args.name_of_job, args.scheduler
        self._scheduler: Leader | None = None

    async def find(self, ctx: Context, name: str, patience_s: float) -> ActorAddress | None:
        scheduler = self._scheduler = self._scheduler or Leader(ctx, self._address)
        found = await ask_patiently(
            ctx, lambda: scheduler.address, LookupService(job=self._job, role=name), ServiceFound,
            renew=scheduler.find, patience_s=patience_s,
        )  # fmt: skip
        return found.address


class _Given:
    """Implements ``_Lookup`` for a training service, which no job's scheduler knows: its supervisor knows the ranks."""

    def __init__(self, args: ServiceArgs) -> None:
        self._followers = {address.name: address for address in args.followers}

    async def find(self, ctx: Context, name: str, patience_s: float) -> ActorAddress | None:
        return self._followers.get(name)


def _is_of_a_former_life(error: AskError) -> bool:
    """Whether a follower obeys a former life of its leader. Such a one ends soon, and its successor registers."""
    return isinstance(error, RemoteError) and isinstance(error.raised, NotItsTurn)
