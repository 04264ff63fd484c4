"""What the scheduler's own parts raise.

HeadraceError
└── SchedulerError
    ├── IllegalTransition   our bug, or the sender's: the event was refused and nothing changed; do not retry
    ├── JournalFailed       infrastructure: the disk refused; what was not yet durable may be lost
    │   └── JournalFull     infrastructure: the disk is full; resume when there is room
    └── JournalUnreadable   configuration: no journal, a damaged one, or one of another version; do not retry
        └── JournalDamaged  what was written is not there, or not as it was written

ReplyError
└── NotAccepted             the asker's fault: what it says contradicts the ledger, the text says how; do not retry
"""

from __future__ import annotations

from actors.core.errors import ReplyError
from transport.errors import HeadraceError


class SchedulerError(HeadraceError):
    """Something in the ledger, the journal or the scheduler failed."""


class IllegalTransition(SchedulerError):
    """An event does not fit the state that the ledger is in."""


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


class NotAccepted(ReplyError):
    """The answer to a question that contradicts the ledger. The scheduler lives on, unchanged."""
