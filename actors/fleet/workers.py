"""The rollout workers of a job, as the scheduler knows them.

Invariants
- A name stands for one life at a time: who registers anew replaces the older life, whose samples have been returned. A
  life that was cut off and is back does not replace the one that was started in its stead.
- ``in_flight`` equals the ledger's live assignments of the worker.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from actors.core.lease import Lease, LeaseIssuer
from actors.fleet.loads import Loads
from actors.policies.latency_table import LatencyMeter
from actors.policies.view import WorkerView
from actors.protocol.work import EngineStats
from actors.protocol.workers import RegisterWorker
from transport.address import ActorAddress


@dataclass(slots=True)
class EngineRest:
    """It says whether an engine sleeps, where a seeding window or the plan of a step has some sleep."""

    told: bool | None = None
    """Whether it was last told to sleep (True) or to wake; None: it has been told neither."""
    told_s: float | None = None
    """Time at which it was told; None: it has answered."""
    sleeps_s: float = 0.0
    """Seconds that falling asleep took it last, from being told to."""
    wakes_s: float = 0.0
    """Seconds that waking took it last."""
    since_s: float = 0.0
    """Time since which it gets no work."""
    asleep: bool = False
    """Whether it says that it sleeps."""
    given_up: bool = False
    """Whether the trainer has begun without waiting for it any longer."""

    def tell(self, asleep: bool, now: float) -> None:
        """Note that it has been told to sleep, or to wake."""
        self.told, self.told_s, self.asleep = asleep, now, False

    def hear(self, asleep: bool, now: float) -> None:
        """Note its answer; one to what it was told before counts for nothing."""
        if self.told is not asleep or self.told_s is None:
            return
        took_s, self.told_s, self.asleep = now - self.told_s, None, asleep
        if asleep:
            self.sleeps_s = took_s
        else:
            self.wakes_s = took_s


@dataclass(slots=True)
class Worker:
    """It is one life of one worker. Times are of the loop's clock."""

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
    """Newest version that it has been told to pull, -1 if none."""
    told_at_s: float = 0.0
    resting_until_s: float = 0.0
    """Time until which it gets no work, since it could not take any."""
    leaves_s: float = math.inf
    """Time by which it is gone, as it has been given notice: it gets no work any more."""
    failures: int = 0
    """Refusals in a row."""
    heard_s: float = 0.0
    """Time of its last report or version, or of its first work after it had none: it should say something since."""
    lease: LeaseIssuer | None = None
    """Its lease, which runs out by itself; None until it is registered."""
    stats: EngineStats | None = None
    full_at: int | None = None
    """Number that its engine ran when others had to wait, though it has slots for them; None: not seen yet."""
    began: bool = False
    """Whether its first token has come."""
    again: bool = False
    """Whether it had been registered before it registered this time."""
    beside_trainer: bool = False
    """Whether it is on the trainer's machine."""
    off_duty: bool = False
    """Whether it gets no work because the trainer's machine is to train now, or because the step's plan has none."""
    pulls_later: bool = False
    """Whether it is told of versions only once it is woken."""
    transfer_s: float = 0.0
    """Seconds that it took to pull and load its newest version."""
    engine_rest: EngineRest = field(default_factory=EngineRest)
    latency: LatencyMeter = field(default_factory=LatencyMeter)
    """Latency of this life: the next one may be on another device."""

    def issue(self, lasts_s: float, lease: int, now: float) -> None:
        """Let it act for ``lasts_s`` from now on."""
        self.lease = LeaseIssuer(lasts_s=lasts_s, first_term=lease)
        self.lease.issue(str(self.address.peer), now)

    def renew(self, lease: int, now: float) -> Lease | None:
        """Lease the same lease for another term; None if it is another one, or has lapsed."""
        return None if self.lease is None else self.lease.renew(str(self.address.peer), lease, now)

    def has_lapsed(self, now: float) -> bool:
        """Whether it has not renewed its lease in time, and so has fenced itself by now."""
        return self.lease is not None and self.lease.holder(now) is None

    @property
    def leaving(self) -> bool:
        """Whether it has been given notice."""
        return self.leaves_s < math.inf

    @property
    def runs(self) -> int:
        """How many its engine runs at once, as far as that has been seen."""
        return self.slots if self.full_at is None else min(self.full_at, self.slots)

    def may_get_work(self, now: float) -> bool:
        """Whether it does not rest, nor leave, nor sleep."""
        return now >= self.resting_until_s and not self.leaving and not self.off_duty

    def view(self, *, has_suspect: bool = False, pending_max: int | None = None) -> WorkerView:
        """What policies see of one that may get work.

        ``pending_max``: it is given at most that many more than its engine runs. None: as many as it has slots.
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
        """Note that it has been told to load ``policy_version``."""
        self.told_version, self.told_at_s = policy_version, now
        if policy_version > max(self.policy_version, self.pulling_version):
            self.pulling_version, self.pulling_since_s = policy_version, now

    def serves(self, policy_version: int) -> None:
        """Note that it has loaded ``policy_version``."""
        self.policy_version = policy_version
        if self.pulling_version <= policy_version:
            self.pulling_version = -1

    def ran(self, sequences: int, *, others_waited: bool) -> None:
        """Its engine has made a step of so many. It is not full any more at what it has exceeded."""
        if sequences and (others_waited or sequences > (self.full_at or sequences)):
            self.full_at = sequences

    def rest(self, now: float, first_s: float, max_s: float) -> None:
        """Give it no work for a while, longer each time."""
        self.resting_until_s = now + min(first_s * 2 ** min(self.failures, 16), max_s)
        self.failures += 1


class WorkerTable:
    """It has all live workers by name, and knows how busy their engines have been."""

    def __init__(self) -> None:
        self.by_name: dict[str, Worker] = {}
        self.loads = Loads()
        self._busy_s = 0.0
        self._idle_s = 0.0

    def add(self, message: RegisterWorker, now: float) -> Worker:
        """Enter a new life of a worker."""
        name = message.worker.name
        worker = Worker(
            name,
            message.worker,
            message.node,
            message.engine,
            message.slots,
            message.policy_version,
            heard_s=now,
            again=message.again,
            beside_trainer=message.beside_trainer,
        )
        self.by_name[name] = worker
        return worker

    def at(self, address: ActorAddress) -> Worker | None:
        """The worker whose present life is at ``address``."""
        worker = self.by_name.get(address.name)
        return worker if worker is not None and worker.address.peer == address.peer else None

    def heard(self, worker: Worker, stats: EngineStats, now: float) -> None:
        """Add what the engine has been doing since its last report. The first one is the base line."""
        before = worker.stats
        if before is not None:
            self._busy_s += max(0.0, stats.busy_s_total - before.busy_s_total)
            self._idle_s += max(0.0, stats.idle_s_total - before.idle_s_total)
        worker.stats = stats
        worker.heard_s = now
        worker.failures = 0

    def take_idle_fraction(self) -> float:
        """Idle share of all engines' time since the last call; 0 if no engine has reported."""
        busy, idle = self._busy_s, self._idle_s
        self._busy_s = self._idle_s = 0.0
        return idle / (busy + idle) if busy + idle > 0 else 0.0
