"""The actor of a process that follows: it registers, obeys its leader's orders one by one, and ends with its group.

    start ─▶ RegisterService (a job's) ─▶ FollowLeader ─▶ RankOrder 1, 2, … ─▶ Follower.serve ─▶ RankDone
              └─ none within ``rank_leader_s`` ─▶ LeaderLost          └─ it raises: this process ends with that error
    Down of the leader ─▶ ``rank_orphan_s`` later ─▶ LeaderLost, unless its supervisor has ended it before

Invariants
- The actor decides nothing. One order runs at a time, each number once (``actors/protocol/ranks.py``).
- Its leader is the one process that its own name implies, and only one life of it (``actors/core/senders.py::leads``).
- It lets its leader end first: the leader reports why the group ends.
- Once it follows a leader, it needs no scheduler.

    loop           waits for               unblocked by
    its leader     FollowLeader            the leader, or the limit
    an order       Follower.serve          its end; the leader's time limit ends the group
"""

from __future__ import annotations

import asyncio
import importlib
from typing import Any

import numpy as np

from actors.core.actor import Actor, concurrent, handles
from actors.core.registered import RegisteredActor
from actors.core.senders import leads
from actors.core.watch import Down
from actors.protocol.failures import Acknowledged
from actors.protocol.ranks import FollowLeader, RankDone, RankOrder
from actors.protocol.services import RegisterService
from actors.ranks.errors import LeaderLost, NotItsTurn
from actors.ranks.followers import FOLLOWERS, Follower
from actors.roles import AnyArgs, RoleArgs
from transport.address import ActorAddress


class Rank(RegisteredActor):
    """Hosts one follower and gives it the leader's orders."""

    def __init__(self, args: AnyArgs, follower: Follower) -> None:
        self._args, self._follower = args, follower
        self._leader: ActorAddress | None = None
        self._met = asyncio.Event()
        self._number = 0
        self._done: asyncio.Future[np.ndarray] | None = None
        """Answer to order ``_number``; None before the first one."""
        self._askers = 0
        """Number of handlers that wait for that answer."""
        self._leaving: asyncio.Task[Any] | None = None

    async def on_start(self) -> None:
        args = self._args
        if isinstance(args, RoleArgs):  # else its leader, a training service, is told of it when it is started
            offer = RegisterService(job=args.name_of_job, role=args.name, address=self.ctx.self_address)
            await self.keep_registered(args.scheduler, offer, Acknowledged)
        self.ctx.start_task(self._wait_for_leader(), "wait for the leader")

    async def on_stop(self) -> None:
        await self._follower.close()

    async def _wait_for_leader(self) -> None:
        limit_s = self.ctx.limits.rank_leader_s
        try:
            async with asyncio.timeout(limit_s):
                await self._met.wait()
        except TimeoutError as error:
            raise LeaderLost(f"{self._args.leader} has not come to {self._args.name} within {limit_s:g} s") from error

    # ------------------------------------------------------------ the leader

    @handles(FollowLeader)
    async def follow(self, message: FollowLeader) -> None:
        """Raises:
        NotItsTurn: the sender is not the leader's process, or is another life of it.
        """
        sender = self.ctx.sender
        own = self.ctx.self_address
        leader = leads(own.peer.name)
        if sender is None or sender.peer.name != leader or message.job != self._args.name_of_job:
            raise NotItsTurn(f"{sender} wants to lead {own}, which follows {leader} of its own job")
        if self._leader is not None and self._leader.peer != sender.peer:
            raise NotItsTurn(f"{sender} wants to lead {own}, which follows {self._leader}")
        self._hear(sender)

    def _hear(self, leader: ActorAddress) -> None:
        """The leader lives: watch it, also if the link to it was lost before."""
        if self._leader is None or self._leaving is not None:
            if self._leaving is not None:
                self._leaving.cancel()
                self._leaving = None
            self._leader = leader
            self.ctx.watch(leader)
            self._met.set()

    def scheduler_lost(self, message: Down) -> None:
        if self._leader is None:
            self.register_again()

    @handles(Down)
    async def down(self, message: Down) -> None:
        leader = self._leader
        if leader is not None and (message.address.name, message.address.peer) == (leader.name, leader.peer):
            self._leaving = self.ctx.start_task(self._leave(message), "leave")
        await super().down(message)

    async def _leave(self, message: Down) -> None:
        await self.ctx.sleep(self.ctx.limits.rank_orphan_s)
        raise LeaderLost(f"{self._args.leader} is gone ({message.reason}: {message.detail}), and nobody ends its ranks")

    # ------------------------------------------------------------ orders

    @handles(RankOrder)
    @concurrent
    async def order(self, message: RankOrder) -> RankDone:
        """Raises:
        NotItsTurn: the message is neither the leader's next order nor the last one repeated.
        """
        sender = self.ctx.sender
        if self._leader is None or sender is None or sender.peer != self._leader.peer:
            raise NotItsTurn(f"{sender} gives orders to {self.ctx.self_address}, which follows {self._leader}")
        self._hear(sender)
        under_way = self._done is not None and not self._done.done()
        if message.number == self._number + 1 and not under_way:
            self._number += 1
            self._done = asyncio.get_running_loop().create_future()
            self.ctx.start_task(self._serve(message.order.tobytes(), self._done), f"order {message.number}")
        elif message.number != self._number or self._done is None:
            said = "is still at it" if under_way else "is done"
            raise NotItsTurn(f"{self._args.name} is given order {message.number}; {self._number} {said}")
        self._askers += 1
        try:
            return RankDone(number=message.number, result=await asyncio.shield(self._done))
        finally:
            self._askers -= 1

    async def _serve(self, order: bytes, done: asyncio.Future[np.ndarray]) -> None:
        """An error ends this actor: through a handler that waits, so that the leader gets the error, else at once."""
        try:
            result = await self._follower.serve(order)
        except Exception as error:
            if not self._askers:
                raise
            done.set_exception(error)
        else:
            done.set_result(np.frombuffer(result, np.uint8))


def follower_of(kind: str, rank: int, size: int) -> Follower:
    """Build a follower of ``kind``; imports the code of that kind alone."""
    module, _, name = FOLLOWERS[kind].partition(":")
    return getattr(importlib.import_module(module), name)(rank, size)


def build(args: AnyArgs) -> dict[str, Actor]:
    return {args.name: Rank(args, follower_of(args.kind, args.rank, args.size))}
