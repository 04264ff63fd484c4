"""Why something ended, in a form that crosses process boundaries: the typed error that ended it.

    exception ─ reason_of ─▶ Reason ─▶ exit note, ProcessExited, Down ─▶ supervisor ─▶ what people read

Invariants
- The reason names the error that was raised first, not what it was wrapped in on the way out: StartFailed, a group.
- A reason is permanent if any error that led to the end says so (``HeadraceError.permanent``), in this process or, by
  an Unanswerable, in the one that was asked. Whoever restarts gives up on it at once.
- Its text is bounded and printable: it may hold what a user's code has said.
"""

from __future__ import annotations

from typing import cast

import msgspec

from actors.core.errors import StartFailed
from configs.limits import DEFAULT_LIMITS
from transport.errors import HeadraceError

_CHAIN_MAX = 16
"""Number of errors of a chain that are looked at; a chain may be a circle."""


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """A reason is an error as its class's name, its text, and whether a repetition could only meet it again."""

    error: str
    message: str
    permanent: bool = False

    def __str__(self) -> str:
        return f"{self.error}: {self.message}" if self.message else self.error


def reason_of(error: BaseException) -> Reason:
    """The reason that ``error`` is for the end of whatever it has left."""
    first = _unwrapped(error)
    return Reason(error=type(first).__name__, message=_readable(str(first)), permanent=is_permanent(error))


def is_permanent(error: BaseException | None) -> bool:
    """Whether ``error``, or one that it was raised from, would only be met again by a repetition."""
    for _ in range(_CHAIN_MAX):
        if error is None:
            return False
        if isinstance(error, HeadraceError) and error.permanent:
            return True
        error = _inner(error)
    return False


def is_blameless(error: BaseException) -> bool:
    """Whether ``error`` says nothing against whatever ends by it: what that needs is gone, and it is to begin anew."""
    first = _unwrapped(error)
    return isinstance(first, HeadraceError) and first.blameless and not is_permanent(error)


def _unwrapped(error: BaseException) -> BaseException:
    for _ in range(_CHAIN_MAX):
        inner = _inner(error)
        if inner is None or not isinstance(error, StartFailed | BaseExceptionGroup):
            return error
        error = inner
    return error


def _inner(error: BaseException) -> BaseException | None:
    """What ``error`` was raised from, or what a group holds first."""
    if isinstance(error, BaseExceptionGroup):
        return cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    return error.__cause__


def _readable(text: str) -> str:
    """Without control characters, which a terminal would obey, and no longer than people read."""
    longest = DEFAULT_LIMITS.exit_reason_characters
    text = text if len(text) <= longest else f"{text[: longest - 1]}…"
    return "".join(c if c == "\n" or c.isprintable() else "�" for c in text)
