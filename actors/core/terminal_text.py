"""Text of others as a terminal may show it: no character of it moves the cursor, sets a title or turns the line round,
and as much of a long one as somebody reads.

Log lines hold what models and users' code say, names come over sockets. A terminal obeys what stands between the lines
(ESC and its like), and a reader is misled by marks that turn the direction of writing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

_COMMANDS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
"""Control characters but tab and line feed, marks of direction, line separators, and halves of a surrogate pair."""

_HARDLY_MORE: Final = 30
"""Characters: to say that so many are left out takes as many."""


def harmless(text: str) -> str:
    """``text`` with each of these characters as the escape that Python writes for it."""
    return _COMMANDS.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def shortened(text: str, chars: int) -> str:
    """``text`` if it has hardly more than ``chars`` characters; else its beginning, how much is left out, its end."""
    left_out = len(text) - chars
    if left_out <= _HARDLY_MORE:
        return text
    end = chars // 4
    return f"{text[: chars - end]} … {left_out:,} characters left out … {text[len(text) - end :]}"


def shares(lengths: Sequence[int], chars: int) -> list[int]:
    """How much of each of several texts fits if all together have ``chars`` characters: short ones stay whole."""
    found = list(lengths)
    left = chars
    for count, i in zip(range(len(lengths), 0, -1), sorted(range(len(lengths)), key=lengths.__getitem__), strict=True):
        found[i] = min(lengths[i], left // count)
        left -= found[i]
    return found
