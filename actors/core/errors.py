"""What can go wrong between actors. Continues the tree of ``transport/errors.py``.

HeadraceError
└── ActorError
    ├── AskError               how an ask or a stream can fail
    │   ├── NotSent            infrastructure; surely not executed, a retry is safe
    │   ├── SentNoReply        infrastructure; may have been executed
    │   ├── Refused            the target said no before it began; a retry later or elsewhere is safe
    │   ├── RemoteError        the handler raised; the target's fault or the question's, do not retry blindly
    │   │   └── Unanswerable   and so it will whenever it is asked again: never retry
    │   ├── DeadlineExceeded   unknown whether executed
    │   ├── WrongReply         a bug: the handler answered with another type
    │   └── StreamDown         the producer is gone; resume elsewhere from the last item
    ├── ReplyError             raise it in a handler to answer with an error without crashing
    │   ├── ConsumerTooSlow    a stream's consumer granted no credit in time; it may open the stream again
    │   └── StaleTerm         the sender's term is no longer the ruling one; it must step down
    ├── StartFailed            ``on_start`` raised or took too long; the cause is attached
    ├── NameTaken              a bug of the caller: an actor of that name lives here
    ├── UnknownActor           a bug of the caller: no actor of that name has lived here
    ├── WrongHandler           a bug, found at class creation or at the first use
    └── HandlerCancelled       a bug: a handler let a CancelledError escape that nobody sent to it
"""

from __future__ import annotations

import enum

from transport.address import ActorAddress
from transport.errors import HeadraceError


class ActorError(HeadraceError):
    """Something between two actors failed."""


class AskError(ActorError):
    """A question got no answer. ``target`` was asked, ``question`` is the message's tag."""

    def __init__(self, text: str, *, target: ActorAddress | None = None, question: str = "") -> None:
        super().__init__(text)
        self.target = target
        self.question = question


class NotSent(AskError):
    """No link, or its queue is full: the target never saw it. Retrying is safe."""


class SentNoReply(AskError):
    """The target or the link died before the answer came. Retry only idempotent questions."""


class RefusalReason(enum.StrEnum):
    """Why a message was not executed."""

    MAILBOX_FULL = "mailbox_full"
    STOPPING = "stopping"
    UNKNOWN_ACTOR = "unknown_actor"
    OLDER_LIFE = "older_life"
    UNKNOWN_TAG = "unknown_tag"
    NO_HANDLER = "no_handler"
    MALFORMED = "malformed"
    EXPIRED = "expired"
    STALE_TERM = "stale_term"
    NOT_IDEMPOTENT = "not_idempotent"
    TOO_MANY_ASKS = "too_many_asks"
    NOT_ALLOWED = "not_allowed"
    """Such a sender may not send this: ``senders.py``."""


class Refused(AskError):
    """The target did not execute it, and says why. Retrying is safe; whether it helps, ``reason`` tells."""

    def __init__(
        self, reason: RefusalReason, detail: str = "", *, target: ActorAddress | None = None, question: str = ""
    ) -> None:
        super().__init__(f"{target} refused {question}: {reason}{f' ({detail})' if detail else ''}",
                         target=target, question=question)  # fmt: skip
        self.reason = reason
        self.detail = detail


class RemoteError(AskError):
    """The handler raised. ``error_type`` is the class name, ``detail`` its text; its process logs the traceback."""

    def __init__(
        self,
        error_type: str,
        detail: str,
        *,
        declared: bool,
        target: ActorAddress | None = None,
        question: str = "",
    ) -> None:
        super().__init__(f"{target} failed on {question}: {error_type}: {detail}", target=target, question=question)
        self.error_type = error_type
        self.detail = detail
        self.declared = declared
        """True: a ReplyError, the target lives on. False: the target crashed."""


class Unanswerable(RemoteError):
    """The handler raised an error that is ``permanent``: the same question can only meet it again. Do not retry."""

    permanent = True


class DeadlineExceeded(AskError):
    """The answer, or the next item of a stream, did not come in time."""


class WrongReply(AskError):
    """The handler answered with another type than the asker expects. A bug at one of the two."""


class StreamDown(AskError):
    """The producer of a stream is gone (``reason`` as in Down). What was received is valid."""

    def __init__(self, reason: str, *, target: ActorAddress | None = None, question: str = "") -> None:
        super().__init__(f"the stream {question} from {target} broke: {reason}", target=target, question=question)
        self.reason = reason


class ReplyError(ActorError):
    """Base of errors that a handler gives as its answer: the asker sees RemoteError, the actor lives on."""


class StaleTerm(ReplyError):
    """A command from a ruler of an older term. The asker sees Refused(stale_term)."""

    def __init__(self, term: int, ruling: int) -> None:
        super().__init__(f"term {term} is over, {ruling} rules: register again to learn the ruling one")
        self.term = term
        self.ruling = ruling


class ConsumerTooSlow(ReplyError):
    """The consumer of a stream took nothing for as long as it was willing to wait itself."""


class StartFailed(ActorError):
    """An actor did not come to life; ``__cause__`` says why."""


class NameTaken(ActorError):
    """An actor of that name lives here already."""


class UnknownActor(ActorError):
    """No actor of that name has lived here."""


class WrongHandler(ActorError):
    """A handler is declared in a way that cannot work, or the one that is needed is missing."""


class CancellationSwallowed(ActorError):
    """A bug of the actor: it goes on although it was cancelled, again and again."""


class HandlerCancelled(ActorError):
    """A handler ended with a CancelledError that did not come from its cell."""
