"""A journal in memory, without disk or threads, for tests and simulations."""

from __future__ import annotations

from actors.ledger import events as ev
from actors.ledger.batch import StepBatch
from actors.ledger.committed import CommittedSample, committed_rows
from actors.ledger.journal import KEPT_KINDS, prune_step


class MemoryJournal:
    """Keeps events encoded, so that what is read back has been through the same bytes as on disk."""

    def __init__(self, job: str = "job") -> None:
        self.job = job
        self.pruned_below = 0
        self.samples: list[CommittedSample] = []
        self._bodies: list[tuple[str, int, bytes]] = []
        self._durable = 0
        self._newest_step = -1

    def read(self) -> tuple[int, list[ev.Event]]:
        return self.pruned_below, [ev.decode_event(body) for _, _, body in self._bodies]

    def append(self, event: ev.Event) -> None:
        step = prune_step(event, self._newest_step)
        self._newest_step = max(self._newest_step, step)
        self._bodies.append((ev.kind_of(event), step, ev.encode_event(event)))

    def record(self, batch: StepBatch) -> None:
        self.samples.extend(committed_rows(self.job, batch))

    async def room(self) -> None:
        return

    async def durable(self) -> None:
        self._durable = len(self._bodies)

    def prune(self, below: int) -> None:
        kept = [i for i, (kind, step, _) in enumerate(self._bodies) if step >= below or kind in KEPT_KINDS]
        self._durable = sum(i < self._durable for i in kept)
        self._bodies = [self._bodies[i] for i in kept]
        self.pruned_below = max(self.pruned_below, below)

    def crash(self, keep: int = 0) -> None:
        """Lose the events after the last ``durable``, except the first ``keep`` of them."""
        del self._bodies[self._durable + keep :]

    async def close(self) -> None:
        await self.durable()
