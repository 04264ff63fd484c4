"""Who may act, until when: a lease that its holder lets lapse earlier than its granter does.

Invariants
- Epochs rise strictly: no two grants share one. The receivers of commands check them (``actors/core/epochs.py``).
- The holder's term ends ``margin_s`` before the granter's, counted from when the holder *asked*, so at no instant
  do two holders both believe that they hold it, whatever the network did to the answer in between.
- Both sides use their own monotonic clock; no timestamp crosses the wire, only durations.

    granter   grant(e, term) ├──────────── term ────────────┤ expired: may grant e+1
    holder  ask ├──────── term - margin ────────┤ fences itself
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Grant:
    """A grant is what travels to the holder."""

    holder: str
    epoch: int
    term_s: float


class LeaseGranter:
    """The granter's side gives one resource to one holder at a time. Time is handed in, in seconds of one clock."""

    def __init__(self, *, term_s: float, first_epoch: int = 1) -> None:
        if term_s <= 0:
            raise ValueError(f"term_s must be above 0, got {term_s}")
        self._term_s = term_s
        self._next_epoch = first_epoch
        self._grant: Grant | None = None
        self.expires_s = float("-inf")
        """Time at which the running or the last grant ends."""

    def grant(self, holder: str, now_s: float) -> Grant | None:
        """A new grant under a new epoch; None while another holder's lease runs."""
        if self._grant is not None and now_s < self.expires_s and self._grant.holder != holder:
            return None
        self._grant = Grant(holder, self._next_epoch, self._term_s)
        self._next_epoch += 1
        self.expires_s = now_s + self._term_s
        return self._grant

    def renew(self, holder: str, epoch: int, now_s: float) -> Grant | None:
        """Prolong a running lease under its own epoch; None when it has lapsed or been passed on."""
        grant = self._grant
        if grant is None or grant.holder != holder or grant.epoch != epoch or now_s >= self.expires_s:
            return None
        self.expires_s = now_s + self._term_s
        return grant

    def holder(self, now_s: float) -> Grant | None:
        return self._grant if self._grant is not None and now_s < self.expires_s else None


class HeldLease:
    """The holder's side stops acting by itself when no renewal arrives."""

    def __init__(self, *, margin_s: float) -> None:
        if margin_s < 0:
            raise ValueError(f"margin_s must be >= 0, got {margin_s}")
        self._margin_s = margin_s
        self._epoch = 0
        self._until_s = float("-inf")

    def accept(self, grant: Grant, *, asked_at_s: float) -> None:
        """Take a grant or renewal that answers the question asked at ``asked_at_s``. Older epochs are ignored."""
        if grant.epoch < self._epoch:
            return
        self._epoch = grant.epoch
        self._until_s = max(self._until_s, asked_at_s + grant.term_s - self._margin_s)

    def is_held(self, now_s: float) -> bool:
        return now_s < self._until_s

    def left_s(self, now_s: float) -> float:
        """Seconds until the holder must stop acting; 0 when it must not act now."""
        return max(0.0, self._until_s - now_s)

    def lapse(self) -> None:
        self._until_s = float("-inf")
