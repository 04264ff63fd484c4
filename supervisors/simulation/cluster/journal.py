"""A journal on a simulated disk: it outlives the scheduler and the head, and may lose what was not yet durable.

    append ─▶ waiting ──flush timer, durable()──▶ file: written ──sync──▶ durable
                 │ the process is killed              │ the machine loses power
                 └ lost                               └ lost, but for a prefix

It behaves as ``SqliteJournal`` does: it commits in groups, a failed write is final for this life, and the file always
holds a prefix of what was appended.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from actors.ledger import events as ev
from actors.ledger.batch import StepBatch
from actors.ledger.committed import CommittedSample, committed_rows
from actors.ledger.errors import JournalFailed
from actors.ledger.journal import KEPT_KINDS, prune_step
from configs.limits import Limits

Item = ev.Event | StepBatch | int
"""An event, the samples of a committed batch, or the step below which to prune."""


class JournalFile:
    """Stands in for one job's ``journal.db``, without SQLite. ``on_event`` is told each event as it is written."""

    def __init__(self, job: str, on_event: Callable[[str, bytes], None]) -> None:
        self.job = job
        self.full = False
        """Flag that is true while the disk is full."""
        self.pruned_below = 0
        self.history: list[tuple[str, bytes]] = []
        """Kind and body of every event that was written and not lost, including pruned ones."""
        self._on_event = on_event
        self._samples: dict[tuple[int, int, int], CommittedSample] = {}
        self._lines: list[tuple[str, int, bytes]] = []
        self._durable = 0
        self._newest_step = -1

    @property
    def samples(self) -> list[CommittedSample]:
        return [self._samples[key] for key in sorted(self._samples)]

    def read(self) -> tuple[int, list[ev.Event]]:
        """As ``Journal.read``. A full disk raises JournalFailed, since it may have room at the next try."""
        if self.full:
            raise JournalFailed(f"the journal of {self.job} cannot be opened: the disk is full")
        return self.pruned_below, [ev.decode_event(body) for _, _, body in self._lines]

    def write(self, items: list[Item]) -> None:
        """Write all of ``items`` in one transaction, or raise JournalFailed."""
        if self.full:
            raise JournalFailed("the journal could not be written: database or disk is full")
        for item in items:
            if isinstance(item, int):
                self._prune(item)
            elif isinstance(item, StepBatch):
                rows = committed_rows(self.job, item)
                self._samples.update({(row.step, row.prompt, row.sibling): row for row in rows})
            else:
                self._append(item)

    def _append(self, event: ev.Event) -> None:
        step = prune_step(event, self._newest_step)
        self._newest_step = max(self._newest_step, step)
        kind, body = ev.kind_of(event), ev.encode_event(event)
        self._lines.append((kind, step, body))
        self.history.append((kind, body))
        self._on_event(kind, body)

    def sync(self) -> None:
        """Make what has been written survive the loss of power."""
        self._durable = len(self._lines)

    def _prune(self, below: int) -> None:
        kept = [i for i, (kind, step, _) in enumerate(self._lines) if step >= below or kind in KEPT_KINDS]
        self._durable = sum(i < self._durable for i in kept)
        self._lines = [self._lines[i] for i in kept]
        self.pruned_below = max(self.pruned_below, below)

    def lose_power(self, rng: random.Random) -> int:
        """Keep a random prefix of the events that were not synced, drop the rest, and return how many are lost."""
        keep = rng.randint(self._durable, len(self._lines))
        lost = len(self._lines) - keep
        if lost:
            del self._lines[keep:], self.history[-lost:]
        self._durable = keep
        return lost


class SimulatedJournal:
    """Implements ``Journal`` for one life of a scheduler."""

    def __init__(self, file: JournalFile, limits: Limits, disk_s: float) -> None:
        self._file = file
        self._limits = limits
        self._disk_s = disk_s
        self._waiting: list[Item] = []
        self._timer: asyncio.TimerHandle | None = None
        self._failure: JournalFailed | None = None

    def read(self) -> tuple[int, list[ev.Event]]:
        return self._file.read()

    def append(self, event: ev.Event) -> None:
        self._put(event)

    def record(self, batch: StepBatch) -> None:
        # its arrays may be given back before they are written
        self._put(batch)

    def prune(self, below: int) -> None:
        self._put(below)

    async def room(self) -> None:
        self._check()

    async def durable(self) -> None:
        self._flush()
        self._check()
        await asyncio.sleep(self._disk_s)
        self._check()
        self._file.sync()

    async def close(self) -> None:
        if self._failure is None:
            await self.durable()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _put(self, item: Item) -> None:
        self._check()
        self._waiting.append(item)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._limits.journal_flush_s, self._flush)

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        items, self._waiting = self._waiting, []
        if not items or self._failure is not None:
            return
        try:
            self._file.write(items)
        except JournalFailed as error:
            self._failure = error
