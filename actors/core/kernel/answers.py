"""Answers that the kernel sends in place of a reply, and the caller to whom an answer goes.

Invariants
- A question (ask or stream) is answered at most once; a second answer is dropped by the process that answers.
- Errors travel as text and names, never as objects.
"""

from __future__ import annotations

from typing import NamedTuple

from actors.core.errors import AskError, RefusalReason, Refused, RemoteError, SentNoReply, StreamDown, Unanswerable
from actors.core.message import Message, message
from actors.core.reason import is_permanent
from actors.core.watch import Gone
from transport.address import ActorAddress, PeerId


@message("core.refusal")
class Refusal(Message):
    """Answers a question that was not executed."""

    reason: RefusalReason
    detail: str = ""


@message("core.failure")
class HandlerFailure(Message):
    """Answers a question whose handler raised. ``declared``: it raised a ReplyError, so the actor lives on."""

    error_type: str
    detail: str
    declared: bool = False
    permanent: bool = False
    """Whether asking again would only meet the same error (``HeadraceError.permanent``)."""


@message("core.target_gone")
class TargetGone(Message):
    """Answers a question whose actor ended while it worked on it."""

    reason: Gone
    detail: str = ""
    permanent: bool = False
    """Whether the actor's next life would only meet the same error."""


NoReply = Refusal | HandlerFailure | TargetGone
"""The answers that are no reply."""


class Caller(NamedTuple):
    """Identifies an asker: answers go to ``request_id`` at ``peer``, which may be this process."""

    peer: PeerId
    request_id: int


def failure_of(error: Exception, *, declared: bool) -> HandlerFailure:
    """Describe an exception so that it can cross a process boundary."""
    return HandlerFailure(
        error_type=type(error).__name__, detail=str(error), declared=declared, permanent=is_permanent(error)
    )


def error_of(answer: NoReply, target: ActorAddress, question: str, *, stream: bool) -> AskError:
    """The exception that the asker gets for an answer that is no reply."""
    match answer:
        case Refusal():
            return Refused(answer.reason, answer.detail, target=target, question=question)
        case HandlerFailure():
            kind = Unanswerable if answer.permanent else RemoteError
            return kind(answer.error_type, answer.detail, declared=answer.declared, target=target, question=question)
        case TargetGone() if stream:
            return StreamDown(answer.reason, target=target, question=question)
        case TargetGone():
            text = f"{target} {answer.reason} while it worked on {question}: {answer.detail}"
            return SentNoReply(text, target=target, question=question)
