"""Interface behind the control socket: ``supervisors`` implements it, and tests have implementations of their own.

Invariants
- Each verb of ``verbs.VERBS`` that the server does not answer by itself has a method of the same name. The method takes
  the verb's arguments by name, and returns what the verb's ``gives`` describes.
- Arguments have been checked for type and range. ``job`` None means the only job there is; for ``watch``, all jobs.
- Results are plain values: maps with text keys, lists, text, numbers, booleans, None. They are what a client sees.
- A method refuses with an error of ``actors/control/errors.py``; the server turns a ConfigError into BadConfig and an
  AskError into NotNow, and reports anything else as our bug.
- Every call but ``watch`` has a deadline, kept by the server: a method may be cancelled at any await.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Protocol

Plain = dict[str, Any]


class ControlBackend(Protocol):
    """The running system as its operator sees it: what can be asked, and what can be done."""

    def watch(self, job: str | None) -> AsyncGenerator[Plain, None]:
        """Yield events, each with at least ``kind``, until the job ends; with None those of all jobs, without end."""
        ...
