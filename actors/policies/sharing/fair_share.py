"""Use that is charged to names, so that those that ask all the time get a resource in proportion to their shares.

Start-time fair queueing: each name has a virtual time, the seconds that it used divided by its share. One that comes,
or comes back after it asked for nothing, starts at the virtual time of those that are there, so that nobody saves up
what it did not ask for.

Pure state of one owner: no clock, no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class FairShare:
    """Holds the virtual time of each name, and charges seconds to it."""

    _virtual_s: dict[str, float] = field(default_factory=dict[str, float])
    _active: set[str] = field(default_factory=set[str])
    _now_s: float = 0.0
    """Virtual time of the name that is furthest behind of those that ask."""

    def asks(self, name: str) -> None:
        """``name`` wants the resource from now on; repeating it changes nothing."""
        if name not in self._active:
            self._active.add(name)
            self._virtual_s[name] = max(self._virtual_s.get(name, 0.0), self._now_s)

    def rests(self, name: str) -> None:
        """``name`` wants nothing for now."""
        self._active.discard(name)
        self._move_on()

    def forget(self, name: str) -> None:
        """``name`` is gone for good."""
        self._virtual_s.pop(name, None)
        self.rests(name)

    def charge(self, name: str, seconds: float, share: float = 1.0) -> None:
        """``name`` has used the resource for ``seconds``."""
        self._virtual_s[name] = self._virtual_s.get(name, self._now_s) + seconds / share
        self._move_on()

    def used_s(self, name: str, share: float = 1.0) -> float:
        """Seconds that are charged to ``name``, which is what ``slices.Asking`` takes."""
        return self._virtual_s.get(name, self._now_s) * share

    def _move_on(self) -> None:
        if self._active:
            self._now_s = max(self._now_s, min(self._virtual_s[name] for name in self._active))
