"""What was computed lately, by what it was computed of: a bounded memory of pure functions."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Remembered(Generic[T]):
    """Remembers at most ``kept`` values, of ``most`` together as ``size`` counts; the least lately asked for go first.

    ``held``: what is remembered comes to so much.
    """

    def __init__(self, kept: int, most: int, size: Callable[[T], int]) -> None:
        self._kept, self._most, self._size = kept, most, size
        self._known: OrderedDict[Hashable, T] = OrderedDict()
        self.held = 0

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of ``key``, made if it is not known."""
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        made = self._known[key] = make()
        self.held += self._size(made)
        while len(self._known) > self._kept or self.held > self._most:
            self.held -= self._size(self._known.popitem(last=False)[1])
        return made
