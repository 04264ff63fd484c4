"""Describes an error in a user's function in one line, and says where the function is defined."""

from __future__ import annotations

import inspect
import sysconfig
import traceback
from pathlib import Path
from typing import Any, Final

import actors
from configs.limits import DEFAULT_LIMITS
from transport.errors import HeadraceError

_OURS: Final = tuple(f"{Path(folder).parent / name}/" for folder in actors.__path__ for name in ("actors", "configs"))
_LIBRARIES: Final = ("site-packages", "dist-packages", sysconfig.get_path("stdlib"))


def described(error: BaseException) -> str:
    """The error in one line, and where in the user's code it came from: ``NameError: … (rewards.py:12)``."""
    if isinstance(error, HeadraceError):
        return str(error)  # its text is a whole sentence already
    text = " ".join(str(error).split())
    text = text if len(text) <= DEFAULT_LIMITS.error_text_chars else f"{text[: DEFAULT_LIMITS.error_text_chars]}…"
    where = _where(error)
    return f"{type(error).__name__}{f': {text}' if text else ''}{f' ({where})' if where else ''}"


def _where(error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}"
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    theirs = [(file, line) for file, line in frames if not file.startswith(("<", *_OURS))]
    theirs = [frame for frame in theirs if not any(part in frame[0] for part in _LIBRARIES)] or theirs
    return f"{Path(theirs[-1][0]).name}:{theirs[-1][1]}" if theirs else ""


def defined_at(function: Any) -> str:
    """``rewards.py:12``, or the function's name where its source does not tell."""
    try:
        code = inspect.unwrap(function).__code__
        return f"{Path(code.co_filename).name}:{code.co_firstlineno}"
    except (AttributeError, ValueError):
        return getattr(function, "__name__", type(function).__name__)
