"""The drivers of a job's episodes: environment workers, and agents outside.

    RegisterEnvironment ─▶ a lease, and the episodes that it continues
    RenewLease ──────────▶ its lease lasts longer   lapsed, Down, a later life ─▶ lost: its episodes need another driver

Invariants
- An episode has at most one driver, and a driver has at most as many episodes as slots.
- A life of a worker that a later one has replaced does not come back.
- All agents outside together are one driver, without a lease: each of their episodes has its own deadline.
- An episode's time stands still while its job is paused (``WorkingTime``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from actors.core.lease import LeaseIssuer
from actors.protocol.episodes import EpisodeName
from actors.scheduler.episode_rows import Key
from transport.address import ActorAddress

OUTSIDE: Final = "outside"
"""Name of the driver that stands for all agents outside; no actor has this name."""


class WorkingTime:
    """A job's clock, which stands still while the job is paused."""

    def __init__(self, now: float, *, paused: bool) -> None:
        self._now, self._paused = now, paused
        self.stood_s = 0.0
        """Seconds for which the clock has stood still."""

    def read(self, now: float, *, paused: bool) -> float:
        """The working time at ``now``. Must be called whenever the job is ``paused`` or resumed."""
        if self._paused:
            self.stood_s += now - self._now
        self._now, self._paused = now, paused
        return now - self.stood_s


@dataclass(slots=True)
class Drive:
    """Holds an episode that is driven. Its times are working time."""

    name: EpisodeName
    begun_s: float
    due_s: float
    """Time by which its driver should have said how it ended."""
    stood_s: float
    """``WorkingTime.stood_s`` at its beginning."""


class Failed(NamedTuple):
    """Counts how often an episode has failed so far."""

    times: int
    """Number of failures of its environment."""
    losses: int
    """Number of infrastructure failures that its drivers have reported."""
    by: str
    """Name of its last driver."""
    rests_until_s: float
    """Time before which the episode is not begun again."""


@dataclass(slots=True)
class Driver:
    """Holds one life of an environment worker, or all agents outside, with the episodes that it drives."""

    name: str
    slots: int
    address: ActorAddress | None = None
    lease: LeaseIssuer | None = None
    driven: dict[Key, Drive] = field(default_factory=dict[Key, Drive])
    former: list[int] = field(default_factory=list[int])
    """Incarnations of this worker's earlier lives."""

    @property
    def free(self) -> int:
        return self.slots - len(self.driven)

    def has_lapsed(self, now: float) -> bool:
        return self.lease is not None and self.lease.holder(now) is None


class Drivers:
    """Holds all drivers of a job, and which of them drives which episode."""

    def __init__(self, lives_kept: int) -> None:
        """``lives_kept``: number of earlier lives of each worker to remember; older ones have long been killed."""
        self._lives_kept = lives_kept
        self.by_name: dict[str, Driver] = {}
        self._of: dict[Key, Driver] = {}

    def __len__(self) -> int:
        """Number of episodes that are driven."""
        return len(self._of)

    def __contains__(self, key: Key) -> bool:
        return key in self._of

    def of(self, key: Key) -> Driver | None:
        return self._of.get(key)

    def add(self, driver: Driver) -> None:
        self.by_name[driver.name] = driver

    def has_replaced(self, address: ActorAddress) -> bool:
        """Whether the life at ``address`` is one that a newer one has replaced."""
        known = self.by_name.get(address.name)
        return known is not None and address.peer.incarnation in known.former

    def next_life(self, address: ActorAddress, slots: int) -> Driver:
        """Enter a life of a worker in place of the one before, which loses its episodes.

        A life that registers again keeps its episodes.
        """
        before = self.by_name.get(address.name)
        driver = Driver(address.name, slots, address)
        if before is not None and before.address is not None:
            driver.former = before.former
            left = self.lose(before)
            if before.address.peer == address.peer:
                for drive in left:
                    self.give(driver, drive)
            else:
                driver.former = [*before.former, before.address.peer.incarnation][-self._lives_kept :]
        self.add(driver)
        return driver

    def lose(self, driver: Driver) -> list[Drive]:
        """Remove a driver that is gone; returns the episodes that it drove."""
        self.by_name.pop(driver.name, None)
        left = list(driver.driven.values())
        for drive in left:
            self.release(Key.of(drive.name))
        return left

    def give(self, driver: Driver, drive: Drive) -> None:
        key = Key.of(drive.name)
        driver.driven[key] = drive
        self._of[key] = driver

    def release(self, key: Key) -> Drive | None:
        """Note that nobody drives the episode any more."""
        driver = self._of.pop(key, None)
        return None if driver is None else driver.driven.pop(key, None)

    def overdue(self, now: float) -> Iterator[tuple[Driver, Drive]]:
        """Episodes whose driver has not reported their end in time."""
        for driver in list(self.by_name.values()):
            for drive in [drive for drive in driver.driven.values() if now >= drive.due_s]:
                yield driver, drive

    def drives(self, driver: Driver, name: EpisodeName) -> bool:
        """Whether ``driver`` drives this life of the episode."""
        drive = driver.driven.get(Key.of(name))
        return self.of(Key.of(name)) is driver and drive is not None and drive.name == name

    @property
    def workers(self) -> int:
        """Number of environment workers that are registered."""
        return sum(driver.address is not None for driver in self.by_name.values())

    def freest(self, but: str) -> Driver | None:
        """The worker with the most free slots, if possible not the one called ``but``; None: none is free."""
        free = [driver for driver in self.by_name.values() if driver.free > 0 and driver.address is not None]
        others = [driver for driver in free if driver.name != but]
        return max(others or free, key=lambda driver: driver.free, default=None)
