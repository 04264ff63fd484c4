"""What a job's run asks of a head's training services. ``supervisors/sharing/admission.py`` answers it.

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
"""Callback that is told why the job waits, each time that the reason changes."""


class ServicePlaces(Protocol):
    """Gives jobs their places on the training services of a head."""

    async def admit(self, job: JobConfig, run_dir: Path, model_path: Path, say: Say) -> None:
        """Wait until a service has room for the job, which then has a place there.

        Raises:
            NeverServed: no service can ever serve it.
        """
        ...

    async def address(self, job: str) -> ActorAddress:
        """Address of the service on which ``job`` has its place, as it runs now; waits until it is ready.

        Raises:
            ServiceGone: the service was given up, and will not be back.
            ServiceNotReady: it is not ready in time.
        """
        ...

    async def leave(self, job: str) -> None:
        """Give up the place of ``job``, and take it out of the queue. Idempotent."""
        ...
