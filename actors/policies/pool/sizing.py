"""How many rollout workers a job should have, after each step: by its stages, or by what its trainer can use.

    row of a step ─┬─ ``scheduling.workers_max`` ─▶ ByStages: ``pool_size`` over the times of both stages ─┬─▶ Resize
                   └─ ``scheduling.seeding`` ────▶ ByTarget: ``seeding_target``, with prices ``worth_having`` ─┘

A job has one of the two at most. Pure: the row of a step and the pool as it is in, a number out, or nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from actors.policies.pool.pool_size import PoolRules, PoolSize, StageReport, decide
from actors.policies.seeding import worth_having


class Prices(NamedTuple):
    """Holds prices of machines for the same time, in the unit of ``cluster.prices``."""

    reserved: float
    """Price of the machines that stay."""
    worker: float
    """Price of one more worker on a machine that comes and goes; the dearest of those that are there."""
    present: float
    """Price of all machines that are there."""


@dataclass(frozen=True, slots=True)
class SizeView:
    """Holds what the size of a pool is decided from, beside the row of a step."""

    stay: int
    """Workers wanted on machines that stay."""
    running: int
    """Workers that run, whoever has started them."""
    prices: Prices | None = None
    """Prices of the machines that are there; None without prices, or while none is there that comes and goes."""


@dataclass(frozen=True, slots=True)
class Resize:
    """Says that another number of workers is wanted, as ``event`` with ``fields`` does in events.jsonl."""

    workers: int
    """Workers of the job, on all machines."""
    event: str
    fields: dict[str, float]


class Sizing(Protocol):
    """Decides the size of one job's pool, from one step to the next."""

    def decide(self, row: Mapping[str, Any], view: SizeView) -> Resize | None:
        """The size that is wanted after this news of the job, if it is the row of a step; None: it has not changed."""
        ...


class ByStages:
    """Lets the number of workers follow the gap between generating and training. ``wanted``: their number at first."""

    def __init__(self, rules: PoolRules, wanted: int) -> None:
        self._rules, self._size = rules, PoolSize(wanted)

    def decide(self, row: Mapping[str, Any], view: SizeView) -> Resize | None:
        if "rollout_idle_fraction" not in row:
            return None
        prices = view.prices
        share = None if prices is None else prices.worker / ((prices.present + prices.worker) or 1.0)
        report = StageReport(
            gen_s=row["seconds"] * (1.0 - row["rollout_idle_fraction"]),
            train_s=row.get("trainer_seconds", row["seconds"]) * (1.0 - row["trainer_idle_fraction"]),
            workers=view.running,
            price_share=share,
        )
        before, self._size = self._size.wanted, decide(self._rules, self._size, report)
        wanted = self._size.wanted
        if wanted == before:
            return None
        fields = {"workers": report.workers, "wanted": wanted, "step": int(row["step"])}
        return Resize(wanted, "pool_resized", {**fields, "gen_s": report.gen_s, "train_s": report.train_s})


class ByTarget:
    """Keeps no more workers on machines that come and go than the trainer of a seeding job can use (N_prem).

    All that come are kept at first, since the first steps show how many are too many. One step with a lower target
    removes none, as a target is a quotient of measured times. Prices only lower the target.
    """

    def __init__(self, local_engines: int = 0) -> None:
        """``local_engines``: workers on the trainer's machine."""
        self._local_engines = local_engines
        self._prices: Prices | None = None
        """Prices as last known: machines that have gone cost the same when they come back."""
        self._targets: deque[int] = deque(maxlen=worth_having.STEPS)
        self._most: int | None = None

    def decide(self, row: Mapping[str, Any], view: SizeView) -> Resize | None:
        if "seeding_target" not in row:
            return None
        self._prices = view.prices or self._prices
        self._targets.append(self._worth(row))
        most = worth_having.settled(self._targets)
        if most is None or most == self._most:
            return None
        self._most = most
        return Resize(view.stay + most, "capacity_target", {"step": int(row["step"]), "remote_workers": most})

    def _worth(self, row: Mapping[str, Any]) -> int:
        """As many workers as the trainer can use, or as many of them as make the step cheapest."""
        target, prices = int(row["seeding_target"]), self._prices
        engine_s = float(row.get("seeding_engine_s", 0.0))
        train_s = float(row.get("seconds", 0.0)) * (1.0 - float(row.get("trainer_idle_fraction", 0.0)))
        if prices is None or engine_s <= 0 or train_s <= 0:
            return target
        step = worth_having.StepCost(engine_s, train_s, self._local_engines, prices.reserved, prices.worker)
        return worth_having.decide(step, target)
