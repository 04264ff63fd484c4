"""What the control socket can do about training services: list them, and add, drain or remove one.

ctl services, ctl queue, ctl service add │ drain │ remove ──▶ ServiceOperations ──▶ Services, Admission

Invariants
- A request is in the register before it is carried out: if the head dies in between, its next life carries it out.
- A service that serves a job is not removed; whatever is refused leaves every other service and job as it was.
"""

from __future__ import annotations

import asyncio
from typing import Any

from actors.control.backend import Plain
from actors.control.errors import NotFound, NotNow
from actors.core.errors import AskError
from actors.protocol.training import BundleState, QueryService, ServiceState
from configs.services import ServiceConfig, service_from_mapping
from supervisors.head.view import HeadView
from supervisors.sharing.service_use import JobUse
from supervisors.sharing.services import Service, remove_stored_of


class ServiceOperations:
    """Implements the verbs of the control socket that concern services."""

    def __init__(self, head: HeadView) -> None:
        self._head = head

    async def services(self) -> list[Plain]:
        return [await self._row(service) for service in self._head.services.all]

    async def _row(self, service: Service) -> Plain:
        name, now_s = service.config.name, asyncio.get_running_loop().time()
        use = self._head.admission.use_of(name)
        try:
            state = await self._head.services.ask(name, QueryService(), ServiceState)
        except AskError:  # it is being started, or does not answer: the row has what the head knows by itself
            state = None
        bundles = {bundle.job: bundle for bundle in state.bundles} if state is not None else {}
        steps = max(1, use.steps)
        waiting = {job: bundle.asking_s for job, bundle in bundles.items() if bundle.asking_s is not None}
        return {
            "service": name,
            "state": service.state,
            "serves": ", ".join(use.jobs),
            "holder": state.holder if state is not None else "",
            "residency": ", ".join(f"{job} {bundle.tier}" for job, bundle in bundles.items() if bundle.tier),
            "queue": ", ".join(f"{job} {waited_s:.1f} s" for job, waited_s in waiting.items()),
            "steps": use.steps,
            "compute_s_a_step": _rounded(use.compute_s / steps),
            "device_s_a_step": _rounded(use.held_s(now_s) / steps),
            "device_hours_a_step": round(use.held_s(now_s) / steps / 3600, 6),
            "alone_s_a_step": _rounded(use.alone_s(now_s) / steps),
            "bubble": _rounded(use.bubble(now_s)),
            "saving": _rounded(use.saving(now_s)),
            "slowdown": _rounded(use.slowdown()),
            "memory_bytes": state.memory_bytes if state is not None else 0,
            "memory_limit_bytes": service.config.memory_bytes,
            "jobs": [_job_row(job, one, bundles.get(job)) for job, one in use.jobs.items()],
            "error": service.failure,
        }

    async def queue(self) -> list[Plain]:
        return self._head.admission.queue()

    async def models(self) -> list[Plain]:
        if self._head.serving is None:
            raise NotFound("this head serves no models; headrace head --serve FILE does")
        return (await self._head.serving.state()).rows

    async def service_add(self, service: Plain) -> Plain:
        config = service_from_mapping(service, "the added service")
        if (there := self._head.services.get(config.name)) is not None and not there.failure:
            raise NotNow(
                f"there is a service named {config.name!r}, and it is {there.state}",
                "Give the new one another name, or remove that one first",
            )
        if there is not None:
            await self._head.services.end(config.name)
        self._record([*self._configs(but=config.name), config])
        await self._head.services.begin(config)
        self._head.admission.decide()
        return {"service": config.name, "state": self._service(config.name).state}

    async def service_drain(self, service: str) -> Plain:
        found = self._service(service)
        found.draining = True
        self._record(self._configs())
        self._head.admission.decide()
        return {"service": service, "state": found.state, "serves": self._served_by(service)}

    def undrain_service(self, service: str) -> bool:
        """Let a service take jobs again; False if there is none of that name."""
        if (found := self._head.services.get(service)) is None:
            return False
        found.draining = False
        self._record(self._configs())
        self._head.admission.decide()
        return True

    async def service_remove(self, service: str) -> Plain:
        found = self._service(service)
        if jobs := self._served_by(service):
            raise NotNow(
                f"the service {service} is in use by {', '.join(jobs)}",
                "Drain it and wait until they are over, or cancel them",
            )
        found.draining = True  # nobody is put there while it is being stopped
        self._record(self._configs(but=service))
        await self._head.services.end(service)
        await self._head.services.machine.run_blocking(remove_stored_of, found.directory)
        self._head.admission.decide()
        return {"service": service, "state": "removed"}

    # ------------------------------------------------------------ helpers

    def _service(self, name: str) -> Service:
        found = self._head.services.get(name)
        if found is None:
            names = sorted(service.config.name for service in self._head.services.all)
            raise NotFound(
                f"there is no service {name!r}; " + (f"there are: {', '.join(names)}" if names else "there are none")
            )
        return found

    def _served_by(self, service: str) -> list[str]:
        return [job for job, place in self._head.admission.places.items() if place.service == service]

    def _configs(self, *, but: str = "") -> list[ServiceConfig]:
        return [service.config for service in self._head.services.all if service.config.name != but]

    def _record(self, configs: list[ServiceConfig]) -> None:
        names = [config.name for config in configs]
        draining = tuple(s.config.name for s in self._head.services.all if s.draining and s.config.name in names)
        try:
            self._head.service_register.set_services(configs, draining)
        except OSError as error:
            raise NotNow(f"the register of services cannot be written: {error}", "make room there") from error


def _job_row(job: str, use: JobUse, bundle: BundleState | None) -> Plain:
    steps = max(1, use.steps)
    row: dict[str, Any] = {
        "job": job,
        "steps": use.steps,
        "waited_s_a_step": _rounded(use.waited_s / steps),
        "switch_s_a_step": _rounded(use.switch_s / steps),
        "compute_s_a_step": _rounded(use.compute_s / steps),
        "slowdown": _rounded(use.slowdown),
    }
    if bundle is not None:
        row |= {"tier": bundle.tier, "state_bytes": bundle.state_bytes, "isolated": bundle.isolated}
    return row


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
