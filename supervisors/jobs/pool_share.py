"""What a job's pool may use of the machines that come and go: all of them, or what the head grants it among jobs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol


class PoolShare(Protocol):
    """A share belongs to the pool of one job; places are named as the workers on them."""

    def join(self, look: Callable[[], None]) -> None:
        """The pool wants places; ``look`` is called when others may be granted than before."""
        ...

    def leave(self) -> None:
        """It wants none any more; its workers are about to end."""
        ...

    def ended(self) -> None:
        """They have ended."""
        ...

    def granted(self, places: Sequence[str], most: int | None) -> set[str]:
        """Those of ``places``, which are all that it can use, on which the job may have a worker now.

        ``most``: workers that it wants at most; None: one on each.
        """
        ...

    def took(self, place: str) -> None:
        """The pool has begun to start a worker there."""
        ...

    def left(self, place: str) -> None:
        """Its worker there is gone."""
        ...


class WholePool:
    """This is the share of a job that shares nothing."""

    def join(self, look: Callable[[], None]) -> None:
        """Nobody else takes anything."""

    def leave(self) -> None:
        """Nobody waits for it."""

    def ended(self) -> None:
        """Nobody waits for it."""

    def granted(self, places: Sequence[str], most: int | None) -> set[str]:
        return set(places)

    def took(self, place: str) -> None:
        """Nobody asks."""

    def left(self, place: str) -> None:
        """Nobody asks."""


WHOLE: Final = WholePool()
