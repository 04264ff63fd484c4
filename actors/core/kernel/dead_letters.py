"""Messages that found no receiver: counted by reason, the newest kept to be looked at.

    to an actor that is not here ──────▶ unknown_actor     a command of a former leader ────▶ stale_term
    to a former life of this process ──▶ older_life        no link to its process ──────────▶ no_link
    in the mailbox of one that ends ───▶ stopping          queued for a link that was lost ─▶ link_lost

Each is noted once, in the process that could not deliver it. Questions are noted too, although the asker is told. A
message that is refused because the mailbox is full, or because it comes too late, did find its receiver:
``ActorSystem.counters`` counts those.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Final

import msgspec

from actors.core.errors import RefusalReason

NO_RECEIVER: Final = frozenset(
    {RefusalReason.UNKNOWN_ACTOR, RefusalReason.OLDER_LIFE, RefusalReason.STOPPING, RefusalReason.STALE_TERM}
)
NO_LINK: Final = "no_link"
LINK_LOST: Final = "link_lost"


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """One message that found no receiver."""

    reason: str
    tag: str
    """Tag of the message."""
    source: str
    """The actor that sent it, and its process if that is another one."""
    target: str
    """The actor that it was for, and its process."""
    ago_s: float = 0.0
    """Age at the time of asking."""


class DeadLetters:
    """Counts all dead letters of one process, and remembers the newest ``kept``."""

    def __init__(self, kept: int) -> None:
        self.counts: Counter[str] = Counter()
        self._newest: deque[tuple[float, str, str, str, str]] = deque(maxlen=kept)

    def add(self, reason: str, tag: str, source: str, target: str, now: float) -> None:
        self.counts[reason] += 1
        self._newest.append((now, reason, tag, source, target))

    def newest(self, now: float) -> list[DeadLetter]:
        """The dead letters that are remembered, newest first."""
        return [
            DeadLetter(reason=reason, tag=tag, source=source, target=target, ago_s=now - at)
            for at, reason, tag, source, target in reversed(self._newest)
        ]
