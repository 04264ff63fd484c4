"""Which submitted jobs a head runs, in a file that its next life reads.

launch ─▶ add ─▶ head.jobs.json ─▶ a head that was started again launches them all, with what still runs of each
end    ─▶ remove
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

FILE: Final = "head.jobs.json"
"""File name, in the directory that holds the run directories."""


class JobRegister:
    """A job register keeps run directories, in order of submission."""

    def __init__(self, run_root: Path) -> None:
        self._path = run_root / FILE

    def read(self) -> list[Path]:
        """Those of the jobs that are not over."""
        try:
            return [Path(name) for name in json.loads(self._path.read_text("utf-8"))]
        except FileNotFoundError:
            return []

    def add(self, run_dir: Path) -> None:
        self._write([*self.read(), run_dir])

    def remove(self, run_dir: Path) -> None:
        self._write([known for known in self.read() if known != run_dir])

    def clear(self) -> None:
        """Nothing runs: this head is the first of its machine process."""
        self._path.unlink(missing_ok=True)

    def _write(self, run_dirs: list[Path]) -> None:
        partial = self._path.with_name(self._path.name + ".partial")
        partial.write_text(json.dumps([str(run_dir) for run_dir in dict.fromkeys(run_dirs)]), encoding="utf-8")
        partial.replace(self._path)
