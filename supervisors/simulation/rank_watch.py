"""What the ranks of every group are told, over all lives: whether all of one life saw the same orders, each once.

    leader's call ─ ordered ─▶ ┐
    follower ──────── served ─▶ ├ RankWatch ─▶ findings
    leader, answered ─ ended ─▶ ┘

Invariants
- A follower's life serves orders of one life of its leader: the first, the second, and so on, none twice.
- What it serves is what that leader has ordered, and a leader goes on when all have served.
- One life of a leader has one life of each follower.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from actors.ranks.group import GroupFollowers
from actors.ranks.simulated import SimulatedFollower, decoded_order
from actors.roles import RoleArgs
from supervisors.simulation.paced import slowly
from transport.sim.process import SimProcess


class RankWatch:
    """It keeps the orders of one simulated run. ``finding`` is told of what must not be."""

    def __init__(self, finding: Callable[[str], None]) -> None:
        self._finding = finding
        self._ordered: dict[str, list[bytes]] = {}
        """Life of a leader → its orders; all its followers are given the same."""
        self._served: dict[str, list[bytes]] = {}
        """Life of a follower → what it has served."""
        self._pairs: dict[tuple[str, int], str] = {}
        """Life of a leader, and rank → life of the follower that has served it."""
        self.orders = 0
        """Number of orders that were served."""

    def ordered(self, life: str, orders: Sequence[bytes]) -> None:
        """A leader is about to give these, one to each follower."""
        if len(set(orders)) != 1:
            self._finding(f"ranks: {life} gives its followers different orders")
        self._ordered.setdefault(life, []).append(orders[0])

    def served(self, follower: str, rank: int, order: bytes) -> None:
        """``follower``, which has that rank, is about to serve an order."""
        self.orders += 1
        decoded, served = decoded_order(order), self._served.setdefault(follower, [])
        given, served_before = self._ordered.get(decoded.life, []), len(served)
        served.append(order)
        if self._pairs.setdefault((decoded.life, rank), follower) != follower:
            self._finding(f"ranks: {decoded.life} leads two lives of rank {rank}")
        if decoded_order(served[0]).life != decoded.life:
            self._finding(f"ranks: {follower} serves two lives of its leader")
        elif decoded.number != served_before + 1:
            self._finding(f"ranks: {follower} serves order {decoded.number} as its order {served_before + 1}")
        elif given[served_before : served_before + 1] != [order]:
            self._finding(f"ranks: {follower} serves an order that {decoded.life} has not given")

    def ended(self, life: str, count: int) -> None:
        """All of so many followers are said to have served what ``life`` has ordered."""
        orders = len(self._ordered[life])
        for rank in range(1, count + 1):
            served = len(self._served.get(self._pairs.get((life, rank), ""), ()))
            if served != orders:
                self._finding(f"ranks: {life} goes on after order {orders}, and rank {rank} has served {served}")


class WatchedFollowers(GroupFollowers):
    """These are the followers of one life of a leader."""

    def __init__(self, args: RoleArgs, life: str, watch: RankWatch) -> None:
        super().__init__(args)
        self._life, self._watch = life, watch

    async def call(
        self, orders: Sequence[bytes], *, timeout_s: float, ends: Callable[[bytes], bool] | None = None
    ) -> list[bytes]:
        self._watch.ordered(self._life, orders)
        answers = await super().call(orders, timeout_s=timeout_s, ends=ends)
        self._watch.ended(self._life, self.count)
        return answers


class WatchedFollower(SimulatedFollower):
    """This is a follower whose process may be slow."""

    def __init__(self, args: RoleArgs, name: str, life: SimProcess, watch: RankWatch) -> None:
        super().__init__(args.rank, args.size)
        self._name, self._life, self._watch = name, life, watch

    async def serve(self, order: bytes) -> bytes:
        self._watch.served(self._name, self._rank, order)
        return await slowly(self._life, super().serve(order))
