"""The row of the data set that a response answers, found again by the context that its prompt was issued with.

context = msgpack [index, digest]                    ──▶ row of the data set, if it is still the same
        | msgpack [index, digest, name]              ──▶ the same, of the source of that name (``data.mix``)
        | msgpack [prompt, answer, index, columns]   ──▶ these values: the form in journals of 0.1
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import msgpack

from actors.environments.errors import RowChanged
from actors.environments.prompts.rows import Source


def row_of(context: bytes) -> int:
    named = cast("list[Any]", msgpack.unpackb(context))
    return int(named[2] if len(named) == 4 else named[0])


def source_of(context: bytes) -> str:
    """Name of the source that ``context`` names; empty where there is only one."""
    named = cast("list[Any]", msgpack.unpackb(context))
    return str(named[2]) if len(named) == 3 else ""


@dataclass(frozen=True, slots=True)
class Example:
    """Holds what a scorer may know besides the response."""

    prompt: Any
    answer: Any
    index: int
    extra: dict[str, Any]
    source: Source | None = field(default=None, compare=False)
    """Data set of the row, where it is known."""


class Examples:
    """Finds examples in the job's data sets, which are told apart by name."""

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self._sources = sources

    def of(self, context: bytes) -> Example:
        """The example that ``context`` names, made anew for each call: a verifier may change its arguments.

        Raises:
            RowChanged: the data set has another row there now.
        """
        named = cast("list[Any]", msgpack.unpackb(context))
        if len(named) == 4:
            return Example(*named)
        index, digest, *names = named
        name = names[0] if names else ""
        of = f" of {name}" if name else ""
        source = self._sources.get(name)
        if source is None:
            raise RowChanged(f"row {index}{of}: this process was started without the data set")
        row = source.row(index) if index < len(source) else None
        if row is None or row.digest != digest:
            raise RowChanged(
                f"row {index} of the data{of} is not what it was when its prompt was issued: no reward is known"
            )
        return Example(row.prompt, row.answer, row.index, row.extra, source)

    def answer(self, context: bytes) -> str:
        """The row's answer as text for people; empty if the row has changed."""
        try:
            answer = self.of(context).answer
        except RowChanged:
            return ""
        return answer if isinstance(answer, str) else repr(answer)
