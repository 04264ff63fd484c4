r"""Text of others for a terminal: what a model, a reward function or a data set wrote must not steer it.

An escape sequence in a response can move the cursor, rename the window or forge lines; so can some marks of Unicode
that turn the direction of text. They are shown as ``\x1b`` and ``\u202e`` instead.
"""

from __future__ import annotations

import re
from typing import Final

_STEERS: Final = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069\\ufeff\\ud800-\\udfff]"
)
"""Control characters except tab and newline, marks of direction, line separators, and halves of a surrogate pair."""


def printable(text: str) -> str:
    """``text`` with every character that could steer a terminal written out."""
    return _STEERS.sub(lambda found: _written(ord(found[0])), text)


def _written(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
