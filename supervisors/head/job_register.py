"""The list of submitted jobs that a head runs, in a file that its next life reads.

launch ─▶ add ─▶ head.jobs.json ─▶ a restarted head launches them all, taking over the processes that still run
end    ─▶ remove

Entries that the heads of another machine process wrote, in an earlier run, are ignored.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import structlog

from actors.host.whole_file import write_whole
from configs.run_files import HEAD_JOBS

log = structlog.get_logger("headrace.head")


class _Recorded(msgspec.Struct):
    """The file holds this, as JSON."""

    owner: str
    run_dirs: list[str]


class JobRegister:
    """The register lists run directories in order of submission. ``owner``: the machine process that starts heads."""

    def __init__(self, run_root: Path, owner: str = "") -> None:
        self._path = run_root / HEAD_JOBS
        self._owner = owner

    def read(self) -> list[Path]:
        """Run directories of the jobs that are not over."""
        try:
            recorded = msgspec.json.decode(self._path.read_bytes(), type=_Recorded)
        except FileNotFoundError:
            return []
        except msgspec.DecodeError as error:  # written by an older version, or cut short by a power failure
            log.warning("the register of jobs is ignored", file=str(self._path), error=str(error))
            return []
        return [Path(name) for name in recorded.run_dirs] if recorded.owner == self._owner else []

    def add(self, run_dir: Path) -> None:
        self._write([*self.read(), run_dir])

    def remove(self, run_dir: Path) -> None:
        """Remove a job, also on a full disk: there the file is overwritten in place, padded to its present length.

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
        write_whole(self._path, self._encoded(run_dirs))

    def _encoded(self, run_dirs: list[Path]) -> bytes:
        return msgspec.json.encode(_Recorded(self._owner, [str(run_dir) for run_dir in dict.fromkeys(run_dirs)]))
