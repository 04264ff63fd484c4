"""Errors that a program may meet with its runs and its models. Continues the tree of ``transport/errors.py``.

HeadraceError
├── RunFailed       a run has ended without finishing; ``summary`` says how far it came; resume may continue it
├── NoRun           there is no run where one was looked for; name another place
├── ModelRefused    what was asked of a model cannot be done, and has changed nothing; the text says what to change
└── ModelLost       what computes for a model failed again and again; ask again, or load what was saved

Beside them: ConfigError (the job or its place is wrong; correct it), DirectoryInUse (another run lives there),
NoSpaceLeft, and the ControlErrors of a run that is asked for something (``actors/control/errors.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transport.errors import HeadraceError


class RunFailed(HeadraceError):
    """A run that is waited for has failed. ``summary`` is what ``headrace run --json`` prints of such a run."""

    def __init__(self, summary: Mapping[str, Any], about: str) -> None:
        self.summary = dict(summary)
        why = self.summary.get("error") or f"it is {self.summary.get('state')}, and has not said why"
        super().__init__(f"{about}: {why}")


class NoRun(HeadraceError):
    """There is no run at the place that was named. The message says what was looked for."""


class ModelRefused(HeadraceError):
    """A call of a model or a sampler is wrong in itself: the text names the field, the value, and what is expected."""


class ModelLost(HeadraceError):
    """A call of a model or a sampler failed here, several times, through no fault of the call. Asking again is safe."""
