"""What a head knows of one machine: its agent, its slots, and who has them.

a worker         takes a slot, with all of its ranks
a trainer's rank takes a slot of its own, which is kept for it (``replica_places``)
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from supervisors.machine.device_places import DevicePlaces
from transport.address import ActorAddress


@dataclass
class Node:
    """A node is one machine."""

    name: str
    agent: ActorAddress
    slots: int
    local: bool
    kind: str = "reserved"
    placed: dict[str, str] = field(default_factory=dict[str, str])
    """Processes that were placed on it and have not been released → whose slot each takes: its own, or its group's."""
    kept: set[str] = field(default_factory=set[str])
    """Ranks of trainers for each of which a slot is kept here, whether it runs or not."""
    lent: set[str] = field(default_factory=set[str])
    """Processes that give up their slot when a trainer's rank wants it: others of their kind take their place."""
    devices: DevicePlaces = field(default_factory=DevicePlaces)
    draining: bool = False
    leaving: bool = False
    """True if the machine itself has said that it goes."""
    leaves_s: float = 0.0
    """Loop time at which a draining node is gone; in the past: its processes are to end at once."""

    @property
    def slots_used(self) -> int:
        return len({*self.placed.values(), *self.kept})

    def room(self, ranks: int) -> int:
        """How many workers of so many ranks it takes: one a slot, but no more than have devices of their own."""
        slots, devices = self.slots - len(self.kept), len(self.devices.ids) - len(self.kept)
        return max(0, min(slots, devices // ranks) if self.devices.ids and ranks > 1 else slots)

    def takes_one_more(self, ranks: int) -> bool:
        """Whether it has room for one more worker of so many ranks."""
        return len({*self.placed.values()} - self.kept) < self.room(ranks)

    def put(self, process: str, group: Collection[str], *, lent: bool = False) -> None:
        """``process`` is here, and with it the others of its group if it has one."""
        self.placed[process] = process if process in self.kept else min({*group, process})
        if lent:
            self.lent.add(process)

    def let_go(self, process: str) -> None:
        """``process`` is not here any more."""
        self.placed.pop(process, None)
        self.lent.discard(process)
        self.devices.release(process)
