"""What a user's function did: its error with file and line, and its return value as a number."""

from __future__ import annotations

import inspect
import sysconfig
import traceback
from pathlib import Path
from typing import Any, Final

import actors
from actors.environments.errors import NoNumber, ScorerBroken
from configs.limits import DEFAULT_LIMITS
from transport.errors import HeadraceError

_OURS: Final = tuple(f"{Path(folder).parent / name}/" for folder in actors.__path__ for name in ("actors", "configs"))
_LIBRARIES: Final = ("site-packages", "dist-packages", sysconfig.get_path("stdlib"))


def described(error: BaseException) -> str:
    """The error in one line, and where in the user's code it came from: ``NameError: … (rewards.py:12)``."""
    if isinstance(error, HeadraceError):
        return str(error)  # a sentence of ours
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


def as_number(value: Any, whose: str) -> float:
    """The reward that a function returned; also of numpy and torch, if it is one element.

    Raises:
        NoNumber: it is no number, and no other response will make it one.
        ScorerBroken: it is None, which a function may return where it has no verdict.
    """
    if isinstance(value, int | float):  # bool, too
        return float(value)
    if inspect.iscoroutine(value):
        value.close()
        raise NoNumber(f"{whose} returned a coroutine; write def, not async def")
    if value is None:
        raise ScorerBroken(f"{whose} returned None; expected a number")
    wrong = NoNumber(f"{whose} returned a {type(value).__name__}, {_shown(value)}; expected one number")
    if isinstance(value, str | bytes):
        raise wrong
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise wrong from error


def _shown(value: object) -> str:
    try:
        text = " ".join(repr(value).split())
    except Exception:  # noqa: BLE001 (user code: its repr may raise whatever it likes)
        return "which cannot be shown"
    return text if len(text) <= 80 else f"{text[:80]}…"
