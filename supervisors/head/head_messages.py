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


class Former(msgspec.Struct, frozen=True, kw_only=True):
    """This is what the machine process knows of earlier lives of the head; see ``job_run.FormerLife``."""

    ended: str
    restarts: int
    workers: int
    functions: str = ""
    """Book of the one job's functions (``providers/function_book.py``); empty: it has none."""
    begun: bool = False
    """True if one of them has said that the core of the one job stands."""
    begun_jobs: tuple[str, ...] = ()
    """Jobs of several whose core stood in one of them."""


class HeadOrder(msgspec.Struct, frozen=True, kw_only=True):
    """An order is all that a life of the head is told, as JSON on its standard input."""

    life: int = 1
    """Number of the life, from 1."""
    run_root: str
    listen: str = ""
    """Endpoint, the same in every life; only in the first its port may be a wildcard."""
    control: str = ""
    log: str
    agent: ActorAddress = _NOBODY
    """This machine's node agent."""
    keeper: ActorAddress = _NOBODY
    """Actor that is told how it goes."""
    limits: str = ""
    """``Limits`` as JSON."""
    keys: str = ""
    control_keys: str = ""
    job: str = ""
    """The one job to run, as JSON; empty, and no ``run_dirs``: serve jobs that come over the control socket."""
    run_dir: str = ""
    run_dirs: tuple[str, ...] = ()
    """Run directories of several jobs, each with its job.yaml, which are run to their ends; then the head ends."""
    services: str = ""
    """A services file as JSON, for the first life; empty: none."""
    services_dir: str = ""
    """Directory in which the services have their files; empty: ``run_root``."""
    resume: bool = False
    faults: str = ""
    """A fault plan as JSON."""
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
        msgspec.DecodeError: a bug of whoever started the process.
        """
        return msgspec.json.decode(data, type=HeadOrder)


@message("head.ready")
class HeadReady(Message):
    """Told: it listens, and so does its control socket."""

    life: int
    endpoint: str
    control: str


@message("head.beacon")
class HeadBeacon(Message):
    """Told every ``limits.beacon_interval_s``: its event loop turns."""

    life: int
    nodes: tuple[str, ...] = ()
    """Names of the other machines that it has."""


@message("head.progress")
class HeadProgress(Message):
    """Told: one map for the terminal, as ``live_view.py`` takes it; with ``of_job``, as ``job_lines.py`` does."""

    life: int
    fields: dict[str, Plain]


@message("head.ended")
class HeadEnded(Message):
    """Ask: its work is done. Answered with HeadHeard."""

    life: int
    summary: dict[str, Any]
    """Summary of the one job; of several: each one's by its name; of a head that serves: empty."""


@message("head.heard")
class HeadHeard(Message):
    pass
