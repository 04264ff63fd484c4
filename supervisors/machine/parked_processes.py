"""The processes of this machine that have left their job and wait for another one (``tenancy``)."""

from __future__ import annotations

from collections import deque

from supervisors.machine.process import Child, Launch

_Kind = tuple[str, tuple[str, ...] | None]
"""Its role, and the devices that it sees."""


class ParkedProcesses:
    """It holds them by role, at most ``most`` in all; beyond that the one that has waited longest goes.

    A process cannot change the devices that it sees: it is given only work that wants the same.
    Work goes to the one that has waited shortest: what it has loaded is most likely still in memory.
    """

    def __init__(self, most: int = 0) -> None:
        self.most = most
        self._waiting: deque[tuple[_Kind, Child]] = deque()

    def add(self, role: str, devices: tuple[str, ...] | None, process: Child) -> None:
        self._waiting.append(((role, devices), process))
        while len(self._waiting) > self.most:
            self._waiting.popleft()[1].dismiss()

    def serve(self, role: str, launch: Launch) -> Child | None:
        """Give this work to one that waits; None: it is not for such, or there is none of that role."""
        while launch.may_stay and (waiting := self._take((role, launch.devices))) is not None:
            if (process := waiting.serve(launch)) is not None:
                return process
            waiting.dismiss()
        return None

    def _take(self, kind: _Kind) -> Child | None:
        self._waiting = deque((known, process) for known, process in self._waiting if process.stays)
        for entry in reversed(self._waiting):
            if entry[0] == kind:
                self._waiting.remove(entry)
                return entry[1]
        return None

    async def end(self) -> None:
        """End all of them, and wait until they are gone."""
        processes = [process for _, process in self._waiting if process.stays]
        self._waiting.clear()
        for process in processes:
            process.dismiss()
        for process in processes:
            await process.reaped()
