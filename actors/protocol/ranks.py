"""What the leader of a rank group and its followers say to each other.

follower ──RegisterService(its name)──▶ scheduler ◀──LookupService── leader
leader ──FollowLeader──▶ follower: it obeys this life of that leader from now on, and registers no more
leader ──RankOrder(1)──▶ follower ──RankDone──▶ leader      then 2, 3, …; nothing of it passes through the scheduler

Always true
- Orders of one life of a leader are numbered from 1 without a gap, one at a time. An order that repeats the last number
  gets the same answer again, or joins the order that is still under way: nothing is done twice.
- A follower has one leader in its life. When that leader is gone, the follower does nothing more.
"""

from __future__ import annotations

import numpy as np

from actors.core.message import Message, message


@message("ranks.follow")
class FollowLeader(Message):
    """The leader has come. Idempotent. Reply: core's Done; another life of a leader is refused."""

    job: str


@message("ranks.order")
class RankOrder(Message):
    """The leader orders the follower to do something. Reply: RankDone; an error in it ends the follower."""

    number: int
    order: np.ndarray
    """Bytes (uint8) in a format on which leaders and followers of one kind agree."""


@message("ranks.done")
class RankDone(Message):
    number: int
    result: np.ndarray
    """Bytes (uint8), as those of the order."""
