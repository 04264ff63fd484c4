"""What several conversations use: the typed failure, the plain acknowledgement, and the refusal.

ReplyError
└── NotAccepted      the asker's fault: what it says contradicts the ledger, the text says how; do not retry
    └── EndedBefore  the episode has ended with another result, which stays
"""

from __future__ import annotations

import enum

import msgspec

from actors.core.errors import ReplyError
from actors.core.message import Message, message


class FailureKind(enum.StrEnum):
    """Names the kinds of failures, by whose fault they are."""

    INFRASTRUCTURE = "infrastructure"
    """A machine, process or link failed; retry elsewhere."""
    DATA = "data"
    """The prompt cannot be processed; it is retried a few times, then dropped."""
    NO_RESULT = "no_result"
    """The verifier timed out or failed; never a reward of 0."""
    BUG = "bug"
    """Ours or the user's code raised; the supervisor decides."""


class Failure(msgspec.Struct, frozen=True):
    kind: FailureKind
    message: str
    where: str = ""


@message("scheduler.acknowledged")
class Acknowledged(Message):
    pass


class NotAccepted(ReplyError):
    """The answer to a question that contradicts the ledger. The scheduler lives on, unchanged."""


class EndedBefore(NotAccepted):
    """The asker's fault: it ends an episode that has ended with another reward. That reward stays; do not retry."""
