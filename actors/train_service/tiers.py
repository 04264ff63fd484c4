"""How much each tier of a service may hold, and what is told of what lies where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from configs.limits import DEFAULT_LIMITS

Tier = Literal["budget", "host", "disk"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ResidencyRules:
    """Says how much each tier may hold."""

    budget_bytes: int
    host_bytes: int
    """Bytes of files in shared memory: all parked bundles, and once more the largest part that is being stored."""
    disk_bytes: int = 0
    high_water: float = 0.9
    """Share of ``host_bytes`` above which ``relieve`` moves bundles to the disk, the least useful first."""
    move_timeout_s: float = DEFAULT_LIMITS.service_move_timeout_s


@dataclass(frozen=True, kw_only=True, slots=True)
class ParkedState:
    """Names a job's last stored state, checked byte by byte when it was looked up."""

    job: str
    steps: int
    hash: str
    """Hexadecimal digest of everything that is stored, equal for equal state."""
    size_bytes: int
    tier: Literal["host", "disk"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BundleReport:
    """Says where one bundle's state lies."""

    job: str
    tier: Tier
    """The highest tier that has it."""
    resident_bytes: int
    """Bytes in the budget, 0 if it is parked."""
    released_bytes: int
    """Bytes that stay beside the budget while it is parked, 0 if it is resident."""
    host_bytes: int
    disk_bytes: int
    unsaved_bytes: int
    """Bytes of parts that have changed since they were stored: what would be lost with the process."""
    steps_stored: int | None
    """Optimizer steps in the stored copy, None without one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResidencyReport:
    """Says what the tiers hold."""

    bundles: tuple[BundleReport, ...]
    budget_bytes: int
    host_bytes: int
    """Bytes in shared memory, of jobs that are not attached too."""
    disk_bytes: int
    parked: int
    """How often state was moved out of the budget."""
    resumed: int
    demoted: int
    """How often from host memory to disk."""
    fetched: int
    """How often from disk to host memory."""
    written_bytes: int
    """Bytes that were copied out of the budget: parts that had not changed are not in it."""
