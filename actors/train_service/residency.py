"""Where the state of a service's bundles lies, and who has to leave when there is no room.

    budget   tensors that compute: a device's memory, or on a CPU a number of bytes that is counted and no more
      │ copy_out, then release                      ▲ restore
      ▼                                             │
    host     files in shared memory (``parked_files``): they outlive the process
      │ when it is full to its high water           ▲ prefetch, or whoever needs it now
      ▼                                             │
    disk     the same files in the service's directory

Invariants
- One bundle is *held*: the last that ``make_resident`` was called for. Nobody else computes; it is never moved.
- A stored copy is complete and hashed before the memory that it was made from is given back, and before an older copy
  is removed. So a process that is killed at any moment leaves every job its last stored state.
- Only parts that have changed since they were stored are written; a bundle that only scored writes nothing.
- The sum of ``resident_bytes`` of resident bundles never exceeds ``budget_bytes``, that of stored files in shared memory
  never ``host_bytes``, on disk never ``disk_bytes``. What stays of released bundles (``Parkable.released_bytes``), activations
  and frozen references are counted in none of them; ``report`` says the first. While state is fetched from disk,
  its copy there stays until the one in memory is whole.
- What fails leaves every other bundle where it was, or in a lower tier, and whole.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from actors.protocol.weights import Manifest
from actors.trainer.parking import Parkable

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


class Residency:
    """Owns the stored copies of a service's bundles, and moves state between tiers.

    Calls may overlap: moves are made one after the other, in the order in which they were asked for.
    """

    def __init__(
        self,
        rules: ResidencyRules,
        directory: Path,
        *,
        now: Callable[[], float],
        run_blocking: Callable[..., Awaitable[object]],
    ) -> None:
        """``directory``: the service's own, the same in each of its lives. ``now``, ``run_blocking``: those of ``ctx``."""
        raise NotImplementedError

    async def open(self) -> None:
        """Take over what earlier lives have left, and remove what of it is half-written. Before anything else.

        Raises:
            DirectoryInUse: another process has it, and keeps it.
        """
        raise NotImplementedError

    async def reserve(self, job: str, size_bytes: int) -> None:
        """Make room in the budget for a bundle that is about to be started; ``add`` or ``remove`` follows.

        Raises:
            NeverFits: the budget is smaller.
            NoRoomToPark: whoever would have to leave cannot be parked.
        """
        raise NotImplementedError

    async def find_parked(self, job: str) -> ParkedState | None:
        """The last stored state of ``job``, all of its bytes checked. What is damaged is removed, and not told of."""
        raise NotImplementedError

    async def add(self, job: str, backend: Parkable, *, parked: ParkedState | None = None) -> None:
        """Take charge of a backend that has been started, and so is resident. An older stored state of the job goes.

        ``parked``: let it go on from there. Gradient sums of a half step are dropped, the rest is restored.

        Raises:
            NeverFits, NoRoomToPark: as ``reserve``; the backend was not taken charge of, close it.
            ParkedStateDamaged: ``parked`` is of another model, or has been altered since; likewise.
        """
        raise NotImplementedError

    async def make_resident(self, job: str) -> float:
        """Have the state of ``job`` where it computes, and hold it there; seconds that this took, 0 if it was there.

        Raises:
            NoRoomToPark: whoever would have to leave cannot be parked; nobody was moved.
            ParkedStateDamaged: its stored copy was altered, and has been removed: this life of the bundle is over.
        """
        raise NotImplementedError

    async def prefetch(self, job: str) -> None:
        """Bring the state of ``job`` as near as it goes while others stay where they are. Never raises for want of room."""
        raise NotImplementedError

    async def store(self, job: str) -> None:
        """Write what of ``job`` has changed to the host tier; it stays resident.

        After a burst and before the job is told of it, this makes the step outlive the process.

        Raises:
            NoRoomToPark: there is no room; the last stored state is as it was.
        """
        raise NotImplementedError

    async def park(self, job: str) -> None:
        """``store``, then give the memory back.

        Raises:
            NoRoomToPark: as ``store``; the bundle stays resident.
        """
        raise NotImplementedError

    async def relieve(self) -> None:
        """Bring the host tier below its high water, where the disk has room. For moments when nobody waits."""
        raise NotImplementedError

    def expect(self, job: str, in_s: float | None) -> None:
        """Say when ``job`` is likely to be needed next; None: nobody knows. Who is needed last leaves first."""
        raise NotImplementedError

    async def export(self, job: str, path: Path, *, policy_version: int, chunk_bytes: int) -> Manifest:
        """The weights of a parked bundle as a segment, from its stored copy, without making it resident."""
        raise NotImplementedError

    async def remove(self, job: str, *, forget: bool = True) -> None:
        """Let a bundle go; its owner closes the backend. ``forget``: with its stored state, else that can be found."""
        raise NotImplementedError

    def report(self) -> ResidencyReport:
        """What lies where, now."""
        raise NotImplementedError

    async def close(self) -> None:
        """Let files go; stored state stays for the next life (``remove_parked`` removes it)."""
        raise NotImplementedError


def remove_parked(directory: Path) -> int:
    """Remove everything that lives of a service have left in shared memory and on disk; how many files.

    For whoever owns the service: when it is removed, when the head ends, and at the next start.
    """
    raise NotImplementedError
