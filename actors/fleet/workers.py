"""The rollout workers of a job, as the scheduler knows them.

Invariants
- A name stands for one life at a time: a life that registers replaces the older one, whose samples are returned first.
  A life that was cut off and comes back does not replace the one that was started in its place.
- ``in_flight`` equals the ledger's live assignments of the worker.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from actors.core.lease import LeaseIssuer
from actors.policies.assigning.latency_table import LatencyMeter
from actors.policies.assigning.view import WorkerView
from actors.protocol.work import EngineStats
from actors.protocol.workers import RegisterWorker, WorkerVersion
from transport.address import ActorAddress


@dataclass(slots=True)
class Worker:
    """A ``Worker`` is one life of a worker, as all modes know it. Times are of the loop's clock."""

    name: str
    address: ActorAddress
    node: str
    engine: str
    slots: int
    policy_version: int
    in_flight: int = 0
    pulling_version: int = -1
    pulling_since_s: float = 0.0
    told_version: int = -1
    """Newest version that the worker has been told to pull, -1 if none."""
    told_at_s: float = 0.0
    resting_until_s: float = 0.0
    """Time until which the worker gets no work, since it could not take any."""
    leaves_s: float = math.inf
    """Time by which the worker will be gone, after notice; it then gets no more work."""
    unsound_reports: int = 0
    """Number of reports of this life that no sound engine makes."""
    failures: int = 0
    """Number of times in a row that it could not take work."""
    heard_s: float = 0.0
    """Time of its last report or version, or of the first work after it had none."""
    lease: LeaseIssuer | None = None
    """Lease of this life; None until it is registered."""
    stats: EngineStats | None = None
    prefills_from: EngineStats | None = None
    """Stats up to which its prefills have been counted; None: count from its next ones, as after a new scheduler."""
    full_at: int | None = None
    """Number of samples at which its engine was full, so that others waited in spite of free slots; None: never."""
    began: bool = False
    """Whether its first token has come."""
    again: bool = False
    """Whether this life had been registered before."""
    off_duty: bool = False
    """Whether the fleet's mode lets it rest, so that it gets no work."""
    latency: LatencyMeter = field(default_factory=LatencyMeter)
    """Measured latency of this life; the next life may be on another device."""

    def has_lapsed(self, now: float) -> bool:
        """Whether the worker has not renewed its lease in time, and so has stopped by itself."""
        return self.lease is not None and self.lease.holder(now) is None

    @property
    def leaving(self) -> bool:
        """Whether the worker has been given notice."""
        return self.leaves_s < math.inf

    @property
    def runs(self) -> int:
        """How many samples its engine runs at once, as far as is known."""
        return self.slots if self.full_at is None else min(self.full_at, self.slots)

    def may_get_work(self, now: float) -> bool:
        """Whether the worker neither rests, nor leaves, nor sleeps."""
        return now >= self.resting_until_s and not self.leaving and not self.off_duty

    def view(self, *, has_suspect: bool = False, pending_max: int | None = None) -> WorkerView:
        """The policies' view of this worker.

        ``pending_max``: most samples to give it beyond those that its engine runs; None: as many as it has slots.
        """
        slots = self.slots if pending_max is None else min(self.slots, self.runs + pending_max)
        return WorkerView(
            self.name,
            self.policy_version,
            slots,
            self.in_flight,
            self.pulling_version,
            self.pulling_since_s,
            has_suspect,
            self.latency.table,
            None if pending_max is None else self.runs,
        )

    def pulls(self, policy_version: int, now: float) -> None:
        """Note that the worker was told to load ``policy_version``."""
        self.told_version, self.told_at_s = policy_version, now
        if policy_version > max(self.policy_version, self.pulling_version):
            self.pulling_version, self.pulling_since_s = policy_version, now

    def serves(self, policy_version: int) -> None:
        """Note that the worker has loaded ``policy_version``."""
        self.policy_version = policy_version
        if self.pulling_version <= policy_version:
            self.pulling_version = -1

    def ran(self, sequences: int, *, others_waited: bool) -> None:
        """Note that the engine has run ``sequences`` at once: its limit, if others had to wait; at least that many."""
        if sequences and (others_waited or sequences > (self.full_at or sequences)):
            self.full_at = sequences

    def rest(self, now: float, first_s: float, max_s: float) -> None:
        """Give the worker no work for a while, longer each time in a row."""
        self.resting_until_s = now + min(first_s * 2 ** min(self.failures, 16), max_s)
        self.failures += 1


