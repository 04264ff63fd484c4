"""Terms: a leader says in which term it commands, and the receiver refuses commands of older ones.

A term is a fencing token (as in Chubby's sequencers, and Kleppmann's "How to do distributed locking") or Raft's term: a
former leader that does not know yet that it was replaced is stopped by those whom it commands, not by its own insight.

Invariants
- The ruling term of a guard never goes back.
- A command of a newer term is itself the news that the term has changed: no message says only that.
"""

from __future__ import annotations

from actors.core.errors import StaleTerm


class TermGuard:
    """A guard protects a receiver of commands, which has one guard per leader that it obeys (a job's scheduler, say).

    guard = TermGuard()
    guard.admit(1)      # True: a first leader
    guard.admit(1)      # False: the same leader again
    guard.admit(2)      # True: its next life; what the former one has commanded is void
    guard.admit(1)      # raises StaleTerm: the asker sees Refused, a tell is dropped and counted
    """

    def __init__(self) -> None:
        self.ruling = 0
        """Newest term seen."""

    def is_stale(self, term: int) -> bool:
        """Whether a command of ``term`` comes too late. Changes nothing."""
        return term < self.ruling

    def admit(self, term: int) -> bool:
        """Accept a command of ``term``; True if it is the first of that term.

        Raises:
            StaleTerm: a newer term has been seen.
        """
        if term < self.ruling:
            raise StaleTerm(term, self.ruling)
        began = term > self.ruling
        self.ruling = term
        return began
