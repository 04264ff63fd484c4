"""Why something ended, in a form that crosses process boundaries: the typed error that ended it.

    exception ─ reason_of ─▶ Reason ─▶ exit note, ProcessExited, Down ─▶ supervisor ─▶ what people read

Invariants
- The reason names the error that was raised first, not what it was wrapped in on the way out: StartFailed, a group.
- A reason is permanent if any error that led to the end says so (``HeadraceError.permanent``), in this process or, by
  an Unanswerable, in the one that was asked. A supervisor then does not restart.
- Its text is bounded and harmless to a terminal, since it may contain messages of the user's code.
"""

from __future__ import annotations

from typing import cast

import msgspec

from actors.core.errors import StartFailed
from actors.core.terminal_text import harmless
from configs.limits import DEFAULT_LIMITS
from transport.errors import HeadraceError

_CHAIN_MAX = 16
"""Most errors of a chain of causes that are examined, since the chain may be a cycle."""


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """A reason describes an error to other processes: class name, text, and whether each repetition would raise it."""

    error: str
    message: str
    permanent: bool = False

    def __str__(self) -> str:
        return f"{self.error}: {self.message}" if self.message else self.error


def reason_of(error: BaseException) -> Reason:
    """The reason to give for something that ``error`` has ended."""
    first = _unwrapped(error)
    return Reason(error=type(first).__name__, message=_readable(str(first)), permanent=is_permanent(error))


def is_permanent(error: BaseException | None) -> bool:
    """Whether ``error``, or one that it was raised from, says that each repetition would raise it again."""
    for _ in range(_CHAIN_MAX):
        if error is None:
            return False
        if isinstance(error, HeadraceError) and error.permanent:
            return True
        error = _inner(error)
    return False


def is_blameless(error: BaseException) -> bool:
    """Whether the part that ``error`` ends is not at fault: something that it needs is gone, so it may start again."""
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
    """The error that ``error`` was raised from, or the first one of a group."""
    if isinstance(error, BaseExceptionGroup):
        return cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    return error.__cause__


def _readable(text: str) -> str:
    """``text`` without terminal control characters, and shortened."""
    longest = DEFAULT_LIMITS.exit_reason_characters
    text = harmless(text[: longest + 1])
    return text if len(text) <= longest else f"{text[: longest - 1]}…"
