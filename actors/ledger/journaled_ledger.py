"""Ledger and journal together: what is applied is also written, in the same order."""

from __future__ import annotations

from actors.ledger import events as ev
from actors.ledger.journal import Journal
from actors.ledger.ledger import Ledger, Outcome


class JournaledLedger:
    """The scheduler changes the ledger through this alone."""

    def __init__(self, ledger: Ledger, journal: Journal) -> None:
        self.ledger = ledger
        self.journal = journal
        self.events = 0
        """Number of events so far; equal values at two times mean that nothing has moved between them."""

    def apply(self, event: ev.Event) -> Outcome:
        """Raises IllegalTransition (nothing has changed, nothing is written) or JournalFailed."""
        outcome = self.ledger.apply(event)
        self.journal.append(event)
        self.events += 1
        return outcome
