"""How much each memory tier of a training service may hold, and reports on what lies where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from configs.limits import DEFAULT_LIMITS

Tier = Literal["budget", "host", "disk"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ResidencyRules:
    """The rules say how much each tier may hold."""

    budget_bytes: int
    host_bytes: int
    """Bytes of files in shared memory: all parked bundles, and once more the largest part that is being stored."""
    disk_bytes: int = 0
    high_water: float = 0.9
    """Share of ``host_bytes`` above which ``relieve`` moves bundles to the disk, the least useful first."""
    move_timeout_s: float = DEFAULT_LIMITS.service_move_timeout_s


@dataclass(frozen=True, kw_only=True, slots=True)
class ParkedState:
    """A job's last stored state is described by this; its bytes were checked when it was looked up."""

    job: str
    steps: int
    hash: str
    """Hexadecimal digest of everything that is stored, equal for equal state."""
    size_bytes: int
    tier: Literal["host", "disk"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BundleReport:
    """The report says where one bundle's state lies."""

    job: str
    tier: Tier
    """The highest tier that has it."""
    resident_bytes: int
    """Bytes in the budget, 0 if it is parked."""
    host_bytes: int
    disk_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ResidencyReport:
    """The report says what the tiers hold."""

    bundles: tuple[BundleReport, ...]
    budget_bytes: int
    host_bytes: int
    """Bytes in shared memory, including those of jobs that are not attached."""
    disk_bytes: int
    parked: int
    """How often state was moved out of the budget."""
    resumed: int
    demoted: int
    """How often state was moved from host memory to disk."""
    fetched: int
    """How often state was moved from disk to host memory."""
    written_bytes: int
    """Bytes that were copied out of the budget, without parts that had not changed."""
