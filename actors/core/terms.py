"""Terms: whoever commands says in which reign, and the receiver refuses older ones.

Invariants
- The ruling term of a guard never goes back.
- A command of a newer term is itself the news that the term has changed.
"""

from __future__ import annotations

from actors.core.errors import StaleTerm


class TermGuard:
    """A receiver of commands keeps one guard per ruler (a job's scheduler, say).

    guard = TermGuard()
    guard.admit(message.term)      # raises StaleTerm: the asker sees Refused, a tell is dropped and counted
    """

    def __init__(self) -> None:
        self.ruling = 0
        """Newest term seen."""

    def is_stale(self, term: int) -> bool:
        """Whether a command of ``term`` comes too late. Changes nothing."""
        return term < self.ruling

    def admit(self, term: int) -> bool:
        """Accept a command of ``term``; True if it begins a new reign.

        Raises:
            StaleTerm: a newer term has been seen.
        """
        if term < self.ruling:
            raise StaleTerm(term, self.ruling)
        began = term > self.ruling
        self.ruling = term
        return began
