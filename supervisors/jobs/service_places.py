"""What a job's run asks of whoever has the training services. The head's are ``supervisors/head/services``.

    JobRun ─ admit ─▶ a service has room for the job, or will have ─▶ JobTree: the trainer's start ─ address ─▶ trainer
           ─ leave ─▶ its place is free for others

A job that names no service asks for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from configs.schema import JobConfig
from transport.address import ActorAddress

Say = Callable[[str], None]
"""Told why the job waits, each time that the reason changes."""


class ServicePlaces(Protocol):
    """Service places are those that all jobs of a head share."""

    async def admit(self, job: JobConfig, run_dir: Path, model_path: Path, say: Say) -> None:
        """Wait until a service has room for the job, which then has a place there.

        Raises:
            NeverServed: no service can ever serve it.
        """
        ...

    async def address(self, job: str) -> ActorAddress:
        """Address of the service on which ``job`` has its place, as it runs now; waits until it is ready.

        Raises:
            ServiceGone: it was given up, and will not be back.
            ServiceNotReady: it takes too long.
        """
        ...

    async def leave(self, job: str) -> None:
        """Give its place up, and take it out of the queue. Idempotent."""
        ...
