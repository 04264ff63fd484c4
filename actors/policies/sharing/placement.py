"""Which waiting job is put on which training service, and why the others wait.

    queue: priority ▸ project that holds least of its share ▸ first come     (dominant share: of places, or of bytes)
       └─▶ each in turn: refused │ waits for its quota │ the first service in the policy's order that has room │ waits

    isolated         a service that serves no job
    pack             the service that serves most jobs; so most services stay empty
    spread           the service that computes least
    spread_backfill  the same, and a job may pass those that wait

- A job that waits keeps those behind it from the services that it waits for, except in ``spread_backfill``: there a job
  may pass if the first waiting one can still begin as early. Running jobs are taken to end as predicted; those with
  unknown ends after all others, one by one, and one that has not begun yet last. A job that waits for its own quota
  keeps back none.
- A job without a profile needs a service of its own. Where none is empty, a job with a profile that is alone on one
  moves to another service that has room for it, if there is one; services become empty in no other way while jobs run.
- A job that is placed stays. Decisions follow from the view alone: nothing is remembered, and no job has a promise.
- After ``LOOKS`` predictions of slowdown, what is left of the queue waits for the next decision.

Pure: no clock, no I/O, the same view gives the same decision.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Final

from actors.policies.sharing.job_profile import Together
from actors.policies.sharing.placement_fit import Lack, is_cold, lack, never_fits, quota_lack
from actors.policies.sharing.placement_view import (
    JobView,
    PlacementDecision,
    PlacementRules,
    PlacementView,
    Placing,
    ServiceView,
)

LOOKS: Final = 800
"""Number of predictions in one decision: some 30 ms on a core, which a head with hundreds of jobs can bear."""
_UNKNOWN: Final = 1e12
"""Seconds that stand for an end that nobody knows."""


def decide(rules: PlacementRules, view: PlacementView) -> PlacementDecision:
    """What to do now; called again whenever a job comes, ends or has its profile, and when services change."""
    return _Round(rules, view).decide()


@dataclass(slots=True)
class _Round:
    """Decides about one job of the queue after another; those already placed count for the next."""

    rules: PlacementRules
    view: PlacementView
    there: dict[str, list[JobView]] = field(init=False)
    """Jobs on each service, including those placed in this round."""
    of_project: defaultdict[str, list[JobView]] = field(default_factory=lambda: defaultdict[str, list[JobView]](list))
    """Jobs of each project that are on services."""
    kept: dict[str, str] = field(default_factory=dict[str, str])
    """Map of a service to the job that waits for it, and keeps those behind it away."""
    first: JobView | None = None
    """First job that waits for a service; in ``spread_backfill`` no other may delay it."""
    room_in_s: dict[str, float] = field(default_factory=dict[str, float])
    """Map of a service to the seconds until it has room for ``first``."""
    looks: int = 0
    """Predictions made so far."""
    place: list[Placing] = field(default_factory=list[Placing])
    move: list[Placing] = field(default_factory=list[Placing])
    wait: dict[str, str] = field(default_factory=dict[str, str])
    refuse: dict[str, str] = field(default_factory=dict[str, str])
    homeless: list[JobView] = field(default_factory=list[JobView])
    """Jobs that wait for an empty service."""

    def decide(self) -> PlacementDecision:
        self.there = {service.name: [] for service in self.view.services}
        waiting: defaultdict[str, list[JobView]] = defaultdict(list)
        for job in self.view.jobs:
            if job.on is None:
                waiting[job.project].append(job)
            elif job.on in self.there:
                self.there[job.on].append(job)
                self.of_project[job.project].append(job)
        for jobs in waiting.values():
            jobs.sort(key=_turn, reverse=True)
        order = [self._key(jobs[-1]) for jobs in waiting.values()]
        heapq.heapify(order)
        while order:
            project = heapq.heappop(order)[-1]
            self._decide_one(waiting[project].pop())
            if waiting[project]:
                heapq.heappush(order, self._key(waiting[project][-1]))
        for job in self.homeless:
            if self.looks < LOOKS:
                self._make_room(job)
        return PlacementDecision(tuple(self.place), tuple(self.move), self.wait, self.refuse)

    def _key(self, job: JobView) -> tuple[float, float, float, str, str]:
        priority, submitted, name = _turn(job)
        return priority, self._held(job.project), submitted, name, job.project

    def _held(self, project: str) -> float:
        """What ``project`` holds of all services, over its share: of their places or their bytes, whichever is more."""
        jobs, services = self.of_project[project], self.view.services
        places = len(jobs) / max(1, sum(service.jobs_max for service in services))
        room = sum(one.state_bytes for one in jobs) / max(1, sum(service.parked_bytes for service in services))
        return max(places, room) / self.rules.quota(project).share

    # ------------------------------------------------------------ one job

    def _decide_one(self, job: JobView) -> None:
        suitable = [service for service in self.view.services if _suits(job, service)]
        if reason := never_fits(job, suitable, self.rules):
            self.refuse[job.name] = reason
            return
        if quota := quota_lack(job, self.of_project[job.project], self.rules):
            self.wait[job.name] = f"waits for {quota.text}"
            return
        lacks, before = list[Lack](), ""
        for service in self._in_order(suitable):
            if service.name in self.kept:
                before = self.kept[service.name]
                continue
            if self.looks >= LOOKS:
                self.wait[job.name] = "waits for the next decision, as this one had many jobs to look at"
                return
            room = self._lack(job, service, self.there[service.name])
            if isinstance(room, Lack):
                lacks.append(room)
            elif self.first is not None and self._delays(self.first, job, service):
                before = self.first.name
            else:
                self._put(job, service, room)
                return
        self._waits(job, suitable, before, lacks)

    def _waits(self, job: JobView, suitable: Sequence[ServiceView], before: str, lacks: Sequence[Lack]) -> None:
        """Let ``job`` wait, and say why; ``before``: the job that keeps it from a service, if one does."""
        if before:
            self.wait[job.name] = f"waits for its turn after {before}"
        else:
            least = min(lacks, key=lambda one: one[:2])
            self.wait[job.name] = f"waits for {least.text}"
            if least.wants_an_empty_service:
                self.homeless.append(job)
        if self.rules.policy != "spread_backfill":
            self.kept = {service.name: job.name for service in suitable} | self.kept
        elif self.first is None:
            self.first = job
            self.room_in_s = {service.name: self._room_in_s(job, service) for service in suitable}

    def _lack(self, job: JobView, service: ServiceView, there: Sequence[JobView]) -> Lack | Together | None:
        found = lack(job, service, there, self.rules)
        self.looks += found is not None and (isinstance(found, Together) or found.was_predicted)
        return found

    def _put(self, job: JobView, service: ServiceView, room: Together | None) -> None:
        self.there[service.name].append(job)
        self.of_project[job.project].append(job)
        self.place.append(Placing(job.name, service.name, room.burst_at_s if room else None))
        if self.first is not None and service.name in self.room_in_s:
            self.room_in_s[service.name] = self._room_in_s(self.first, service)

    def _in_order(self, services: Sequence[ServiceView]) -> list[ServiceView]:
        """``services`` in the policy's order; equal ones as they are listed."""
        there = self.there

        def load(service: ServiceView) -> tuple[float, float]:
            jobs = there[service.name]
            duty = sum(one.profile.duty for one in jobs)
            return (-len(jobs), -duty) if self.rules.policy == "pack" else (duty, len(jobs))

        return sorted(services, key=load)

    # ------------------------------------------------------------ backfill

    def _delays(self, first: JobView, job: JobView, service: ServiceView) -> bool:
        """Whether ``first`` could only begin later if ``job`` was put there."""
        begins_s = min(self.room_in_s.values())
        if self.room_in_s.get(service.name, inf) > begins_s:
            return False  # ``first`` begins elsewhere, whatever runs here
        ends_s = 2 * _UNKNOWN if job.remaining_s is None else job.remaining_s
        self.there[service.name].append(replace(job, remaining_s=ends_s))
        here_s = self._room_in_s(first, service)
        self.there[service.name].pop()
        return min(here_s, *(at for name, at in self.room_in_s.items() if name != service.name), inf) > begins_s

    def _room_in_s(self, job: JobView, service: ServiceView) -> float:
        there = sorted(self.there[service.name], key=lambda one: (_end_s(one), one.name))
        ends_s = [0.0, *(_end_s(one) + gone * (one.remaining_s is None) for gone, one in enumerate(there))]
        for gone, end_s in enumerate(ends_s):
            if not isinstance(self._lack(job, service, there[gone:]), Lack):
                return end_s
        return inf

    # ------------------------------------------------------------ room for a job without a profile

    def _make_room(self, job: JobView) -> None:
        """Move a job that is alone on a service that suits ``job``, if there is room for it elsewhere."""
        taken = {one.service for one in self.move}
        for service in self.view.services:
            there = self.there[service.name]
            if len(there) != 1 or service.name in taken or not _suits(job, service):
                continue
            lone = there[0]
            if lone.on is None or lone.named or lone.alone or is_cold(lone, self.rules):
                continue
            if isinstance(self._lack(job, service, ()), Lack):
                continue
            for other in self._in_order(self.view.services):
                beside = self.there[other.name]
                if other is service or not beside or not _suits(lone, other):
                    continue
                room = self._lack(lone, other, beside)
                if isinstance(room, Together):
                    self.there[service.name] = [job]
                    beside.append(replace(lone, on=other.name))
                    self.move.append(Placing(lone.name, other.name, room.burst_at_s))
                    self.wait[job.name] = f"waits for {service.name}, which {lone.name} leaves"
                    return


def _turn(job: JobView) -> tuple[float, float, str]:
    """Sort key of a job among those of its project."""
    return -job.priority, job.submitted, job.name


def _suits(job: JobView, service: ServiceView) -> bool:
    if job.named is not None:
        return job.named == service.name
    return job.suits is None or service.name in job.suits


def _end_s(job: JobView) -> float:
    return _UNKNOWN if job.remaining_s is None else job.remaining_s
