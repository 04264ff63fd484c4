"""The form in which readers get a data set: rows by index, each with its prompt, its answer and all further columns.

    reasoning_gym ─┐
    text rows ─────┼─▶ Source.row(index) ─▶ Row
    table ─────────┘

Invariants
- Values of a table's row keep their own types: nothing is turned into text.
- ``digest`` is a function of the row's content, so a noted digest shows whether the row has changed since.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import xxhash

from configs.schema import DataConfig

Chat = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Row:
    """Holds one example: what to ask, what is right, and its index in the underlying data set."""

    prompt: str | Chat
    answer: Any
    """Answer of the row; None where it has none."""
    index: int
    extra: dict[str, Any]
    """Further columns, handed to a reward function as keyword arguments."""
    digest: int = 0


class Source(Protocol):
    """Gives the rows of a data set of known length."""

    fingerprint: str
    """Text that changes when the data change, or may have changed."""

    def __len__(self) -> int: ...

    def row(self, index: int) -> Row:
        """Row ``index``. Raises SourceUnreadable, which names file, row and column."""
        ...

    def check(self, index: int) -> None:
        """Raise SourceUnreadable if ``row`` would, but cheaply: all rows are checked before the first is used."""
        ...

    def where(self, index: int) -> str:
        """The row in words that help a person to find it."""
        ...

    def score(self, answer: str, index: int) -> float:
        """The reward by the data set's own scorer; raises SourceUnreadable if there is none."""
        ...


def messages_of(prompt: str | Chat, data: DataConfig) -> Chat:
    """``prompt`` as chat messages, behind the system prompt of ``data`` unless ``prompt`` has one of its own."""
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": data.template.replace("{prompt}", prompt)}]
    own = bool(prompt) and isinstance(prompt[0], dict) and prompt[0].get("role") == "system"
    if data.system_prompt and not own:
        return [{"role": "system", "content": data.system_prompt}, *prompt]
    return prompt


def digest_of(content: bytes | str) -> int:
    """64-bit digest of ``content``, signed."""
    data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    return xxhash.xxh3_64_intdigest(data) - (1 << 63)
