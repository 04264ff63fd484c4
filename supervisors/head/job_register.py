"""Which submitted jobs a head runs, in a file that its next life reads.

launch ─▶ add ─▶ head.jobs.json ─▶ a head that was started again launches them all, with what still runs of each
end    ─▶ remove

What heads of another machine process have left there, of an earlier run, counts as nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec
import structlog

log = structlog.get_logger("headrace.head")

FILE: Final = "head.jobs.json"
"""File name, in the directory that holds the run directories."""


class _Recorded(msgspec.Struct):
    """It is what the file holds."""

    owner: str
    run_dirs: list[str]


class JobRegister:
    """A job register keeps run directories, in order of submission. ``owner``: the machine process of its heads."""

    def __init__(self, run_root: Path, owner: str = "") -> None:
        self._path = run_root / FILE
        self._owner = owner

    def read(self) -> list[Path]:
        """Those of the jobs that are not over."""
        try:
            recorded = msgspec.json.decode(self._path.read_bytes(), type=_Recorded)
        except FileNotFoundError:
            return []
        except msgspec.DecodeError as error:  # of a version before this one, or cut short by a power failure
            log.warning("the register of jobs counts as nothing", file=str(self._path), error=str(error))
            return []
        return [Path(name) for name in recorded.run_dirs] if recorded.owner == self._owner else []

    def add(self, run_dir: Path) -> None:
        self._write([*self.read(), run_dir])

    def remove(self, run_dir: Path) -> None:
        """On a full disk too: there the file is written over, padded to the length that it has.

        Raises:
            OSError: not even that can be written.
        """
        left = [known for known in self.read() if known != run_dir]
        try:
            self._write(left)
        except OSError:
            with self._path.open("r+b") as file:
                file.write(self._encoded(left).ljust(self._path.stat().st_size))

    def _write(self, run_dirs: list[Path]) -> None:
        partial = self._path.with_name(self._path.name + ".partial")
        partial.write_bytes(self._encoded(run_dirs))
        partial.replace(self._path)

    def _encoded(self, run_dirs: list[Path]) -> bytes:
        return msgspec.json.encode(_Recorded(self._owner, [str(run_dir) for run_dir in dict.fromkeys(run_dirs)]))
