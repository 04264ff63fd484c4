"""Removes what killed processes leave in shared memory, on machines where no head does so at the run's end.

    process ends ─▶ its next life gets ready: it goes on with the files
                └─▶ no life does within the grace, and none is being started: the files are removed

Files are named after the run and the actor (``actors/weights/segments.py``). Files that an actor of the same name has
taken over, of another node on this machine, are held by a living process, and stay.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from actors.core.context import Context
from actors.weights.segments import remove_held_by
from transport.errors import HeadraceError


@dataclass(frozen=True, kw_only=True, slots=True)
class Left:
    """What one process may have left."""

    run_dir: Path
    holders: tuple[str, ...]
    """Names of the process's actors."""
    pid: int
    ended_s: float

    def remove(self) -> int:
        """Remove the files; returns how many. Blocks."""
        return remove_held_by(self.run_dir, self.holders, self.pid)


class LeftoverFiles:
    """Keeps what ended processes may have left, by run and name of the process. Times are the caller's."""

    def __init__(self) -> None:
        self._left: dict[tuple[str, str], Left] = {}

    def ended(self, run_dir: str, name: str, holders: Iterable[str], pid: int, now_s: float) -> None:
        """Note that a process that was ready has ended. ``run_dir`` and ``name``: as the head names them."""
        left = Left(run_dir=Path(run_dir), holders=tuple(holders), pid=pid, ended_s=now_s)
        self._left[run_dir, name] = left

    def failed(self, run_dir: str, name: str, now_s: float) -> None:
        """Note that a further life of the process ended before it was ready: the grace begins anew."""
        if (left := self._left.get((run_dir, name))) is not None:
            self._left[run_dir, name] = replace(left, ended_s=now_s)

    def ready(self, run_dir: str, name: str) -> None:
        """Forget the process: its next life is ready, and takes over the files."""
        self._left.pop((run_dir, name), None)

    def due(self, now_s: float, grace_s: float, starting: Collection[tuple[str, str]] = ()) -> list[Left]:
        """Entries of processes with no new life within ``grace_s``, nor one being started; each is returned once."""
        names = [name for name, left in self._left.items() if now_s - left.ended_s >= grace_s and name not in starting]
        return [self._left.pop(name) for name in names]

    async def clear_away(self, ctx: Context, grace_s: float, starting: Collection[tuple[str, str]] = ()) -> None:
        """Remove what is due, and log errors: memory that stays is better than a node agent that crashes."""
        for left in self.due(ctx.now(), grace_s, starting):
            try:
                if files := await ctx.run_blocking(left.remove):
                    ctx.log.info("shared memory of an ended process given back", pid=left.pid, files=files)
            except (OSError, HeadraceError) as error:
                ctx.log.warning("shared memory of an ended process stays", pid=left.pid, why=str(error))
