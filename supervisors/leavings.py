"""What killed processes leave in shared memory, on machines where no head looks after the run's end.

    process ends ─▶ its next life begins within the grace: it goes on with what is there
                └─▶ it does not: the files go

Files are named after the run, the node, the process and the actor (``actors/weights/segments.py``): another node's
process on this machine, one of the same name too, keeps its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from actors.weights.segments import remove_held_by
from transport.address import ActorAddress


@dataclass(frozen=True, kw_only=True, slots=True)
class Left:
    """What one process may have left."""

    run_dir: Path
    holders: tuple[ActorAddress, ...]
    """Its actors."""
    pid: int
    ended_s: float

    def remove(self) -> int:
        """Remove it; how many files. Blocks."""
        return remove_held_by(self.run_dir, self.holders, self.pid)


class Leavings:
    """By name of the process. Times are the caller's."""

    def __init__(self) -> None:
        self._left: dict[str, Left] = {}

    def ended(self, name: str, run_dir: str, holders: Iterable[ActorAddress], pid: int, now_s: float) -> None:
        """The process ``name`` of the run at ``run_dir``, as the head names it, has ended."""
        self._left[name] = Left(run_dir=Path(run_dir), holders=tuple(holders), pid=pid, ended_s=now_s)

    def begins(self, name: str) -> None:
        """Its next life begins, and looks after what is there."""
        self._left.pop(name, None)

    def due(self, now_s: float, grace_s: float) -> list[Left]:
        """What nobody has come back for in ``grace_s``; each is named once."""
        names = [name for name, left in self._left.items() if now_s - left.ended_s >= grace_s]
        return [self._left.pop(name) for name in names]
