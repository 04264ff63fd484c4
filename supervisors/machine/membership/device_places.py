"""Which process has which of a node's devices.

Invariants
- A process gets the devices that the fewest processes have, the first of the node's order among equals: roles may share
  one, as trainer and rollout worker do on a machine with a single one.
- The ranks of one group never share: collectives on one device would wait for themselves.
- A device is free again once it is released; releasing it twice is harmless.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence


class DevicePlaces:
    """The devices of one node, each with the processes that have it."""

    def __init__(self, ids: Sequence[str] = ()) -> None:
        self._users: dict[str, set[str]] = {device: set() for device in ids}

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(self._users)

    @property
    def users(self) -> Mapping[str, Collection[str]]:
        """Processes by device, in the node's order; of a free one: none."""
        return self._users

    def __str__(self) -> str:
        """The devices and their processes, such as ``0 j.trainer, j.rollout-0 · 1 free``."""
        return " · ".join(f"{device} {', '.join(sorted(users)) or 'free'}" for device, users in self._users.items())

    @property
    def free(self) -> tuple[str, ...]:
        """Devices that no process has."""
        return tuple(device for device, users in self._users.items() if not users)

    def fits(self, count: int) -> bool:
        """Whether ``count`` processes can have a device each. A node without devices computes on its cores."""
        return not self._users or count <= len(self._users)

    def take(self, process: str, count: int, apart: Collection[str] = ()) -> tuple[str, ...]:
        """Give ``process`` ``count`` devices that no process of ``apart`` has; fewer if there are not enough."""
        self.release(process)
        others = set(apart) - {process}
        allowed = [device for device, users in self._users.items() if not users & others]
        chosen = sorted(allowed, key=lambda device: len(self._users[device]))[:count]
        self.enter(process, chosen)
        return tuple(chosen)

    def enter(self, process: str, devices: Collection[str]) -> None:
        """Note that ``process`` has these already; devices that the node does not have are ignored."""
        self.release(process)
        for device in devices:
            if device in self._users:
                self._users[device].add(process)

    def release(self, process: str) -> None:
        """Take all devices from ``process``."""
        for users in self._users.values():
            users.discard(process)

    def of(self, process: str) -> tuple[str, ...]:
        """Devices that ``process`` has."""
        return tuple(device for device, users in self._users.items() if process in users)
