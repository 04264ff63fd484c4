"""Tells services which jobs are over, so that they drop those jobs' state: at once, or when they are up again.

    a job is over, or has moved ─▶ note: in the register ─▶ DetachBundle ─▶ Done ─▶ no longer in the register
                                                                 └─ no answer ─▶ again: the service is ready, another
                                                                                 job is over, the head lives again
Invariants
- A noted job is told again, even after a death of head or service, until the service has answered or is removed: the
  job's stored state would otherwise take room for as long as the service exists.
- Once a job has a place on that service again, the service is told no more: that would end the job's new bundle.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import structlog

from actors.core.errors import AskError
from actors.core.message import Done
from actors.protocol.training import DetachBundle
from supervisors.sharing.service_register import ServiceRegister
from supervisors.sharing.services import Services

log = structlog.get_logger("headrace.services")


class Detachments:
    """Tells each service which of its jobs are over, until it has answered."""

    def __init__(self, services: Services, register: ServiceRegister) -> None:
        self._services, self._register = services, register

    def note(self, service: str, job: str) -> None:
        """Note that ``service`` is to be told to drop its state of ``job``."""
        noted = self._register.now.over.get(service, ())
        self._set(service, tuple(dict.fromkeys([*noted, job])))

    def is_back(self, service: str, job: str) -> None:
        """Forget the note: ``job`` has a place there again, and its trainer will say which old state is of use."""
        self._drop(service, job)

    async def tell(self, service: str, *, but: Collection[str]) -> None:
        """Tell the service of all jobs that are noted, ``but`` those that have a place somewhere."""
        noted = self._register.now.over.get(service, ())
        await asyncio.gather(*(self._tell(service, job) for job in noted if job not in but))

    async def tell_of(self, job: str, *, but: str = "") -> None:
        """Tell all services for which ``job`` is noted, ``but`` the one where it has its place."""
        noted = [service for service, jobs in self._register.now.over.items() if job in jobs and service != but]
        await asyncio.gather(*(self._tell(service, job) for service in noted))

    async def _tell(self, service: str, job: str) -> None:
        try:
            await self._services.ask(service, DetachBundle(job=job), Done)
        except AskError as error:
            log.info("a service is told later that a job is over", service=service, job=job, error=str(error))
        else:
            self._drop(service, job)

    def _drop(self, service: str, job: str) -> None:
        noted = self._register.now.over.get(service, ())
        if job in noted:
            self._set(service, tuple(other for other in noted if other != job))

    def _set(self, service: str, jobs: tuple[str, ...]) -> None:
        over = {name: noted for name, noted in self._register.now.over.items() if name != service}
        self._register.set_over(over | ({service: jobs} if jobs else {}))
