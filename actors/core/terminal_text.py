"""Makes text from others safe for a terminal: no character moves the cursor, sets a title or reverses the line, and
long text is shortened.

Log lines hold text of models and of users' code, and names come over sockets. A terminal obeys control characters in
them (such as ESC), and marks that reverse the direction of writing mislead a reader.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

_COMMANDS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
"""Control characters except tab and line feed, direction marks, line separators, and halves of a surrogate pair."""

_HARDLY_MORE: Final = 30
"""Characters that the note on what is left out takes itself, so leaving out fewer gains nothing."""


def harmless(text: str) -> str:
    """``text`` with each unsafe character replaced by the escape that Python writes for it."""
    return _COMMANDS.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def shortened(text: str, chars: int) -> str:
    """``text`` if hardly longer than ``chars``; else its beginning, a note on how much is left out, and its end."""
    left_out = len(text) - chars
    if left_out <= _HARDLY_MORE:
        return text
    end = chars // 4
    return f"{text[: chars - end]} … {left_out:,} characters left out … {text[len(text) - end :]}"


def shares(lengths: Sequence[int], chars: int) -> list[int]:
    """How many characters of each text to show if all together may have ``chars``: short texts stay whole."""
    found = list(lengths)
    left = chars
    for count, i in zip(range(len(lengths), 0, -1), sorted(range(len(lengths)), key=lengths.__getitem__), strict=True):
        found[i] = min(lengths[i], left // count)
        left -= found[i]
    return found
