"""What a head knows of one machine: its agent, its slots, and who has them.

a worker         takes one slot together with all of its ranks
a trainer's rank takes a slot of its own, which is kept for it (``replica_places``)
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from supervisors.machine.membership.device_places import DevicePlaces
from transport.address import ActorAddress


@dataclass
class Node:
    """A node is one machine of the cluster, as the head knows it."""

    name: str
    agent: ActorAddress
    slots: int
    local: bool
    kind: str = "reserved"
    owner: str = ""
    """The only job whose processes may be placed here, since its provider made the machine; empty: any may."""
    placed: dict[str, str] = field(default_factory=dict[str, str])
    """Processes that are placed here → the process whose slot each takes: its own, or one slot for its group."""
    kept: set[str] = field(default_factory=set[str])
    """Trainers' ranks for each of which a slot is kept here, whether the rank runs or not."""
    lent: set[str] = field(default_factory=set[str])
    """Processes that give up their slot when a trainer's rank needs it, since others can do their work."""
    devices: DevicePlaces = field(default_factory=DevicePlaces)
    draining: bool = False
    leaving: bool = False
    """Whether the machine itself has said that it will leave."""
    leaves_s: float = 0.0
    """Loop time at which a draining node is gone; if in the past, its processes are to end at once."""

    @property
    def slots_used(self) -> int:
        return len({*self.placed.values(), *self.kept})

    def room(self, ranks: int) -> int:
        """How many workers of ``ranks`` ranks fit here: one per slot, but no more than there are devices for."""
        slots, devices = self.slots - len(self.kept), len(self.devices.ids) - len(self.kept)
        return max(0, min(slots, devices // ranks) if self.devices.ids and ranks > 1 else slots)

    def takes_one_more(self, ranks: int) -> bool:
        """Whether there is room for one more worker of ``ranks`` ranks."""
        return len({*self.placed.values()} - self.kept) < self.room(ranks)

    def admits(self, process: str) -> bool:
        """Whether the job of ``process`` may use this node."""
        return not self.owner or process.startswith(f"{self.owner}.")

    def put(self, process: str, group: Collection[str], *, lent: bool = False) -> None:
        """Place ``process`` here, in one slot with the others of its ``group`` if it has one."""
        self.placed[process] = process if process in self.kept else min({*group, process})
        if lent:
            self.lent.add(process)

    def let_go(self, process: str) -> None:
        """Release the slot and the devices of ``process``."""
        self.placed.pop(process, None)
        self.lent.discard(process)
        self.devices.release(process)
