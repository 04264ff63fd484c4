"""When to write a line that others can cause as often as they like: the first time, the tenth, the hundredth."""

from __future__ import annotations


def worth_a_line(times: int) -> bool:
    """Whether what has happened ``times`` times is written down this time; the line should hold the number."""
    return times > 0 and times == 10 ** (len(str(times)) - 1)
