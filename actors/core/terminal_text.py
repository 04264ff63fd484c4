"""Text of others as a terminal may show it: no character of it moves the cursor, sets a title or turns the line round.

Log lines hold what models and users' code say, names come over sockets. A terminal obeys what stands between the lines
(ESC and its like), and a reader is misled by marks that turn the direction of writing.
"""

from __future__ import annotations

import re
from typing import Final

_COMMANDS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
"""Control characters but tab and line feed, marks of direction, line separators, and halves of a surrogate pair."""


def harmless(text: str) -> str:
    """``text`` with each of these characters as the escape that Python writes for it."""
    return _COMMANDS.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)
