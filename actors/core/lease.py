"""A lease: the right to act until a certain time, which for its holder ends earlier than for its issuer.

    issuer     issue ├───────────── lasts_s ─────────────┤ expired: another holder may have the next one
    holder  ask ├──────── lasts_s - margin ─────────┤ stops acting by itself

Leases as in Gray and Cheriton, "Leases: an efficient fault-tolerant mechanism for distributed file cache consistency"
(SOSP 1989), with both clocks monotonic and the holder's counted from its question.

Invariants
- The holder's time ends ``margin_s`` before the issuer's, counted from when the holder *asked*. So at no instant do two
  holders both believe that they hold it, whatever the network did to the answer in between; the margin is for clocks
  that run at different speeds, and for the time that stopping takes.
- Both sides use their own monotonic clock; no timestamp crosses the wire, only durations.
- Numbers rise strictly: no two leases of an issuer share one. A renewal names its number, so a holder whose lease was
  passed on is refused. (*Commands* are fenced by the term of their leader instead: ``actors/core/terms.py``.)
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Lease:
    """A lease, as it is sent to its holder, is the right to act for ``lasts_s`` under its own number."""

    holder: str
    number: int
    lasts_s: float


class LeaseIssuer:
    """An issuer gives one resource to one holder at a time. Times are passed in, in seconds of one clock.

    issuer = LeaseIssuer(lasts_s=10)
    lease = issuer.issue("worker, life 1", now_s=0)          # Lease(number=1): expires at 10
    issuer.issue("worker, life 2", now_s=4)                  # None: the first one may still act
    issuer.renew("worker, life 1", lease.number, now_s=8)    # the same lease: expires at 18
    issuer.issue("worker, life 2", now_s=18)                 # Lease(number=2): life 1 has stopped by its own clock
    issuer.renew("worker, life 1", lease.number, now_s=19)   # None: it is to register anew
    """

    def __init__(self, *, lasts_s: float, first_number: int = 1) -> None:
        if lasts_s <= 0:
            raise ValueError(f"lasts_s must be above 0, got {lasts_s}")
        self._lasts_s = lasts_s
        self._next_number = first_number
        self._running: Lease | None = None
        self.expires_s = float("-inf")
        """Time at which the running or the last lease ends."""

    def issue(self, holder: str, now_s: float) -> Lease | None:
        """A new lease under a new number; None while another holder's lease runs."""
        if self._running is not None and now_s < self.expires_s and self._running.holder != holder:
            return None
        self._running = Lease(holder, self._next_number, self._lasts_s)
        self._next_number += 1
        self.expires_s = now_s + self._lasts_s
        return self._running

    def renew(self, holder: str, number: int, now_s: float) -> Lease | None:
        """Prolong the running lease under its own number; None when it has lapsed or been passed on."""
        lease = self._running
        if lease is None or lease.holder != holder or lease.number != number or now_s >= self.expires_s:
            return None
        self.expires_s = now_s + self._lasts_s
        return lease

    def holder(self, now_s: float) -> Lease | None:
        """The running lease, or None."""
        return self._running if self._running is not None and now_s < self.expires_s else None


class HeldLease:
    """A held lease stops its holder when no renewal arrives: the holder asks ``is_held`` before each action."""

    def __init__(self, *, margin_s: float) -> None:
        if margin_s < 0:
            raise ValueError(f"margin_s must be >= 0, got {margin_s}")
        self._margin_s = margin_s
        self._number = 0
        self._until_s = float("-inf")

    def accept(self, lease: Lease, *, asked_at_s: float) -> None:
        """Take a lease or renewal that answers the question asked at ``asked_at_s``. Older numbers are ignored."""
        if lease.number < self._number:
            return
        self._number = lease.number
        self._until_s = max(self._until_s, asked_at_s + lease.lasts_s - self._margin_s)

    def is_held(self, now_s: float) -> bool:
        return now_s < self._until_s

    def left_s(self, now_s: float) -> float:
        """Seconds until the holder must stop acting; 0 when it must not act now."""
        return max(0.0, self._until_s - now_s)

    def lapse(self) -> None:
        self._until_s = float("-inf")


class LeaseRoster:
    """The roster gives each actor that one life of a leader registers a lease of its own.

    ``leader_term``: term of that life. Its leases have higher numbers than those of all earlier lives.
    """

    _BITS = 32
    """Bits of a lease's number below the term of its leader."""

    def __init__(self, *, lasts_s: float, leader_term: int) -> None:
        self.lasts_s = lasts_s
        self.newest = leader_term << self._BITS
        """Number of the newest lease."""

    def grant(self, holder: str, now_s: float) -> LeaseIssuer:
        """Issue a lease to ``holder`` from now on; returns its issuer."""
        self.newest += 1
        issuer = LeaseIssuer(lasts_s=self.lasts_s, first_number=self.newest)
        issuer.issue(holder, now_s)
        return issuer
