"""How the Tinker server says no.

HeadraceError
└── TinkerError
    ├── Problem            the request is answered with a 4xx or 5xx and a sentence; never 409, which clients repeat
    ├── OperationRefused   the user's: the operation was not begun, or left no trace; its future fails, the next goes on
    ├── LearnerBusy        infrastructure: what computes has no room now, and has changed nothing; it is asked again
    ├── LearnerLost        infrastructure: what computes is gone; it is made again, and the operation executed again
    ├── LogFailed          infrastructure: the log cannot be written; nothing is answered until it can
    └── LogUnreadable      configuration: no log of this version, or a damaged one; do not retry
"""

from __future__ import annotations

from typing import Final

from transport.errors import HeadraceError

_LONGEST: Final = 1000
"""Characters of a text at most: what is quoted in it may be a client's, and as long as a request."""


class TinkerError(HeadraceError):
    """Something that a client asked of the Tinker server cannot be done."""

    def __init__(self, text: str) -> None:
        super().__init__(text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …")


class Problem(TinkerError):
    """A request ends with ``status``, and with this text for people."""

    def __init__(self, status: int, text: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.retry_after_s = retry_after_s


class OperationRefused(TinkerError):
    """An operation is wrong in itself: the text names the field, the value, and what is expected."""


class LearnerBusy(TinkerError):
    """What computes for a model has no room for it now. Nothing has changed, and asking again is safe."""


class LearnerLost(TinkerError):
    """What computes for a model died, or did not answer in time. Retrying with a new one is safe."""


class LogFailed(TinkerError):
    """The operation log could not be written. What was not answered yet is executed again by the next life."""


class LogUnreadable(TinkerError):
    """The operation log is damaged, or was written by another version; the text says which."""

    permanent = True
