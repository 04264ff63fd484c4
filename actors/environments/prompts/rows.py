"""What a data set is to its readers: rows by index, each with the prompt, the answer and everything beside them.

    reasoning_gym ─┐
    text rows ─────┼─▶ Source.row(index) ─▶ Row
    table ─────────┘

Invariants
- Values of a row are the data set's own, of its own types. Nothing is turned into text.
- ``digest`` is a function of what the row holds: who has noted it notices when the data have changed since.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import xxhash

Chat = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Row:
    """Holds one example: what to ask, what is right, and its index in the underlying data set."""

    prompt: str | Chat
    answer: Any
    """None where the row has none."""
    index: int
    extra: dict[str, Any]
    """Further columns, handed to a reward function as keyword arguments."""
    digest: int = 0


class Source(Protocol):
    """Is a data set of known length."""

    fingerprint: str
    """Text that changes when the data do, or may have."""

    def __len__(self) -> int: ...

    def row(self, index: int) -> Row:
        """Row ``index``; SourceUnreadable names file, row and column."""
        ...

    def check(self, index: int) -> None:
        """Raise SourceUnreadable if ``row`` would. Cheaper, for all rows are looked at before the first is used."""
        ...

    def where(self, index: int) -> str:
        """The row as a person finds it."""
        ...

    def score(self, answer: str, index: int) -> float:
        """The data set's own scorer, where it has one; else SourceUnreadable."""
        ...


def digest_of(content: bytes | str) -> int:
    """64 bits of ``content``, signed, as MessagePack likes them."""
    data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    return xxhash.xxh3_64_intdigest(data) - (1 << 63)
