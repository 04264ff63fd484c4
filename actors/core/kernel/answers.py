"""What the kernel itself says: the bodies of answers that are no reply, and who is to get an answer.

Invariants
- A question (ask or stream) is answered at most once; a second answer is dropped where it is made.
- Errors travel as text and names, never as objects.
"""

from __future__ import annotations

from typing import NamedTuple

from actors.core.errors import (
    AskError,
    RefusalReason,
    Refused,
    RemoteError,
    SentNoReply,
    StreamDown,
    Unanswerable,
)
from actors.core.message import Message, message
from actors.core.reason import is_permanent
from actors.core.watch import Gone
from transport.address import ActorAddress, PeerId


@message("core.refusal")
class Refusal(Message):
    """The question was not executed."""

    reason: RefusalReason
    detail: str = ""


@message("core.failure")
class Failure(Message):
    """The handler raised. ``declared``: a ReplyError, the actor lives on. ``permanent``: as of HeadraceError."""

    error_type: str
    detail: str
    declared: bool = False
    permanent: bool = False
    """True if asking again can only meet the same error."""


@message("core.target_gone")
class TargetGone(Message):
    """The actor ended while the question was being worked on."""

    reason: Gone
    detail: str = ""
    permanent: bool = False
    """True if the actor's error is one that its next life can only meet again."""


NoReply = Refusal | Failure | TargetGone
"""The answers that are no reply."""


class Caller(NamedTuple):
    """A caller is who asked: answers go to ``request_id`` at ``peer``, this process included."""

    peer: PeerId
    request_id: int


def failure_of(error: Exception, *, declared: bool) -> Failure:
    """Describe an exception so that it can cross a process boundary."""
    return Failure(error_type=type(error).__name__, detail=str(error), declared=declared, permanent=is_permanent(error))


def error_of(answer: NoReply, target: ActorAddress, question: str, *, stream: bool) -> AskError:
    """The exception that an answer other than a reply means to whoever asked."""
    match answer:
        case Refusal():
            return Refused(answer.reason, answer.detail, target=target, question=question)
        case Failure():
            kind = Unanswerable if answer.permanent else RemoteError
            return kind(answer.error_type, answer.detail, declared=answer.declared, target=target, question=question)
        case TargetGone() if stream:
            return StreamDown(answer.reason, target=target, question=question)
        case TargetGone():
            text = f"{target} {answer.reason} while it worked on {question}: {answer.detail}"
            return SentNoReply(text, target=target, question=question)
