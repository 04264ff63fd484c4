"""Whose machines a cluster's jobs are: the mark that a run leaves on all that it starts, and the names it has used.

    machines.json of the run directory: mark, where it was drawn, number of names used
        mark ─▶ on each job of the cluster ─▶ found there at the next start: left by a former life, taken away first
        life ─▶ beside it: which process has started the job; which one may, a claim in the cluster decides

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

from configs.names import NODE_NAME_CHARACTERS_MAX
from supervisors.tree.errors import ProviderError

FILE: Final = "machines.json"
_NUMBER_CHARACTERS: Final = 8
"""Room that a name leaves for its dash and number."""


class Ownership:
    """It is a run's, for one life. ``mark`` has only letters, digits and dashes, 63 at most."""

    def __init__(self, job: str, run_dir: Path, draw: Callable[[], str] = lambda: secrets.token_hex(4)) -> None:
        self._path = run_dir / FILE
        prefix = re.sub(r"[^a-z0-9]+", "-", job.lower())[: NODE_NAME_CHARACTERS_MAX - _NUMBER_CHARACTERS]
        self._prefix = prefix.strip("-")
        kept = self._kept()
        own = kept.get("at") == str(self._path)
        self.mark = str(kept["mark"]) if own else f"headrace-{self._prefix[:32].strip('-')}-{draw()}"
        self._used = int(kept["used"]) if own else 0

    def next_name(self) -> str:
        """A name for a machine that none has ever had: ``<job>-<number>``.

        Raises:
            ProviderError: it cannot be written down.
        """
        self._used += 1
        self.keep()
        return f"{self._prefix}-{self._used}"

    def keep(self) -> str:
        """Write the mark down, and return it: for machines whose names others draw.

        Raises:
            ProviderError: it cannot be written down.
        """
        text = json.dumps({"mark": self.mark, "at": str(self._path), "used": self._used})
        partial = self._path.with_suffix(".partial")
        try:
            partial.write_text(text + "\n", "utf-8")
            partial.replace(self._path)
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
