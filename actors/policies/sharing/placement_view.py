"""What the placement of jobs on services may know, and what it says.

PlacementRules, PlacementView ──▶ placement.decide ──▶ PlacementDecision
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from actors.policies.sharing.job_profile import UNKNOWN, JobProfile

PlacementPolicy = Literal["isolated", "pack", "spread", "spread_backfill"]


@dataclass(frozen=True, slots=True)
class Quota:
    """Bounds a project on all services together."""

    jobs_max: int | None = None
    memory_bytes: int | None = None
    """Bytes of trained state of its jobs."""
    share: float = 1.0
    """Weight among projects whose jobs wait."""


@dataclass(frozen=True, slots=True)
class PlacementRules:
    """Holds the rules that do not change while a head runs."""

    policy: PlacementPolicy = "pack"
    cold_steps: int = 3
    """Steps for which a job that names no service runs alone, so that its profile is undisturbed."""
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
    """Describes one training service."""

    name: str
    memory_bytes: int
    """Budget of the device: the largest state that a job may have."""
    parked_bytes: int
    """Room for the states of all jobs of the service together."""
    jobs_max: int
    draining: bool = False
    """Whether the service takes no further job."""


@dataclass(frozen=True, slots=True)
class JobView:
    """Describes a job that is on a service, or waits for one."""

    name: str
    state_bytes: int
    on: str | None = None
    """Service that the job is on; None: it waits."""
    named: str | None = None
    """Service that the job file names, to which it goes whatever its profile; None: the placement chooses."""
    suits: Collection[str] | None = None
    """Services that fit the job's device, threads and dtype; None: all."""
    project: str = "default"
    priority: int = 0
    """Priority in the queue; a higher one goes first."""
    submitted: float = 0.0
    """Number or time of its submission; lower ones go first."""
    profile: JobProfile = UNKNOWN
    remaining_s: float | None = None
    """Seconds until the job ends, from when it runs; None: unknown."""
    alone: bool = False
    """Whether the job shares its service with no other, since services died under it."""


@dataclass(frozen=True, slots=True)
class PlacementView:
    """Holds all services and all jobs, also those that wait."""

    services: Sequence[ServiceView]
    jobs: Sequence[JobView]


@dataclass(frozen=True, slots=True)
class Placing:
    """Sends a job to a service."""

    job: str
    service: str
    burst_at_s: float | None = None
    """Time at which its bursts would best begin, up to whole periods; None: any suits."""


@dataclass(frozen=True, slots=True)
class PlacementDecision:
    """Says what to do now; jobs that it does not name stay as they are."""

    place: tuple[Placing, ...] = ()
    """Jobs that begin."""
    move: tuple[Placing, ...] = ()
    """Jobs that go to another service, so that one becomes free for a job that waits."""
    wait: Mapping[str, str] = field(default_factory=dict[str, str])
    """Reason of each job that waits, in the order of the queue: "waits for 1.2 GB on train-0"."""
    refuse: Mapping[str, str] = field(default_factory=dict[str, str])
    """Reason of each job that can never be placed."""
