"""Who may act, until when: a lease that its holder lets lapse earlier than its issuer does.

Invariants
- Terms rise strictly: no two leases share one. The receivers of commands check them (``actors/core/terms.py``).
- The holder's term ends ``margin_s`` before the issuer's, counted from when the holder *asked*, so at no instant
  do two holders both believe that they hold it, whatever the network did to the answer in between.
- Both sides use their own monotonic clock; no timestamp crosses the wire, only durations.

    issuer   issue(e, term) ├──────────── term ────────────┤ expired: may lease e+1
    holder  ask ├──────── term - margin ────────┤ fences itself
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Lease:
    """A lease is what travels to the holder."""

    holder: str
    term: int
    lasts_s: float


class LeaseIssuer:
    """The issuer's side gives one resource to one holder at a time. Time is handed in, in seconds of one clock."""

    def __init__(self, *, lasts_s: float, first_term: int = 1) -> None:
        if lasts_s <= 0:
            raise ValueError(f"lasts_s must be above 0, got {lasts_s}")
        self._term_s = lasts_s
        self._next_term = first_term
        self._running: Lease | None = None
        self.expires_s = float("-inf")
        """Time at which the running or the last lease ends."""

    def issue(self, holder: str, now_s: float) -> Lease | None:
        """A new lease under a new term; None while another holder's lease runs."""
        if self._running is not None and now_s < self.expires_s and self._running.holder != holder:
            return None
        self._running = Lease(holder, self._next_term, self._term_s)
        self._next_term += 1
        self.expires_s = now_s + self._term_s
        return self._running

    def renew(self, holder: str, term: int, now_s: float) -> Lease | None:
        """Prolong a running lease under its own term; None when it has lapsed or been passed on."""
        lease = self._running
        if lease is None or lease.holder != holder or lease.term != term or now_s >= self.expires_s:
            return None
        self.expires_s = now_s + self._term_s
        return lease

    def holder(self, now_s: float) -> Lease | None:
        """The running lease, or None."""
        return self._running if self._running is not None and now_s < self.expires_s else None


class HeldLease:
    """The holder's side stops acting by itself when no renewal arrives."""

    def __init__(self, *, margin_s: float) -> None:
        if margin_s < 0:
            raise ValueError(f"margin_s must be >= 0, got {margin_s}")
        self._margin_s = margin_s
        self._term = 0
        self._until_s = float("-inf")

    def accept(self, lease: Lease, *, asked_at_s: float) -> None:
        """Take a lease or renewal that answers the question asked at ``asked_at_s``. Older terms are ignored."""
        if lease.term < self._term:
            return
        self._term = lease.term
        self._until_s = max(self._until_s, asked_at_s + lease.lasts_s - self._margin_s)

    def is_held(self, now_s: float) -> bool:
        return now_s < self._until_s

    def left_s(self, now_s: float) -> float:
        """Seconds until the holder must stop acting; 0 when it must not act now."""
        return max(0.0, self._until_s - now_s)

    def lapse(self) -> None:
        self._until_s = float("-inf")
