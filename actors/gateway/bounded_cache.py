"""A cache of recent results of pure functions, bounded in number and in size."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class BoundedCache(Generic[T]):
    """Keeps at most ``kept`` values whose ``size`` adds up to at most ``most``; the least recently used go first.

    Threads may share it: two that miss the same value at once both make it, and it is kept once.

    ``held``: total size of the values that are kept.
    """

    def __init__(self, kept: int, most: int, size: Callable[[T], int]) -> None:
        self._kept, self._most, self._size = kept, most, size
        self._known: OrderedDict[Hashable, T] = OrderedDict()
        self._lock = threading.Lock()
        self.held = 0

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of ``key``, computed by ``make`` if it is not kept."""
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
        made = make()
        with self._lock:
            if key not in self._known:
                self._known[key] = made
                self.held += self._size(made)
            while len(self._known) > self._kept or self.held > self._most:
                self.held -= self._size(self._known.popitem(last=False)[1])
        return made
