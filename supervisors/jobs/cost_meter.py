"""What the machines of a job have cost so far.

Each node costs its kind's price an hour from its joining to its leaving, whether it works or not; the head's machine
from the job's start. Pure but for the clock that is handed in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

HOUR_S = 3600.0


class CostMeter:
    """Counts what the machines cost from the job's start on; call ``see`` whenever the machines change.

    Args:
        prices: kind → price an hour, in whatever currency. A kind without a price costs nothing, and ``see`` says so.
        now: the clock.
    """

    def __init__(self, prices: Mapping[str, float], now: Callable[[], float]) -> None:
        self._prices = prices
        self._now = now
        self._since_s = now()
        self._spent = 0.0
        self._taken = 0.0
        self._there: Counter[str] = Counter()

    def see(self, kinds: Iterable[str]) -> list[str]:
        """From now on there is one machine for each of ``kinds``; returns those that have no price, once each."""
        spent = self.spent()
        self._spent, self._since_s = spent, self._now()
        before, self._there = self._there, Counter(kinds)
        return sorted(kind for kind in self._there if kind not in self._prices and kind not in before)

    def spent(self) -> float:
        """The cost up to now."""
        an_hour = sum(count * self._prices.get(kind, 0.0) for kind, count in self._there.items())
        return self._spent + an_hour * (self._now() - self._since_s) / HOUR_S

    def take(self) -> float:
        """The cost since the last call. The meter remembers that call, since the job's actor may restart in between."""
        spent = self.spent()
        since, self._taken = spent - self._taken, spent
        return since
