"""Simulated ranks: they compute nothing, sleep through each call together, and check that all got the same orders.

    leader     spend(call, seconds, content) ─┬─▶ SimulatedOrder(n) ─▶ each follower: is it the next? ─ sleeps ─┐
                                              └─▶ sleeps                                                        │
               RankLost, if it differs from the leader's ◀── digest of all orders so far ◀──────────────────────┘

Invariants
- Orders of one life of a leader are numbered from 1. A follower fails if it gets any other than the next one, or one of
  another life.
- An answer is a digest of all orders since the follower's start. If it differs from the leader's, the follower is lost.
"""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec
import numpy as np
import xxhash

from actors.ranks.errors import RankLost
from actors.ranks.followers import NOBODY, Followers
from configs.limits import DEFAULT_LIMITS

Content = bytes | np.ndarray


class SimulatedOrder(msgspec.Struct, frozen=True):
    """Tells all ranks the next call, and how long it takes."""

    life: str
    """Name of the leader's life; empty where lives have no names."""
    number: int
    call: str
    seconds: float
    content: bytes
    """Digest of the call's arguments."""
    share: tuple[str, bytes] | None = None
    """Path of a version's segment and its bytes, of which each machine keeps its share."""


class _Told:
    """Keeps a digest of the orders that one rank has got, in order."""

    def __init__(self) -> None:
        self.number = 0
        self.life = ""
        self._digest = xxhash.xxh3_128()

    def add(self, order: SimulatedOrder, encoded: bytes) -> bytes:
        """Add an order; returns the digest of all orders so far."""
        self.number, self.life = order.number, order.life
        self._digest.update(encoded)
        return self._digest.digest()


class SimulatedRanks:
    """Lets calls take their time on all ranks of a group, the leader included.

    Args:
        followers: the other ranks.
        timeout_s: the limit of one call.
        life: a name for this life of the leader.
    """

    def __init__(
        self,
        followers: Followers = NOBODY,
        timeout_s: float = DEFAULT_LIMITS.train_step_timeout_s,
        *,
        life: str = "",
    ) -> None:
        self.followers, self._timeout_s, self._life = followers, timeout_s, life
        self._told = _Told()

    @property
    def count(self) -> int:
        return 1 + self.followers.count

    async def spend(self, call: str, seconds: float, *content: Content) -> None:
        """Let ``seconds`` pass on all ranks at once, in a call named ``call``.

        Raises:
            RankLost: a rank is gone, or got other orders than the leader gave.
        """
        if not self.followers.count:
            await asyncio.sleep(seconds)
            return
        await asyncio.gather(self._ordered(call, seconds, content), asyncio.sleep(seconds))

    async def tell(self, call: str, *content: Content) -> None:
        """Give the other ranks a call that takes no time. Raises as ``spend`` does."""
        if self.followers.count:
            await self._ordered(call, 0.0, content)

    async def keep_shares(self, segment: str, data: bytes) -> None:
        """Have each other machine keep its share of ``data``, the version at ``segment``. Raises as ``spend`` does."""
        await self._ordered("keep_shares", 0.0, (), (segment, data))

    async def close(self) -> None:
        """No call comes after this one."""
        await self.followers.close()

    async def _ordered(
        self, call: str, seconds: float, content: tuple[Content, ...], share: tuple[str, bytes] | None = None
    ) -> None:
        order = SimulatedOrder(self._life, self._told.number + 1, call, seconds, _digest(content), share)
        encoded = msgspec.msgpack.encode(order)
        expected = self._told.add(order, encoded)
        answers = await self.followers.call([encoded] * self.followers.count, timeout_s=self._timeout_s)
        for rank, answer in enumerate(answers, 1):
            if answer != expected:
                raise RankLost(f"rank {rank} was told otherwise than rank 0, up to order {order.number}")


class SimulatedFollower:
    """Implements ``Follower``: checks each order, and sleeps as long as it says."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._told = _Told()

    async def serve(self, order: bytes) -> bytes:
        """Raises:
        RankLost: ``order`` is not the next one of the life that this rank obeys.
        """
        decoded, told = decoded_order(order), self._told
        if decoded.number != told.number + 1 or (told.number and decoded.life != told.life):
            raise RankLost(
                f"rank {self._rank} is given order {decoded.number} of life {decoded.life!r} after order {told.number} "
                f"of life {told.life!r}"
            )
        answer = told.add(decoded, order)
        await asyncio.sleep(decoded.seconds)
        return answer

    async def close(self) -> None:
        """There is nothing to release."""


_decoder: Final = msgspec.msgpack.Decoder(SimulatedOrder)


def decoded_order(order: bytes) -> SimulatedOrder:
    """Raises msgspec.DecodeError if ``order`` is not a SimulatedOrder; only simulated leaders send orders here."""
    return _decoder.decode(order)


def _digest(content: tuple[Content, ...]) -> bytes:
    digest = xxhash.xxh3_128()
    for part in content:
        digest.update(np.ascontiguousarray(part).tobytes() if isinstance(part, np.ndarray) else part)
    return digest.digest()
