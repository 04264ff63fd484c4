"""What can go wrong between actors. Continues the tree of ``transport/errors.py``.

HeadraceError
└── ActorError
    ├── AskError               how an ask or a stream can fail
    │   ├── NotSent            infrastructure; surely not executed, a retry is safe
    │   ├── SentNoReply        infrastructure; may have been executed
    │   ├── Refused            the target said no before it began; a retry later or elsewhere is safe
    │   ├── RemoteError        the handler raised; the target's fault or the question's, do not retry blindly
    │   │   └── Unanswerable   the handler will raise each time it is asked: never retry
    │   ├── DeadlineExceeded   unknown whether executed
    │   ├── WrongReply         a bug: the handler answered with another type
    │   └── StreamDown         the producer is gone; resume elsewhere from the last item
    ├── ReplyError             raise it in a handler to answer with an error without crashing
    │   ├── ConsumerTooSlow    a stream's consumer granted no credit in time; it may open the stream again
    │   └── StaleTerm          the sender's term is over: a newer leader rules, and the sender must step down
    ├── StartFailed            ``on_start`` raised or took too long; the cause is attached
    ├── NameTaken              a bug of the caller: an actor of that name lives here
    ├── UnknownActor           a bug of the caller: no actor of that name has lived here
    ├── WrongHandler           a bug, found at class creation or at the first use
    ├── HandlerCancelled       a bug: a handler let a CancelledError escape that nobody sent to it
    └── CancellationSwallowed  a bug of the actor: it goes on although it was cancelled
"""

from __future__ import annotations

import enum
from typing import TypeVar

from transport.address import ActorAddress
from transport.errors import HeadraceError

E = TypeVar("E", bound=HeadraceError)


def error_named(name: str, text: str, below: type[E]) -> E | None:
    """Make an error that another process reported by its class name; ``below`` is the base class to search from.

    None: no such class is known here, or its constructor takes more than a text.
    """
    kinds = [below]
    for kind in kinds:
        if kind.__name__ == name and kind.__init__ is Exception.__init__:
            return kind(text)
        kinds += kind.__subclasses__()
    return None


class ActorError(HeadraceError):
    """Something between two actors failed."""


class AskError(ActorError):
    """A question got no answer. ``target`` was asked, ``question`` is the message's tag."""

    def __init__(self, text: str, *, target: ActorAddress | None = None, question: str = "") -> None:
        super().__init__(text)
        self.target = target
        self.question = question


class NotSent(AskError):
    """There is no link, or its queue is full: the target never saw the question. Retrying is safe."""


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
    """Kind of sender that may not send this: ``senders.py``."""


class Refused(AskError):
    """The target did not execute the message, and says why. Retrying is safe; ``reason`` tells whether it helps."""

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
        self, error_type: str, detail: str, *, declared: bool, target: ActorAddress | None = None, question: str = ""
    ) -> None:
        super().__init__(f"{target} failed on {question}: {error_type}: {detail}", target=target, question=question)
        self.error_type = error_type
        self.detail = detail
        self.raised = error_named(error_type, detail, ReplyError) if declared else None
        """The ReplyError itself, where this process knows its class."""
        self.declared = declared
        """Whether the handler raised a ReplyError, so that the target lives on; else the target crashed."""


class Unanswerable(RemoteError):
    """The handler raised an error that is ``permanent``: the same question would raise it again. Do not retry."""

    permanent = True


class DeadlineExceeded(AskError):
    """The answer, or the next item of a stream, did not come in time."""


class WrongReply(AskError):
    """The handler answered with another type than the asker expects: one of the two has a bug."""


class StreamDown(AskError):
    """The producer of a stream is gone (``reason`` as in Down). What was received is valid."""

    def __init__(self, reason: str, *, target: ActorAddress | None = None, question: str = "") -> None:
        super().__init__(f"the stream {question} from {target} broke: {reason}", target=target, question=question)
        self.reason = reason


class ReplyError(ActorError):
    """Base of errors that a handler gives as its answer: the asker sees RemoteError, the actor lives on."""


class StaleTerm(ReplyError):
    """A command came from a leader whose term is over. The asker sees Refused(stale_term)."""

    def __init__(self, term: int, ruling: int) -> None:
        super().__init__(f"term {term} is over, {ruling} rules: register again to learn the ruling one")
        self.term = term
        self.ruling = ruling


class ConsumerTooSlow(ReplyError):
    """The consumer of a stream granted no credit within its own timeout for an item."""


class StartFailed(ActorError):
    """An actor did not come to life; ``__cause__`` says why."""


class NameTaken(ActorError):
    """An actor of that name lives here already."""


class UnknownActor(ActorError):
    """No actor of that name has lived here."""


class WrongHandler(ActorError):
    """A handler is declared in a way that cannot work, or the one that is needed is missing."""


class CancellationSwallowed(ActorError):
    """The actor has a bug: it goes on although it was cancelled, again and again."""


class HandlerCancelled(ActorError):
    """A handler ended with a CancelledError that did not come from its cell."""
