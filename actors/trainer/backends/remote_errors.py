"""Errors of a backend that computes in another process: by name and text there, the same errors again here."""

from __future__ import annotations

import builtins

from actors.protocol.training import Failed
from actors.trainer import errors
from actors.trainer.errors import ServiceFailed, TrainerError
from transport.errors import HeadraceError


def failed(error: Exception) -> Failed:
    """What is said of an error. One of the system's has a number, by which it is known again."""
    number = error.errno if isinstance(error, OSError) else None
    return Failed(error=type(error).__name__, text=str(error), errno=number)


def error_of(failure: Failed, unknown: type[HeadraceError] = ServiceFailed) -> Exception:
    """What the other process's backend has raised, as an error of this process."""
    if failure.errno is not None:
        return OSError(failure.errno, failure.text)
    return error_named(failure.error, failure.text, unknown)


def error_named(name: str, text: str, unknown: type[HeadraceError] = ServiceFailed) -> Exception:
    """Ours of that name, or Python's, if it takes a text; else ``unknown``, whose text begins with the name."""
    own = getattr(errors, name, None)
    if isinstance(own, type) and issubclass(own, TrainerError) and own.__init__ is Exception.__init__:
        return own(text)
    plain = getattr(builtins, name, None)
    if isinstance(plain, type) and issubclass(plain, ValueError | TypeError | LookupError | RuntimeError):
        return plain(text)
    return unknown(f"{name}: {text}")
