"""Which rollout workers a job starts and which leave: by number where machines stay, by machine where they do not.

    machines that stay          rollout-0 … rollout-<n-1>; workers with higher numbers leave
    machines that come and go   a worker on each slot that the job may use; machines that joined first come first

Invariants
- A worker whose machine is gone is removed; one whose machine was told to go leaves as late as that allows; one whose
  slot the job may not use any more leaves at once.
- On a machine that is passed over nothing is started; what runs there goes on.

Pure: machines, workers and what is wanted in; workers to start and workers that leave out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class PoolNode:
    """Describes a machine that comes and goes, and its workers."""

    name: str
    workers: tuple[str, ...]
    """Names of the workers that the machine takes."""
    leaves_s: float | None = None
    """Time at which the machine goes; None: it was not told to."""


class NodeSlot(NamedTuple):
    """Names a slot of a machine that comes and goes, by the worker on it."""

    worker: str
    node: str


@dataclass(frozen=True, slots=True)
class PlacingView:
    """Describes the machines that come and go, and the workers that the pool has there."""

    nodes: Sequence[PoolNode]
    """Machines in the order in which they joined."""
    workers: Mapping[str, str]
    """Workers that were started and not asked to leave → their machines."""
    passed_over: Collection[str] = ()
    """Machines on which nothing is started any more."""

    def slots(self) -> list[NodeSlot]:
        """Slots that could be used, those of the machines that joined first before others."""
        able = [node for node in self.nodes if node.leaves_s is None and node.name not in self.passed_over]
        return [NodeSlot(worker, node.name) for node in able for worker in node.workers]


class Leave(NamedTuple):
    """Names a worker that leaves."""

    worker: str
    within_s: float | None
    """Seconds for which the worker may go on with what it runs; 0: it goes at once; None: its machine is gone."""


class Placing(NamedTuple):
    """Says what has to be done, in this order."""

    leave: list[Leave]
    run: list[NodeSlot]
    """Slots on which a worker is to run, whether it does already or not."""


def decide(view: PlacingView, granted: Collection[str], now_s: float) -> Placing:
    """Which workers leave and which run. ``granted``: those of ``view.slots()`` that the job may have."""
    there = {node.name: node for node in view.nodes}
    leave: list[Leave] = []
    for worker, name in view.workers.items():
        node = there.get(name)
        if node is None:
            leave.append(Leave(worker, None))
        elif node.leaves_s is not None:
            leave.append(Leave(worker, node.leaves_s - now_s))
        elif worker not in granted and name not in view.passed_over:
            leave.append(Leave(worker, 0.0))
    return Placing(leave, [slot for slot in view.slots() if slot.worker in granted])


def by_number(present: Collection[str], wanted: int) -> tuple[list[int], list[str]]:
    """On machines that stay: the numbers of the workers to start, and the names of those that leave."""
    names = [f"rollout-{number}" for number in range(wanted)]
    return [number for number, name in enumerate(names) if name not in present], sorted(set(present) - set(names))
