"""Bugs of training services that several jobs share, planted as those of ``planted_bugs.py``."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from actors.policies.sharing import slices
from actors.protocol.training import TrainAnswer
from actors.train_service import service
from actors.train_service.bundles import CallLog
from actors.train_service.notes import Notes
from actors.train_service.slice_queue import SliceQueue
from actors.train_service.stored_bundles import StoredBundles, TieredBundle
from actors.trainer.backends.simulated_backend import SimulatedBackend
from actors.trainer.parking import SUMS, TRAINED
from supervisors.sharing.admission import Admission
from supervisors.sharing.services import Services
from tests.supervisors.simulation.planted_bugs import Replace

PLANTED: dict[str, Callable[[Replace], None]] = {}
FOCUS: dict[str, dict[str, Any]] = {
    "a_call_that_is_repeated_is_computed_again": {
        "kinds": ["drop", "partition"],
        "roles": ["train_service", "trainer"],
    },
}
"""Faults to draw, where those of the scenario would take many seeds."""
CROWDED: set[str] = {
    "nobody_guards_against_starving",
    "gradient_sums_are_not_parked",
    "gradient_sums_of_a_half_step_are_taken_up_again",
}
"""Bugs for which there must be more to do than a service can."""
SEEDS: dict[str, int] = {}
"""The first seeds that catch them."""


def caught_by(seed: int) -> Callable[[Callable[[Replace], None]], Callable[[Replace], None]]:
    """A bug that the seeds before ``seed`` let pass."""

    def plant_it(plant: Callable[[Replace], None]) -> Callable[[Replace], None]:
        PLANTED[plant.__name__], SEEDS[plant.__name__] = plant, seed
        return plant

    return plant_it


planted = caught_by(0)


# ------------------------------------------------------------ calls


@caught_by(2)
def a_call_that_is_repeated_is_computed_again(replace: Replace) -> None:
    right = CallLog.repeated

    def repeated(self: CallLog, number: int) -> asyncio.Future[TrainAnswer] | None:
        if number == self.number and not self.is_busy:
            self.number -= 1
            return None
        return right(self, number)

    replace(CallLog, "repeated", repeated)


@caught_by(30)
def trained_steps_are_gone_on_from_whether_they_were_committed_or_not(replace: Replace) -> None:
    replace(Notes, "may_go_on", lambda self, job, run, steps: True)


@planted
def a_trainer_keeps_to_a_life_of_its_service_that_is_gone(replace: Replace) -> None:
    right, known = Services.address, dict[tuple[int, str], Any]()

    async def address(self: Services, name: str) -> Any:
        return known.setdefault((id(self), name), await right(self, name))

    replace(Services, "address", address)


# ------------------------------------------------------------ slices


@planted
def another_job_comes_into_a_burst(replace: Replace) -> None:
    replace(slices, "_held_s", lambda view, rules, now_s: None)


@caught_by(2)
def two_calls_compute_at_once(replace: Replace) -> None:
    right = SliceQueue.end

    def end(self: SliceQueue, job: str, computed_s: float, **how: Any) -> None:
        if self._burst is not None:  # else the other call has ended the burst already
            right(self, job, computed_s, **how)

    replace(SliceQueue, "is_busy", property(lambda self: False))
    replace(SliceQueue, "end", end)


@planted
def nobody_is_let_in_when_a_call_is_done(replace: Replace) -> None:
    right = SliceQueue.end

    def end(self: SliceQueue, job: str, computed_s: float, **how: Any) -> None:
        look = self._look
        self._look = lambda: None  # type: ignore[method-assign]
        right(self, job, computed_s, **how)
        self._look = look  # type: ignore[method-assign]

    replace(SliceQueue, "end", end)


@caught_by(1)
def nobody_guards_against_starving(replace: Replace) -> None:
    right = slices.slice_policy
    replace(service, "slice_policy", lambda rules: right(dataclasses.replace(rules, starvation_s=1e9)))


# ------------------------------------------------------------ where state lies


@caught_by(11)
def gradient_sums_of_a_half_step_are_taken_up_again(replace: Replace) -> None:
    right = StoredBundles.go_on

    async def go_on(self: StoredBundles, bundle: TieredBundle, state_hash: str) -> None:
        await right(self, bundle, state_hash)
        await bundle.backend.restore(self.copies[bundle.job].parts())

    replace(StoredBundles, "go_on", go_on)


@caught_by(1)
def the_momentum_of_a_parked_job_is_lost(replace: Replace) -> None:
    right = SimulatedBackend.restore

    async def restore(self: SimulatedBackend, stored: Any) -> None:
        await right(self, stored)
        self._policy.momentum = np.zeros_like(self._policy.momentum)

    replace(SimulatedBackend, "restore", restore)


@caught_by(1)
def a_step_does_not_make_the_stored_weights_old(replace: Replace) -> None:
    right = SimulatedBackend._changed
    replace(SimulatedBackend, "_changed", lambda self, part: None if part == TRAINED else right(self, part))


@planted
def gradient_sums_are_not_parked(replace: Replace) -> None:
    right = SimulatedBackend._changed
    replace(SimulatedBackend, "_changed", lambda self, part: None if part == SUMS else right(self, part))


# ------------------------------------------------------------ places


@caught_by(1)
def a_job_that_is_over_keeps_its_place(replace: Replace) -> None:
    async def leave(self: Admission, job: str) -> None:
        self.decide()

    replace(Admission, "leave", leave)
