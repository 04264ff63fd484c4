"""What the control socket answers when it says no. Continues the tree of ``transport/errors.py``.

HeadraceError
└── ControlError            ``kind`` travels as the reply's ``error.type``; ``hint`` says what to do
    ├── BadRequest          the client's fault; mend the request, a plain retry fails again
    │   ├── MalformedRequest    no MessagePack map of the documented form
    │   ├── TooLarge            more than ``limits.control_request_bytes``
    │   ├── WrongVersion        another protocol version
    │   ├── UnknownOp           no such verb
    │   ├── BadArgs             the verb's arguments do not fit
    │   └── BadConfig           the submitted job file is wrong
    ├── ReadOnly            these keys may look, not touch
    ├── NotFound            no such job, actor or node; it may have ended
    ├── NotNow              the state does not allow it; a retry later may work
    ├── Busy                too much under way; retry later
    ├── TimedOut            no answer before the deadline; the op may still take effect
    ├── NotSupported        this part of the system cannot do that
    ├── Unreachable         nobody answers at the endpoint
    └── Internal            our bug; the server lives on and its log has the traceback
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from transport.errors import HeadraceError


class ControlError(HeadraceError):
    """A control server refuses or fails. ``str(error)`` is the message for people; a traceback adds the hint."""

    kind: ClassVar[str] = "error"

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if hint:
            self.add_note(hint)


class BadRequest(ControlError):
    kind = "bad_request"


class MalformedRequest(BadRequest):
    kind = "malformed"


class TooLarge(BadRequest):
    kind = "too_large"


class WrongVersion(BadRequest):
    kind = "version"


class UnknownOp(BadRequest):
    kind = "unknown_op"


class BadArgs(BadRequest):
    kind = "bad_args"


class BadConfig(BadRequest):
    kind = "bad_config"


class ReadOnly(ControlError):
    kind = "read_only"


class NotFound(ControlError):
    kind = "not_found"


class NotNow(ControlError):
    kind = "not_now"


class Busy(ControlError):
    kind = "busy"


class TimedOut(ControlError):
    kind = "timeout"


class NotSupported(ControlError):
    kind = "not_supported"


class Unreachable(ControlError):
    kind = "unreachable"


class Internal(ControlError):
    kind = "internal"


def _kinds(base: type[ControlError]) -> Iterator[type[ControlError]]:
    for kind in base.__subclasses__():
        yield from (kind, *_kinds(kind))


_KINDS = {error.kind: error for error in _kinds(ControlError)}
ERROR_TYPES = tuple(_KINDS)
"""Every ``error.type`` that a reply may carry."""


def error_of(kind: str, message: str, hint: str) -> ControlError:
    """The exception for an error reply; a type that this client does not know becomes a plain ControlError."""
    return _KINDS.get(kind, ControlError)(message, hint)
