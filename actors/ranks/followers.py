"""The interfaces between the leader of a rank group and its followers.

    leader (rank 0)    awaits its own part and ``Followers.call`` together; a failure of either ends its process
    follower (rank r)  is built by its kind with (rank, size), obeys one order at a time, and decides nothing

Orders and answers are bytes whose meaning the leader and the followers of one kind agree on. The first order after a
start says what the group is for, and where its ranks meet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from actors.core.context import Context
from actors.core.watch import Down

FOLLOWERS = {
    "fsdp": "actors.trainer.backends.fsdp.follower:FsdpFollower",
    "shared-fsdp": "actors.trainer.backends.fsdp.follower:shared",
    "vllm": "actors.rollout.engines.vllm.follower:VllmFollower",
    "simulated": "actors.ranks.simulated:SimulatedFollower",
}
"""Kind of follower → import path of what makes one from (rank: int, size: int)."""
SHARED: Final = "shared-"
"""Before the kind of a backend: the followers of a training service, which hold bundles of several jobs."""


class Followers(Protocol):
    """The other ranks of a group, as its leader sees them."""

    @property
    def count(self) -> int: ...

    def connect(self, ctx: Context) -> None:
        """Reach the followers through ``ctx``, whose actor passes every Down to ``heard``; before the first call."""
        ...

    def heard(self, message: Down) -> None:
        """Raises RankLost, at once or in a task of the ctx, if ``message`` means that a follower is gone."""
        ...

    async def call(
        self, orders: Sequence[bytes], *, timeout_s: float, ends: Callable[[bytes], bool] | None = None
    ) -> list[bytes]:
        """Give each follower its order, rank 1 first; returns their answers in that order. Raises RankLost.

        The first answer for which ``ends`` holds is returned at once and alone: the other ranks may wait for that one.
        """
        ...

    async def close(self) -> None: ...


class NoFollowers:
    """Implements ``Followers`` for a rank that computes alone."""

    count = 0

    def connect(self, ctx: Context) -> None:
        """There is nobody to reach."""

    def heard(self, message: Down) -> None:
        """There is nobody to lose."""

    async def call(
        self, orders: Sequence[bytes], *, timeout_s: float, ends: Callable[[bytes], bool] | None = None
    ) -> list[bytes]:
        return []

    async def close(self) -> None:
        """There is nobody to close."""


NOBODY: Final = NoFollowers()


class Follower(Protocol):
    """Computes in a follower's process. Calls come one at a time."""

    async def serve(self, order: bytes) -> bytes: ...

    async def close(self) -> None: ...
