"""Bugs of planned generation, planted as those of ``planted_bugs.py``."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from actors.fleet.modes.cuts import Cuts
from actors.fleet.modes.planned import Planned
from actors.fleet.modes.step_parts import StepParts
from actors.fleet.workers import Worker
from actors.ledger.batch import StepBatch
from actors.policies.assigning.view import GroupView
from tests.supervisors.simulation.planted_bugs import Replace

NODES_GO = {
    "a_part_waits_for_its_worker_though_that_is_gone",
    "nobody_is_woken_for_what_is_anybodys",
}
"""Bugs for which workers have to go for good, and few of those that stay are awake."""
PLANTED: dict[str, Callable[[Replace], None]] = {}
SEEDS: dict[str, int] = {}
"""The first seeds that catch them."""


def caught_by(seed: int) -> Callable[[Callable[[Replace], None]], Callable[[Replace], None]]:
    """A bug that the seeds before ``seed`` let pass."""

    def plant_it(plant: Callable[[Replace], None]) -> Callable[[Replace], None]:
        PLANTED[plant.__name__], SEEDS[plant.__name__] = plant, seed
        return plant

    return plant_it


@caught_by(0)
def the_longest_part_is_cut_like_any_other(replace: Replace) -> None:
    right = Cuts._view

    def view(self: Cuts, *args: Any) -> Any:
        return [one._replace(holds_longest=False) for one in right(self, *args)]

    replace(Cuts, "_view", view)


@caught_by(0)
def a_part_waits_for_its_worker_though_that_is_gone(replace: Replace) -> None:
    right = StepParts.mark

    def mark(self: StepParts, groups: list[GroupView], there: Collection[str]) -> list[GroupView]:
        return [group for group in right(self, groups, there) if group.kept_for]

    replace(StepParts, "mark", mark)


@caught_by(0)
def nobody_is_woken_for_what_is_anybodys(replace: Replace) -> None:
    right = Planned._to_wake

    def to_wake(self: Planned, step: Any, batch: Any, now: float) -> Any:
        own = self._queued(step, batch, now).own
        return [worker for worker in right(self, step, batch, now) if worker.name in own]

    replace(Planned, "_to_wake", to_wake)


@caught_by(0)
def a_worker_that_wakes_is_not_told_of_the_version_that_it_has_slept_through(replace: Replace) -> None:
    right, right_may = Planned._wake, Planned.may_load

    def wake(self: Planned, worker: Worker, number: int, now: float) -> None:
        tell, self._versions.tell = self._versions.tell, lambda worker: None  # type: ignore[method-assign]
        right(self, worker, number, now)
        self._versions.tell = tell  # type: ignore[method-assign]
        self.__dict__.setdefault("untold", set()).add(worker.address)

    def may_load(self: Planned, worker: Worker) -> bool:
        return worker.address not in self.__dict__.get("untold", ()) and right_may(self, worker)

    replace(Planned, "_wake", wake)
    replace(Planned, "may_load", may_load)


@caught_by(0)
def a_new_life_of_the_scheduler_does_not_plan_what_has_begun(replace: Replace) -> None:
    right = Planned._may_plan

    def may_plan(self: Planned, batch: StepBatch, now: float) -> bool:
        return not batch.attempts.any() and right(self, batch, now)

    replace(Planned, "_may_plan", may_plan)
