"""Workers that go on while the head is gone, and keep their samples when the next head is there.

    Opened ─▶ samples that workers held are queued, and kept back for their former holders
              ├─ it registers and still has the sample ──────────────▶ Assigned to it again, with a number of this term
              ├─ it registers without the sample, or as another life ─┐
              └─ ``reattach_s`` pass ─────────────────────────────────┴▶ handed out, from the tokens that the ledger has

Invariants
- The ledger does not know continuations: a sample that its worker keeps is assigned like any other, and its tokens are
  entered like any others, where the sample ends. Tokens that do not follow are refused, and the sample goes elsewhere.
- A worker can only claim assignments that it was given: the ledger has them with that worker, and no other has had the
  sample since.
- A worker keeps only samples for which the version that it serves is new enough.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from actors.core.message import Message, message
from actors.ledger import events as ev
from actors.ledger.batch import SampleState
from actors.ledger.ledger_writer import LedgerWriter
from actors.protocol.workers import RegisterWorker


@message("scheduler.end_of_grace")
class EndOfGrace(Message):
    """The scheduler reminds itself with this that the time for workers of a former life to come back is over."""


@dataclass(slots=True)
class TakenUp:
    """The samples that a worker keeps, as columns of ``Registered``: former and new numbers, tokens in the ledger."""

    former: list[int] = field(default_factory=list[int])
    numbers: list[int] = field(default_factory=list[int])
    lengths: list[int] = field(default_factory=list[int])


class Reattachment:
    """A ``Reattachment`` awaits the workers of the scheduler's former life. It is made after ``Opened``."""

    def __init__(self, ledger_writer: LedgerWriter, max_staleness: int) -> None:
        self._ledger_writer = ledger_writer
        self._max_staleness = max_staleness
        self._awaited: set[str] = set(ledger_writer.ledger.former_holders())

    @property
    def awaited(self) -> set[str]:
        """Workers that may still come back with their samples."""
        return self._awaited

    def release(self, worker: str | None = None) -> bool:
        """Stop waiting for ``worker``, or for all if None; False if no worker was awaited."""
        had = bool(self._awaited)
        self._awaited = self._awaited - {worker} if worker is not None else set()
        return had

    def kept_back(self, step: int) -> np.ndarray:
        """int32[n] rows of ``step`` that are not to be handed out yet."""
        return self._ledger_writer.ledger.formerly_with(self._awaited, step) if self._awaited else np.empty(0, np.int32)

    def take_up(self, offer: RegisterWorker) -> TakenUp:
        """Assign to a worker the samples that it claims and may go on with."""
        taken, name, ledger = TakenUp(), offer.worker.name, self._ledger_writer.ledger
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
            self._ledger_writer.apply(ev.Assigned.to_one(name, step, first, rows, again=True))
            taken.former += former
            taken.numbers += range(first, first + len(rows))
            taken.lengths += batch.length[rows].tolist()
        return taken
