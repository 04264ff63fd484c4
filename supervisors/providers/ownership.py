"""Tells which run owns a cluster's jobs: the mark that a run puts on each job it starts, and the names it has used.

    machines.json of the run directory: mark, where it was drawn, number of names used
        mark ─▶ on each job of the cluster ─▶ found there at the next start: left by a former life, taken away first
        life ─▶ beside it: which process has started the job; a claim in the cluster decides which one may

Invariants
- A mark belongs to one run directory at one path: a copy of the directory draws a new one.
- A name is written down before it is used, so that no life of the run uses it again.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

from actors.host.whole_file import write_whole
from configs.names import NODE_NAME_CHARACTERS_MAX
from configs.run_files import MACHINES
from supervisors.tree.errors import ProviderError

_NUMBER_CHARACTERS: Final = 8
"""Characters that a name keeps free for its dash and number."""


def name_prefix(job: str) -> str:
    """The beginning of the names of a job's machines, before a dash."""
    prefix = re.sub(r"[^a-z0-9]+", "-", job.lower())[: NODE_NAME_CHARACTERS_MAX - _NUMBER_CHARACTERS]
    return prefix.strip("-")


class Ownership:
    """Holds a run's mark and the names that it has used. ``mark`` has only letters, digits and dashes, 63 at most."""

    def __init__(self, job: str, run_dir: Path, draw: Callable[[], str] = lambda: secrets.token_hex(4)) -> None:
        self._path = run_dir / MACHINES
        self._prefix = name_prefix(job)
        kept = self._kept()
        own = kept.get("at") == str(self._path)
        self.mark = str(kept["mark"]) if own else f"headrace-{self._prefix[:32].strip('-')}-{draw()}"
        self._used = int(kept["used"]) if own else 0

    def next_name(self) -> str:
        """Draw a name that no machine of this run has ever had: ``<job>-<number>``.

        Raises:
            ProviderError: the name cannot be written down.
        """
        self._used += 1
        self.keep()
        return f"{self._prefix}-{self._used}"

    def keep(self) -> str:
        """Write the mark down, and return it: for machines that are not named by ``next_name``.

        Raises:
            ProviderError: the mark cannot be written down.
        """
        text = json.dumps({"mark": self.mark, "at": str(self._path), "used": self._used})
        try:
            write_whole(self._path, text + "\n")
        except OSError as error:
            raise ProviderError(f"the mark of the run's machines cannot be written to {self._path}: {error}") from error
        return self.mark

    def _kept(self) -> dict[str, Any]:
        try:
            found: Any = json.loads(self._path.read_text("utf-8"))
            kept = cast("dict[str, Any]", found)
            return {"mark": str(kept["mark"]), "at": str(kept["at"]), "used": int(kept["used"])}
        except (OSError, ValueError, KeyError, TypeError):
            return {}
