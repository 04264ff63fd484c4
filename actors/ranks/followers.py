"""A rank group has one leader and followers: what each of them is to the other.

    leader (rank 0)    awaits its own part and ``Followers.call`` together; a failure of either ends its life
    follower (rank r)  is built by its kind with (rank, size), obeys one order at a time, and decides nothing

Orders and answers are bytes that the leader and the followers of one kind agree on. The first order of a life says what
the group is for, and where its ranks meet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

FOLLOWERS = {
    "fsdp": "actors.trainer.backends.fsdp.follower:FsdpFollower",
    "vllm": "actors.rollout.engines.vllm.follower:VllmFollower",
    "simulated": "actors.ranks.simulated:SimulatedFollower",
}
"""Kind of follower → import path of what is built with (rank: int, size: int)."""


class Followers(Protocol):
    """The other ranks of a group, as its leader sees them."""

    @property
    def count(self) -> int: ...

    async def call(
        self, orders: Sequence[bytes], *, timeout_s: float, ends: Callable[[bytes], bool] | None = None
    ) -> list[bytes]:
        """One order for each follower, rank 1 first; what each answered, in that order. Raises RankLost.

        The first answer for which ``ends`` holds is returned at once and alone: others may be waiting for that rank.
        """
        ...

    async def close(self) -> None: ...


class Follower(Protocol):
    """What runs in a follower's process. Calls come one at a time."""

    async def serve(self, order: bytes) -> bytes: ...

    async def close(self) -> None: ...
