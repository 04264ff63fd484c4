"""Errors of a backend in another process: sent as name and text, and made into the same errors here."""

from __future__ import annotations

import builtins

from actors.core import errors as core_errors
from actors.host.room import NoSpaceLeft
from actors.protocol.training import CallFailed
from actors.trainer.errors import ServiceFailed, TrainerError
from transport.errors import HeadraceError


def failed(error: Exception) -> CallFailed:
    """The message that reports ``error``. An OSError keeps its number, by which it is made again."""
    number = error.errno if isinstance(error, OSError) else None
    return CallFailed(error=type(error).__name__, text=str(error), errno=number)


def error_of(failure: CallFailed, unknown: type[HeadraceError] = ServiceFailed) -> Exception:
    """The error that the other process's backend has raised, made again in this process."""
    if failure.errno is not None:
        return OSError(failure.errno, failure.text)
    return error_named(failure.error, failure.text, unknown)


def error_named(name: str, text: str, unknown: type[HeadraceError] = ServiceFailed) -> Exception:
    """Our error of that name, or Python's; else ``unknown``, whose text begins with the name."""
    for kind in (TrainerError, NoSpaceLeft):
        if (own := core_errors.error_named(name, text, kind)) is not None:
            return own
    plain = getattr(builtins, name, None)
    if isinstance(plain, type) and issubclass(plain, ValueError | TypeError | LookupError | RuntimeError):
        return plain(text)
    return unknown(f"{name}: {text}")