class Loads:
    """The loads of versions by workers are added up here until ``take``."""

    def __init__(self) -> None:
        self._news: list[WorkerVersion] = []

    def note(self, news: WorkerVersion) -> None:
        """Count a version that a worker has loaded, unless it had that from the start and so has pulled nothing."""
        if news.pull_bytes > 0:
            self._news.append(news)

    def take(self) -> dict[str, float]:
        """The columns of metrics.jsonl since the last call. Seconds are those of the slowest worker."""
        news, self._news = self._news, []
        return {
            "weights_loaded": len(news),
            "pull_seconds_max": max((one.pull_s for one in news), default=0.0),
            "load_seconds_max": max((one.load_s for one in news), default=0.0),
            "pull_bytes": sum(one.pull_bytes for one in news),
            "pull_wire_bytes": sum(one.wire_bytes for one in news),
        }


class WorkerTable:
    """The table holds all live workers by name, and adds up how busy their engines have been."""

    def __init__(self) -> None:
        self.by_name: dict[str, Worker] = {}
        self.loads = Loads()
        self._busy_s = 0.0
        self._idle_s = 0.0
        self._prefilled = self._prefix_hits = self._preemptions = 0

    def add(self, message: RegisterWorker, now: float) -> Worker:
        """Enter a new life of a worker, or one that has come back."""
        name, back = message.worker.name, self.at(message.worker)
        worker = Worker(
            name,
            message.worker,
            message.node,
            message.engine,
            message.slots,
            message.policy_version,
            heard_s=now,
            prefills_from=back.prefills_from if back else None if message.again else EngineStats(),
            again=message.again,
        )
        self.by_name[name] = worker
        return worker

    def at(self, address: ActorAddress) -> Worker | None:
        """The worker whose present life is at ``address``."""
        worker = self.by_name.get(address.name)
        return worker if worker is not None and worker.address.peer == address.peer else None

    def heard(self, worker: Worker, stats: EngineStats, now: float) -> None:
        """Add the engine's busy and idle time since its last report; the first report is the baseline."""
        before = worker.stats
        if before is not None:
            self._busy_s += max(0.0, stats.busy_s_total - before.busy_s_total)
            self._idle_s += max(0.0, stats.idle_s_total - before.idle_s_total)
        if (counted := worker.prefills_from) is not None:
            self._prefilled += max(0, stats.prefilled_tokens_total - counted.prefilled_tokens_total)
            self._prefix_hits += max(0, stats.prefix_hit_tokens_total - counted.prefix_hit_tokens_total)
            self._preemptions += max(0, stats.preemptions_total - counted.preemptions_total)
        worker.stats = worker.prefills_from = stats
        worker.heard_s = now
        worker.failures = 0

    def take_idle_fraction(self) -> float:
        """Idle share of all engines' time since the last call; 0 if no engine has reported."""
        busy, idle = self._busy_s, self._idle_s
        self._busy_s = self._idle_s = 0.0
        return idle / (busy + idle) if busy + idle > 0 else 0.0

    def take_prefills(self) -> dict[str, float]:
        """Columns of metrics.jsonl: tokens prefilled, tokens that prefix caches saved, and preemptions, since then."""
        columns: dict[str, float] = {
            "prefilled_tokens": self._prefilled,
            "prefix_hit_tokens": self._prefix_hits,
            "preemptions": self._preemptions,
        }
        self._prefilled = self._prefix_hits = self._preemptions = 0
        return columns
