"""Ledger and journal together: what is applied is also written, in the same order."""

from __future__ import annotations

from actors.ledger import events as ev
from actors.ledger.journal import Journal
from actors.ledger.ledger import Ledger, Outcome


class LedgerWriter:
    """Applies events to the ledger and appends them to the journal: the one way in which the scheduler changes them."""

    def __init__(self, ledger: Ledger, journal: Journal) -> None:
        self.ledger = ledger
        self.journal = journal
        self.events = 0
        """Number of events so far; if it is the same at two times, nothing has moved between them."""

    def apply(self, event: ev.Event) -> Outcome:
        """Raises IllegalTransition (nothing has changed, nothing is written) or JournalFailed."""
        outcome = self.ledger.apply(event)
        self.journal.append(event)
        self.events += 1
        return outcome
