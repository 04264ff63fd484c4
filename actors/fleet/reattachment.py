"""Workers that go on while the head is gone, and are taken up again by the next one where they are.

    Opened ─▶ what was with workers is queued, and kept back for its former holder
              ├─ it registers and still has it ─▶ Assigned to it again, under a number of this term
              ├─ it registers without it, or as another life ─┐
              └─ ``reattach_s`` pass ─────────────────────────┴▶ handed out, from the tokens that the ledger has

Invariants
- The ledger knows of no continuation: a sample that is taken up is assigned like any other, and its worker's tokens
  enter like any others, only where the sample ends. What does not follow on is refused, and the sample goes elsewhere.
- Who claims a number is who was given it: the ledger has it with that worker, and nobody has had the sample since.
- A worker is taken up with what it serves: no sample goes on with a version that it may not have.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from actors.core.message import Message, message
from actors.ledger import events as ev
from actors.ledger.batch import SampleState
from actors.ledger.journaled_ledger import JournaledLedger
from actors.protocol.workers import RegisterWorker


@message("scheduler.end_of_grace")
class EndOfGrace(Message):
    """The scheduler tells itself that workers which went on without a scheduler have had the time to come back."""


@dataclass(slots=True)
class TakenUp:
    """These are columns of ``Registered``: former numbers, new numbers, and the tokens that the ledger has."""

    former: list[int] = field(default_factory=list[int])
    numbers: list[int] = field(default_factory=list[int])
    lengths: list[int] = field(default_factory=list[int])


class Reattachment:
    """It waits for the workers of a former life of the scheduler. Made after ``Opened``."""

    def __init__(self, journaled: JournaledLedger, max_staleness: int) -> None:
        self._journaled = journaled
        self._max_staleness = max_staleness
        self._awaited: set[str] = set(journaled.ledger.former_holders())

    @property
    def awaited(self) -> set[str]:
        """Workers that may still come with what they had."""
        return self._awaited

    def release(self, worker: str | None = None) -> bool:
        """Wait no longer for ``worker``, or for anybody; False if nobody was awaited."""
        had = bool(self._awaited)
        self._awaited = self._awaited - {worker} if worker is not None else set()
        return had

    def kept_back(self, step: int) -> np.ndarray:
        """int32[n] rows of ``step`` that are not to be handed out yet."""
        return self._journaled.ledger.formerly_with(self._awaited, step) if self._awaited else np.empty(0, np.int32)

    def take_up(self, offer: RegisterWorker) -> TakenUp:
        """Assign to a worker what it claims and may go on with."""
        taken, name, ledger = TakenUp(), offer.worker.name, self._journaled.ledger
        for step in sorted(ledger.batches):
            if step - self._max_staleness > offer.policy_version:
                break
            batch = ledger.batches[step]
            rows = ledger.formerly_with({name}, step)
            rows = rows[np.isin(batch.former[rows], offer.holds)][: max(0, offer.slots - len(taken.numbers))]
            rows = rows[batch.newest_versions(rows) <= offer.policy_version]
            if not len(rows):
                continue
            assert (batch.state[rows] == SampleState.QUEUED).all(), "nobody has had them since"
            first, former = ledger.next_assignment, batch.former[rows].tolist()
            self._journaled.apply(ev.Assigned.to_one(name, step, first, rows, again=True))
            taken.former += former
            taken.numbers += range(first, first + len(rows))
            taken.lengths += batch.length[rows].tolist()
        return taken
