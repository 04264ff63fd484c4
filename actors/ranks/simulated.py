"""Simulated ranks: they compute nothing, take the time of each call together, and know whether all were told the same.

    leader     spend(call, seconds, content) ─┬─▶ SimulatedOrder(n) ─▶ each follower: is it the next? ─ sleeps ─┐
                                              └─▶ sleeps                                                        │
               RankLost, if it is not its own ◀── digest of all orders so far ◀─────────────────────────────────┘

Invariants
- Orders of one life of a leader are numbered from 1. A follower that is given another than the next, or one of another
  life, ends by it.
- An answer says what the follower has been told since its start. Whoever was told otherwise than its leader is lost.
"""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec
import numpy as np
import xxhash

from actors.ranks.errors import RankLost
from actors.ranks.followers import Followers
from configs.limits import DEFAULT_LIMITS

Content = bytes | np.ndarray


class SimulatedOrder(msgspec.Struct, frozen=True):
    """Says what all ranks are to do next, and how long it takes."""

    life: str
    """Life of the leader, where lives have names."""
    number: int
    call: str
    seconds: float
    content: bytes
    """Digest of what the call is about."""


class _Told:
    """Keeps what one rank has been told, in order."""

    def __init__(self) -> None:
        self.number = 0
        self.life = ""
        self._digest = xxhash.xxh3_128()

    def add(self, order: SimulatedOrder, encoded: bytes) -> bytes:
        """One more order; returns the digest of all of them."""
        self.number, self.life = order.number, order.life
        self._digest.update(encoded)
        return self._digest.digest()


class SimulatedRanks:
    """All ranks of a leader, the leader included.

    Args:
        followers: the other ranks; None: there are none.
        timeout_s: the limit of one call.
        life: name of this life of the leader.
    """

    def __init__(
        self,
        followers: Followers | None = None,
        timeout_s: float = DEFAULT_LIMITS.train_step_timeout_s,
        *,
        life: str = "",
    ) -> None:
        self._followers, self._timeout_s, self._life = followers, timeout_s, life
        self._told = _Told()

    @property
    def count(self) -> int:
        return 1 + (0 if self._followers is None else self._followers.count)

    async def spend(self, call: str, seconds: float, *content: Content) -> None:
        """Let so many seconds pass for all ranks at once, in a call of that name.

        Raises:
            RankLost: one of them is gone, or was told otherwise than the leader.
        """
        if self._followers is None:
            await asyncio.sleep(seconds)
            return
        await asyncio.gather(self._ordered(self._followers, call, seconds, content), asyncio.sleep(seconds))

    async def tell(self, call: str, *content: Content) -> None:
        """Have the other ranks do what takes no time. Raises as ``spend`` does."""
        if self._followers is not None:
            await self._ordered(self._followers, call, 0.0, content)

    async def close(self) -> None:
        """Nothing more is called."""
        if self._followers is not None:
            await self._followers.close()

    async def _ordered(self, followers: Followers, call: str, seconds: float, content: tuple[Content, ...]) -> None:
        order = SimulatedOrder(self._life, self._told.number + 1, call, seconds, _digest(content))
        encoded = msgspec.msgpack.encode(order)
        expected = self._told.add(order, encoded)
        answers = await followers.call([encoded] * followers.count, timeout_s=self._timeout_s)
        for rank, answer in enumerate(answers, 1):
            if answer != expected:
                raise RankLost(f"rank {rank} was told otherwise than rank 0, up to order {order.number}")


class SimulatedFollower:
    """Implements ``Follower``."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._told = _Told()

    async def serve(self, order: bytes) -> bytes:
        """Raises:
        RankLost: it is not the next order of the life that this rank obeys.
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
        """It holds nothing."""


_decoder: Final = msgspec.msgpack.Decoder(SimulatedOrder)


def decoded_order(order: bytes) -> SimulatedOrder:
    """Raises msgspec.DecodeError when it is none; nobody but a leader of this kind sends any."""
    return _decoder.decode(order)


def _digest(content: tuple[Content, ...]) -> bytes:
    digest = xxhash.xxh3_128()
    for part in content:
        digest.update(np.ascontiguousarray(part).tobytes() if isinstance(part, np.ndarray) else part)
    return digest.digest()
