"""What the head's process and the process that started it say to each other.

machine process ── exec, HeadOrder on stdin ──▶ head
                ◀─HeadReady, HeadBeacon, HeadProgress─     told
                ◀─HeadEnded─                               asked, when its work is done; then it ends with 0
                ── SIGINT, SIGTERM ──▶                     as Ctrl-C: once for a checkpoint, twice for the end
"""

from __future__ import annotations

from typing import Any

import msgspec

from actors.core.message import Message, message
from transport.address import ActorAddress, PeerId

_NOBODY = ActorAddress("", PeerId("", 0))
Plain = str | int | float | bool | None


class FormerJob(msgspec.Struct):
    """What a next life of the head has to know of one job, as earlier lives have said it."""

    step: int = 0
    restarts: int = 0
    workers: int = 0
    """Rollout workers that were wanted last; 0: as the job file says."""
    functions: str = ""
    """Book of its functions (``providers/function_book.py``); empty: it has none."""
    begun: bool = False
    """True once the actors of the job's core ran."""


class Former(msgspec.Struct, frozen=True, kw_only=True):
    """What the machine process knows of earlier lives of the head; see ``job_run.FormerLife``."""

    ended: str
    restarts: int
    """Restarts of the head."""
    jobs: dict[str, FormerJob] = {}


class JobOrder(msgspec.Struct, frozen=True):
    """A job that the head runs to its end."""

    job: str
    """The job as JSON."""
    run_dir: str
    machines: str = ""
    """Beginning of the names of the machines that are this job's alone: those of its provider, beside other jobs."""


class HeadOrder(msgspec.Struct, frozen=True, kw_only=True):
    """All that a life of the head is told, as JSON on its standard input."""

    life: int = 1
    """Number of the life, from 1."""
    run_root: str
    """Directory in which submitted jobs get their run directories."""
    directory: str
    """Directory of the head's own files: its endpoint, its services. A job with this run directory is alone in it."""
    listen: str = ""
    """Endpoint where nodes join, the same in every life."""
    control: str = ""
    log: str
    agent: ActorAddress = _NOBODY
    """This machine's node agent."""
    keeper: ActorAddress = _NOBODY
    """Actor of the machine process that hears the head."""
    limits: str = ""
    """``Limits`` as JSON."""
    keys: str = ""
    control_keys: str = ""
    jobs: tuple[JobOrder, ...] | None = None
    """Jobs after whose ends the head ends; None: it serves jobs from the control socket until a signal."""
    services: str = ""
    """A services file as JSON, for the first life; empty: none."""
    serving: str = ""
    """A serving file as JSON; empty: no models are served."""
    resume: bool = False
    faults: str = ""
    """A fault plan for ``jobs``, as JSON."""
    allow_functions: tuple[str, ...] | None = None
    """Prefixes of the functions that submitted jobs may name; None: any."""
    devices: tuple[str, ...] = ()
    """Devices that this machine's node agent has for role processes."""
    former: Former | None = None

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @staticmethod
    def decode(data: bytes) -> HeadOrder:
        """Raises:
        msgspec.DecodeError: the data is no order: a bug of the machine process.
        """
        return msgspec.json.decode(data, type=HeadOrder)


@message("head.ready")
class HeadReady(Message):
    """Told: the head listens, and so does its control socket."""

    life: int
    endpoint: str
    control: str


@message("head.beacon")
class HeadBeacon(Message):
    """Told every ``limits.beacon_interval_s``: the head's event loop turns."""

    life: int
    nodes: tuple[str, ...] = ()
    """Names of the nodes that have joined."""


@message("head.progress")
class HeadProgress(Message):
    """Told: one map for the terminal, as ``live_view.py`` takes it. Its ``of_job`` names the job."""

    life: int
    fields: dict[str, Plain]


@message("head.ended")
class HeadEnded(Message):
    """Ask: the head's work is done. Answered with HeadHeard."""

    life: int
    summary: dict[str, Any]
    """Summary of each job by its name; of a head that serves: empty."""


@message("head.heard")
class HeadHeard(Message):
    pass
