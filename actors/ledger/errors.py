"""What the scheduler's own parts raise.

HeadraceError
└── SchedulerError
    ├── IllegalTransition   our bug, or the sender's: the event was refused and nothing changed; do not retry
    ├── JournalFailed       infrastructure: the disk refused; what was not yet durable may be lost
    └── JournalUnreadable   configuration: not a journal, or one of another version; do not retry

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


class JournalUnreadable(SchedulerError):
    """The file is no journal, or was written by another version; the message says which."""


class NotAccepted(ReplyError):
    """The answer to a question that contradicts the ledger. The scheduler lives on, unchanged."""
