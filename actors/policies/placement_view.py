"""What the placement of jobs on services may know, and what it says.

PlacementRules, PlacementView ──▶ placement.decide ──▶ PlacementDecision
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from actors.policies.job_profile import UNKNOWN, JobProfile

PlacementPolicy = Literal["isolated", "pack", "spread", "spread_backfill"]


@dataclass(frozen=True, slots=True)
class Quota:
    """It bounds a project on all services together."""

    jobs_max: int | None = None
    memory_bytes: int | None = None
    """Bytes of trained state of its jobs."""
    share: float = 1.0
    """Weight among projects whose jobs wait."""


@dataclass(frozen=True, slots=True)
class PlacementRules:
    """These do not change while a head runs."""

    policy: PlacementPolicy = "pack"
    cold_steps: int = 3
    """Steps for which a job that names no service runs alone, so that its profile is its own."""
    duty_max: float = 0.8
    """Part of the time for which a service may compute."""
    slowdown_max: float = 1.10
    """Factor by which anybody's step may become longer, as predicted."""
    quotas: Mapping[str, Quota] = field(default_factory=dict[str, Quota])
    """Quota of a project; one that is not named has none, and a share of 1."""

    def quota(self, project: str) -> Quota:
        return self.quotas.get(project, Quota())


@dataclass(frozen=True, slots=True)
class ServiceView:
    """It is one training service."""

    name: str
    memory_bytes: int
    """Budget of its device: the largest state that a job may have."""
    parked_bytes: int
    """Room for the states of all its jobs together."""
    jobs_max: int
    draining: bool = False
    """Whether it takes no further job."""


@dataclass(frozen=True, slots=True)
class JobView:
    """It is a job on a service, or one that waits for a service."""

    name: str
    state_bytes: int
    on: str | None = None
    """Service that it is on; None: it waits."""
    named: str | None = None
    """Service that its file names, where it goes whatever its profile; None: the placement chooses."""
    suits: Collection[str] | None = None
    """Services with which it agrees in device, threads and dtype; None: all."""
    project: str = "default"
    priority: int = 0
    """Priority in the queue; a higher one goes first."""
    submitted: float = 0.0
    """Number or time by which earlier ones go first."""
    profile: JobProfile = UNKNOWN
    remaining_s: float | None = None
    """Seconds until it ends, from when it runs; None: nobody knows."""
    alone: bool = False
    """Whether it shares with nobody: services died under it."""


@dataclass(frozen=True, slots=True)
class PlacementView:
    """It shows all services and all their jobs, those that wait too."""

    services: Sequence[ServiceView]
    jobs: Sequence[JobView]


@dataclass(frozen=True, slots=True)
class Place:
    """It puts a job on a service."""

    job: str
    service: str
    burst_at_s: float | None = None
    """Time at which its bursts would best begin, up to whole periods; None: any suits."""


@dataclass(frozen=True, slots=True)
class PlacementDecision:
    """It says what to do now. What it does not name stays as it is."""

    place: tuple[Place, ...] = ()
    """Jobs that begin."""
    move: tuple[Place, ...] = ()
    """Jobs that go to another service, so that one becomes free for a job that waits."""
    wait: Mapping[str, str] = field(default_factory=dict[str, str])
    """Reason of each job that waits, in the order of the queue: "waits for 1.2 GB on train-0"."""
    refuse: Mapping[str, str] = field(default_factory=dict[str, str])
    """Reason of each job that can never be placed."""
