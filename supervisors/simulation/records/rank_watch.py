"""Checks the orders to all rank groups: whether all followers of one leader's life serve the same ones, each once.

    leader's call ─ ordered ─▶ ┐
    follower ──────── served ─▶ ├ RankWatch ─▶ findings
    leader, answered ─ ended ─▶ ┘

Invariants
- A follower's life serves orders of one life of its leader: the first, the second, and so on, none twice.
- A follower serves exactly what that leader has ordered, and the leader goes on when all have served.
- One life of a leader has one life of each follower.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from actors.ranks.simulated import decoded_order


class RankWatch:
    """Keeps the orders of one simulated run. ``finding`` is told of violations."""

    def __init__(self, finding: Callable[[str], None]) -> None:
        self._finding = finding
        self._ordered: dict[str, list[bytes]] = {}
        """Life of a leader → its orders; all its followers are given the same."""
        self._served: dict[str, list[bytes]] = {}
        """Life of a follower → the orders that it has served."""
        self._pairs: dict[tuple[str, int], str] = {}
        """Life of a leader and rank → life of the follower that serves it."""
        self.orders = 0
        """Number of orders that were served."""

    def ordered(self, life: str, orders: Sequence[bytes]) -> None:
        """Note the orders that a leader is about to give, one for each follower."""
        if len(set(orders)) != 1:
            self._finding(f"ranks: {life} gives its followers different orders")
        self._ordered.setdefault(life, []).append(orders[0])

    def served(self, follower: str, rank: int, order: bytes) -> None:
        """Note that ``follower``, which has that rank, is about to serve an order."""
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
        """Check that all ``count`` followers have served every order of the leader's ``life``."""
        orders = len(self._ordered[life])
        for rank in range(1, count + 1):
            served = len(self._served.get(self._pairs.get((life, rank), ""), ()))
            if served != orders:
                self._finding(f"ranks: {life} goes on after order {orders}, and rank {rank} has served {served}")
