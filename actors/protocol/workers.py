"""How a rollout worker and its scheduler meet, what the worker tells of itself, and how they part.

worker ──RegisterWorker──▶ scheduler ──Registered──▶ worker     and then, at any time, from the worker:
WorkerVersion, WorkerAsleep, AssignmentsFailed, Draining, Leaving; WorkerEnded comes from its supervisor
"""

from __future__ import annotations

import msgspec
import numpy as np

from actors.core.message import Message, message
from actors.protocol.failures import Failure
from transport.address import ActorAddress


@message("scheduler.register_worker")
class RegisterWorker(Message):
    """A worker offers itself. Reply: Registered. A worker that lost its lease registers anew."""

    job: str
    worker: ActorAddress
    node: str
    engine: str
    slots: int
    """Credit: number of samples that the worker will hold at once."""
    policy_version: int
    """Version that the worker serves, -1 before the first pull."""
    again: bool = False
    """Whether this life was registered before: it was cut off, and may have been replaced meanwhile."""
    engine_start_s: float = 0.0
    """Seconds that its engine took to start."""
    beside_trainer: bool = False
    """Whether the worker is on the trainer's machine."""
    holds: np.ndarray = msgspec.field(default_factory=lambda: np.empty(0, np.int64))  # int64[n]
    """Assignments of which the worker has tokens to report: it generates them, or they have ended lately."""


@message("scheduler.registered")
class Registered(Message):
    """Tells the worker that it is registered: the scheduler's term, its lease, and what it may go on with."""

    term: int
    lease_s: float
    """Seconds for which the lease holds (``actors/core/tenure.py``)."""
    lease: int
    """Number of the lease; RenewLease names it."""
    policy_version: int
    """Newest published version, -1 if none yet."""
    weights: ActorAddress | None
    """Address of the weight server that has this version."""
    kept: np.ndarray = msgspec.field(default_factory=lambda: np.empty(0, np.int64))  # int64[n]
    """Assignments of ``RegisterWorker.holds`` with which the worker is to go on; all others are void."""
    numbers: np.ndarray = msgspec.field(default_factory=lambda: np.empty(0, np.int64))  # int64[n]
    """Numbers of the new assignments under which ``kept`` go on."""
    lengths: np.ndarray = msgspec.field(default_factory=lambda: np.empty(0, np.int32))  # int32[n]
    """Number of response tokens that the ledger has of each; the worker sends those that follow."""


@message("scheduler.worker_version")
class WorkerVersion(Message):
    """The worker has verified and loaded all of this version, and serves it from now on."""

    job: str
    worker: str
    policy_version: int
    pull_s: float
    """Seconds of pulling, while generation goes on."""
    pull_bytes: int
    """Size of the version in bytes."""
    load_s: float = 0.0
    """Seconds for which generation stood still."""
    wire_bytes: int = 0
    """Bytes that came over the network: none if the version was mapped, fewer if it came as weight deltas."""


@message("scheduler.worker_asleep")
class WorkerAsleep(Message):
    """The worker answers SetAsleep, once the engine sleeps or is awake as ordered."""

    job: str
    worker: str
    asleep: bool


@message("scheduler.assignments_failed")
class AssignmentsFailed(Message):
    """The engine could not process these assignments; the typed failure says whose fault it was."""

    job: str
    worker: str
    assignments: np.ndarray  # int64[n]
    failure: Failure


@message("scheduler.draining")
class Draining(Message):
    """The worker has been given notice: it begins nothing, goes on with what runs, and ends in ``left_s``."""

    job: str
    worker: str
    left_s: float
    reason: str


@message("scheduler.leaving")
class Leaving(Message):
    """The worker has handed everything back and goes (drained or preempted)."""

    job: str
    worker: str
    reason: str


@message("scheduler.worker_ended")
class WorkerEnded(Message):
    """A worker's machine says how its process ended: a link that is lost does not tell a crash from a cut."""

    job: str
    worker: str
    incarnation: int
    """Incarnation of the worker's peer."""
    crashed: bool
    """Whether the process ended by itself: an exception, a fatal signal. SIGKILL and SIGTERM come from outside."""
    detail: str
