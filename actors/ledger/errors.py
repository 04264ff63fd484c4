"""Errors of the ledger, of the journal, and of the scheduler that owns both.

HeadraceError
└── SchedulerError
    ├── IllegalTransition   our bug, or the sender's: the event was refused and nothing changed; do not retry
    │   └── Nonsense        the worker's: no sound engine says such tokens; its samples are generated elsewhere
    ├── JournalFailed       infrastructure: the disk refused; what was not yet durable may be lost
    │   └── JournalFull     infrastructure: the disk is full; resume when there is room
    └── JournalUnreadable   configuration: no journal, a damaged one, or one of another version; do not retry
        └── JournalDamaged  what was written is not there, or not as it was written

A message that contradicts the ledger is answered with NotAccepted (``actors/protocol/failures.py``).
"""

from __future__ import annotations

import numpy as np

from transport.errors import HeadraceError


class SchedulerError(HeadraceError):
    """Something in the ledger, the journal or the scheduler failed."""


class IllegalTransition(SchedulerError):
    """An event does not fit the state that the ledger is in."""


class Nonsense(IllegalTransition):
    """No sound engine has said these tokens. ``samples``: hand-outs that may be the cause; else their worker is."""

    def __init__(self, what: str, samples: np.ndarray | None = None) -> None:
        super().__init__(what)
        self.samples = np.empty(0, np.int64) if samples is None else samples


class JournalFailed(SchedulerError):
    """The journal could not be written."""


class JournalFull(JournalFailed):
    """The journal's disk has no room. The run ends with what is durable, and goes on once there is some."""

    permanent = True


class JournalUnreadable(SchedulerError):
    """The file is no journal, or was written by another version; the message says which."""

    permanent = True


class JournalDamaged(JournalUnreadable):
    """Events are missing or were altered: what is left would be another run's past. The message names the first."""
