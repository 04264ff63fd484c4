"""A cluster's jobs over months: each waits for a place on a training service, runs, and is slowed by those beside it.

    jobs, by arrival ──▶ queue ──▶ policies.placement.decide ──▶ services ──▶ done
                                        ▲ whenever a job comes or ends

A job does its work at 1/slowdown, and slowdowns are those of ``policies.job_profile.predict``, which agrees with the
slices that ``shared_service.py`` plays (docs/papers/plexrl.md). Services of different models never meet: their layouts
differ, so each kind of model is a cluster of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from actors.policies.sharing.job_profile import predict
from actors.policies.sharing.placement import decide
from actors.policies.sharing.placement_view import JobView, PlacementRules, PlacementView, ServiceView

_LOOKED_AT: Final = 24
"""Jobs of the queue that a decision is shown, the oldest: the others could only be passed by."""


@dataclass(frozen=True, slots=True)
class FleetJob:
    """Holds a job of the trace."""

    arrives_s: float
    view: JobView
    """What the placement knows of it; ``remaining_s`` is its time alone."""

    @property
    def alone_s(self) -> float:
        assert self.view.remaining_s is not None
        return self.view.remaining_s


@dataclass(frozen=True, slots=True)
class FleetOutcome:
    """Holds what became of the jobs."""

    makespan_s: float
    """Time at which the last one was done."""
    completion_s: float
    """Time from arrival to end, as a mean."""
    queued_s: float
    """Part of that in the queue, as a mean."""
    slowdown: float
    """Time on a service over the time alone, all jobs together."""


@dataclass(slots=True)
class _Running:
    job: FleetJob
    on: str
    began_s: float
    left_s: float
    """Its work, as time alone."""
    slowdown: float = 1.0

    def view(self) -> JobView:
        return replace(self.job.view, on=self.on, remaining_s=self.left_s * self.slowdown)


def run_fleet(jobs: Sequence[FleetJob], services: Sequence[ServiceView], rules: PlacementRules) -> FleetOutcome:
    """Run all ``jobs``, which are in order of arrival and fit on a service each."""
    return _Fleet(list(jobs), services, rules).run()


@dataclass(slots=True)
class _Fleet:
    coming: list[FleetJob]
    services: Sequence[ServiceView]
    rules: PlacementRules
    now_s: float = 0.0
    queue: list[FleetJob] = field(default_factory=list[FleetJob])
    running: dict[str, list[_Running]] = field(init=False)
    completions_s: list[float] = field(default_factory=list[float])
    queued_s: list[float] = field(default_factory=list[float])
    on_service_s: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])

    def run(self) -> FleetOutcome:
        self.running = {service.name: [] for service in self.services}
        self.coming.reverse()
        while self.coming or self.queue or any(self.running.values()):
            self._pass_time()
            while self.coming and self.coming[-1].arrives_s <= self.now_s:
                self.queue.append(self.coming.pop())
            self._place()
        count = len(self.completions_s)
        took_s, alone_s = (sum(pair[i] for pair in self.on_service_s) for i in (0, 1))
        return FleetOutcome(self.now_s, sum(self.completions_s) / count, sum(self.queued_s) / count, took_s / alone_s)

    def _pass_time(self) -> None:
        """To the next arrival or the next end."""
        ends_s = [self.now_s + one.left_s * one.slowdown for some in self.running.values() for one in some]
        until_s = min([*ends_s, *(job.arrives_s for job in self.coming[-1:])])
        passed_s, self.now_s = until_s - self.now_s, until_s
        for name, some in self.running.items():
            for one in some:
                one.left_s -= passed_s / one.slowdown
            done = [one for one in some if one.left_s <= 1e-6]
            if done:
                self.running[name] = [one for one in some if one.left_s > 1e-6]
                self._slow(name)
            for one in done:
                self.completions_s.append(until_s - one.job.arrives_s)
                self.queued_s.append(one.began_s - one.job.arrives_s)
                self.on_service_s.append((until_s - one.began_s, one.job.alone_s))

    def _place(self) -> None:
        waiting = {job.view.name: job for job in self.queue[:_LOOKED_AT]}
        if not waiting:
            return
        there = [one.view() for some in self.running.values() for one in some]
        views = [*there, *(job.view for job in waiting.values())]
        decision = decide(self.rules, PlacementView(self.services, views))
        for one in decision.place:
            job = waiting.pop(one.job)
            self.queue.remove(job)
            self.running[one.service].append(_Running(job, one.service, self.now_s, job.alone_s))
        for name in {one.service for one in decision.place}:
            self._slow(name)

    def _slow(self, service: str) -> None:
        some = self.running[service]
        if some:
            profiles = [one.job.view.profile for one in some]
            for one, slowdown in zip(some, predict(profiles[:-1], profiles[-1]).slowdowns, strict=True):
                one.slowdown = slowdown
