"""What was computed lately, by what it was computed of: a bounded memory of pure functions."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Remembered(Generic[T]):
    """Remembers at most ``kept`` values; those asked for least lately go first."""

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._known: OrderedDict[Hashable, T] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of ``key``, made if it is not known."""
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        made = self._known[key] = make()
        if len(self._known) > self._kept:
            self._known.popitem(last=False)
        return made
