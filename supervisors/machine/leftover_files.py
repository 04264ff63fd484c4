"""What killed processes leave in shared memory, on machines where no head looks after the run's end.

    process ends ─▶ its next life gets ready: it goes on with what is there
                └─▶ none does within the grace, and none is being started: the files go

Files are named after the run and the actor (``actors/weights/segments.py``). What a namesake of another node on this
machine has taken over is held by a living process, and stays.
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
    """This is what one process may have left."""

    run_dir: Path
    holders: tuple[str, ...]
    """Names of its actors."""
    pid: int
    ended_s: float

    def remove(self) -> int:
        """Remove it; how many files. Blocks."""
        return remove_held_by(self.run_dir, self.holders, self.pid)


class LeftoverFiles:
    """LeftoverFiles are kept by run and name of the process. Times are the caller's."""

    def __init__(self) -> None:
        self._left: dict[tuple[str, str], Left] = {}

    def ended(self, run_dir: str, name: str, holders: Iterable[str], pid: int, now_s: float) -> None:
        """The process ``name`` of the run at ``run_dir``, as the head names it, was ready and has ended."""
        left = Left(run_dir=Path(run_dir), holders=tuple(holders), pid=pid, ended_s=now_s)
        self._left[run_dir, name] = left

    def failed(self, run_dir: str, name: str, now_s: float) -> None:
        """A further life of it ended before it was ready: the grace begins anew."""
        if (left := self._left.get((run_dir, name))) is not None:
            self._left[run_dir, name] = replace(left, ended_s=now_s)

    def ready(self, run_dir: str, name: str) -> None:
        """Its next life is there, and looks after what is there."""
        self._left.pop((run_dir, name), None)

    def due(self, now_s: float, grace_s: float, starting: Collection[tuple[str, str]] = ()) -> list[Left]:
        """What nobody has come back for in ``grace_s``, nor is about to; each is named once."""
        names = [name for name, left in self._left.items() if now_s - left.ended_s >= grace_s and name not in starting]
        return [self._left.pop(name) for name in names]

    async def clear_away(self, ctx: Context, grace_s: float, starting: Collection[tuple[str, str]] = ()) -> None:
        """Remove what is due, as far as it goes: memory that stays costs less than the processes of this machine."""
        for left in self.due(ctx.now(), grace_s, starting):
            try:
                if files := await ctx.run_blocking(left.remove):
                    ctx.log.info("shared memory of an ended process given back", pid=left.pid, files=files)
            except (OSError, HeadraceError) as error:
                ctx.log.warning("shared memory of an ended process stays", pid=left.pid, why=str(error))
