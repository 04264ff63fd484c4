"""Turns what a user's scorer returned into a number."""

from __future__ import annotations

import inspect
from typing import Any

from actors.environments.errors import NoNumber, ScorerBroken


def as_number(value: Any, whose: str) -> float:
    """The reward that a function returned, which may be a numpy or torch value of one element.

    Raises:
        NoNumber: the value is no number, and the function will hardly return one for another response.
        ScorerBroken: the value is None, which a function may return where it has no verdict.
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
