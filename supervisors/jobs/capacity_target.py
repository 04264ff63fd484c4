"""The seeding window's capacity target (N_prem) in a live job: no more remote workers than the trainer has use for.

    row of a step ─▶ seeding_target ─▶ with prices: as many of them as make the step cheapest ─┐
                                                    aim: pool and provider ◀─ the greatest of the last few ◀─┘

Invariants
- It begins with all that come: what is too much is known after the first step.
- One step that would do with fewer workers ends none: a target is a quotient of measured times.
- Prices only lower it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from actors.policies import worth_having
from supervisors.machine.nodes import Node


class Prices(NamedTuple):
    """Prices are for the same time, in the unit of ``cluster.prices``."""

    reserved: float
    """Price of the machines that stay."""
    worker: float
    """Price of one more worker on a machine that comes and goes; the dearest of those that are there."""


def prices_of(present: Iterable[Node], prices: Mapping[str, float]) -> Prices | None:
    """What the machines that are there cost; None without prices, or while no machine is there that comes and goes."""
    nodes = list(present)
    of_worker = [prices.get(node.kind, 0.0) / node.slots for node in nodes if not node.local and node.slots]
    if not prices or not of_worker:
        return None
    return Prices(sum(prices.get(node.kind, 0.0) for node in nodes if node.local), max(of_worker))


class CapacityTarget:
    """It follows the steps of one job with ``scheduling.seeding`` on machines that come and go.

    Args:
        aim: at most so many remote workers.
        local_engines: workers on the trainer's machine.
        prices: of the machines that are there now.
    """

    def __init__(
        self,
        aim: Callable[[int], None],
        record: Callable[..., None],
        local_engines: int = 0,
        prices: Callable[[], Prices | None] = lambda: None,
    ) -> None:
        self._aim = aim
        self._record = record
        self._local_engines = local_engines
        self._prices = prices
        self._known_prices: Prices | None = None
        """Prices known last: machines that have gone cost the same when they come back."""
        self._targets: deque[int] = deque(maxlen=worth_having.STEPS)
        self._most: int | None = None

    def hear(self, row: Mapping[str, Any]) -> None:
        """What the job says; rows of steps are what counts."""
        if "seeding_target" not in row:
            return
        self._targets.append(self._worth(row))
        most = worth_having.settled(self._targets)
        if most is None or most == self._most:
            return
        self._record("capacity_target", step=int(row["step"]), remote_workers=most)
        self._most = most
        self._aim(most)

    def _worth(self, row: Mapping[str, Any]) -> int:
        """As many as the trainer has use for, or as many of them as make the step cheapest."""
        target = int(row["seeding_target"])
        self._known_prices = prices = self._prices() or self._known_prices
        engine_s = float(row.get("seeding_engine_s", 0.0))
        train_s = float(row.get("seconds", 0.0)) * (1.0 - float(row.get("trainer_idle_fraction", 0.0)))
        if prices is None or engine_s <= 0 or train_s <= 0:
            return target
        step = worth_having.StepCost(engine_s, train_s, self._local_engines, prices.reserved, prices.worker)
        return worth_having.decide(step, target)
