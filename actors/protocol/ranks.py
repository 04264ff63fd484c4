"""What the leader of a rank group and its followers say to each other.

follower ──RegisterService(its name)──▶ scheduler ◀──LookupService── leader
leader ──FollowLeader──▶ follower: it obeys this life of that leader from now on, and registers no more
leader ──RankOrder(1)──▶ follower ──RankDone──▶ leader      then 2, 3, …; nothing of it passes through the scheduler

Always true
- Orders of one life of a leader are numbered from 1 without a gap, one at a time. The last number once more gets the
  answer of the first time, or joins the order that is still under way: nothing is done twice.
- A follower has one leader in its life. When that is gone, it does nothing more.
"""

from __future__ import annotations

import numpy as np

from actors.core.message import Message, message


@message("ranks.follow")
class FollowLeader(Message):
    """The leader has come. Idempotent; answered with core's Done. Another life of a leader is refused."""

    job: str


@message("ranks.order")
class RankOrder(Message):
    """Something to do. Reply: RankDone; whatever it raises ends the follower."""

    number: int
    order: np.ndarray
    """Bytes (uint8) that leader and followers of one kind agree on."""


@message("ranks.done")
class RankDone(Message):
    number: int
    result: np.ndarray
    """Bytes (uint8), as of the order."""
