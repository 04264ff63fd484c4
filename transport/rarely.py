"""Thins log lines that others can cause as often as they like: the first, the tenth, the hundredth are written."""

from __future__ import annotations


def worth_a_line(times: int) -> bool:
    """Whether to log an event that has happened ``times`` times by now; the line should hold the number."""
    return times > 0 and times == 10 ** (len(str(times)) - 1)
