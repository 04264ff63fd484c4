"""What several conversations use: how a failure is typed, whoever sees it, and the plain acknowledgement."""

from __future__ import annotations

import enum

import msgspec

from actors.core.message import Message, message


class FailureKind(enum.StrEnum):
    """A failure has one of four kinds, which say whose fault it is."""

    INFRASTRUCTURE = "infrastructure"
    """A machine, process or link failed; retry elsewhere."""
    DATA = "data"
    """This prompt cannot be processed; a small retry budget, then dropped."""
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
