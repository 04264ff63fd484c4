"""Decides which job has a place on which training service, and which jobs wait for one.

    JobRun ─ admit ─▶ queue ─┐                                ┌─ place ─▶ the job goes on; noted in the register
    leave, a step, a change ─┴─▶ policies/sharing/placement ───┼─ wait ──▶ "queued: waits for 1.2 GB on train-0"
                                                              ├─ move ──▶ its trainer is started again elsewhere
                                                              └─ refuse ▶ NeverServed

Invariants
- A job has a place before its first process starts and until its last one has ended.
- A place outlives the head: a job that had begun has its place again, whatever has been queued since.
- Jobs queue in the order in which they were submitted, also after a restart of the head.
- A service drops the state of a job that is over or has moved (``detachments``).
- No job joins a service that has died again and again in another job's calls; jobs that are there already stay.
- The policy is asked again whenever something may have changed; its answer depends only on the present state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from actors.core.errors import AskError
from actors.host.clock import time_of_day_s
from actors.models.adapter import adapter_spec
from actors.policies.sharing.job_profile import UNKNOWN, JobProfile, StepUse, observed, step_alone_s
from actors.policies.sharing.placement import decide
from actors.policies.sharing.placement_view import JobView, PlacementRules, PlacementView, Quota, ServiceView
from actors.protocol.training import QueryService, ServiceState
from actors.train_service.sizes import replicas_of, state_bytes, state_dtype
from configs.schema import JobConfig
from configs.services import AUTO, ServiceConfig, ServicesConfig, disagreements, problems_with
from supervisors.jobs.service_places import Say
from supervisors.sharing.detachments import Detachments
from supervisors.sharing.service_register import ServicePlace, ServiceRegister
from supervisors.sharing.service_use import ServiceUse
from supervisors.sharing.services import Service, Services
from supervisors.tree.errors import NeverServed, ServiceGone
from transport.address import ActorAddress

log = structlog.get_logger("headrace.services")

OnMove = Callable[[str], None]
"""Callback that restarts the trainer of the named job, whose place is now on another service."""


@dataclass
class Submission:
    """Holds what is known of a job that names a service, until its end."""

    number: int
    """Number of the job in the order of submissions."""
    job: JobConfig | None = None
    """The job, once it asks for a place."""
    state_bytes: int = 0
    profile: JobProfile = UNKNOWN
    steps_left: int | None = None
    waiting: asyncio.Future[None] | None = None
    """Future that is set while the job waits, and has a result once the job has a place."""
    say: Say = field(default=lambda _: None)
    reason: str = ""
    """Reason for which the job waits, as reported last."""


class Admission:
    """Implements ``supervisors.jobs.service_places.ServicePlaces``."""

    def __init__(self, services: Services, register: ServiceRegister, *, on_move: OnMove) -> None:
        self._services, self._register = services, register
        self._on_move = on_move
        self._known: dict[str, Submission] = {}
        self._submissions = 0
        self._places: dict[str, ServicePlace] = {}
        self._uses: dict[str, ServiceUse] = {}
        """Uses by service."""
        self._detachments = Detachments(services, register)
        self._work: set[asyncio.Task[None]] = set()

    @property
    def rules(self) -> ServicesConfig:
        return self._register.now.rules

    @property
    def places(self) -> Mapping[str, ServicePlace]:
        return self._places

    def use_of(self, service: str) -> ServiceUse:
        """Use of a service, as far as this life of the head has seen it."""
        return self._uses.setdefault(service, ServiceUse())

    def sentences(self) -> list[str]:
        """Sentences for people on what each service has done and saved."""
        now_s = asyncio.get_running_loop().time()
        return [said for name, use in self._uses.items() if (said := use.sentence(name, now_s))]

    def go_on(self) -> None:
        """Take over the places that a former life has noted."""
        self._set_places(dict(self._register.now.places))

    def keep_only(self, jobs: set[str]) -> None:
        """Give up the places of a former life whose jobs do not go on."""
        for job, place in self._places.items():
            if job not in jobs:
                self._detachments.note(place.service, job)
                self._later(self._detachments.tell_of(job), f"detach {job}")
        self._set_places({job: place for job, place in self._places.items() if job in jobs})

    def service_is_ready(self, service: str) -> None:
        """Tell a service whose process has come up what it has missed, and ask in which jobs' calls it has died."""
        self._later(self._catch_up(service), f"catch up with {service}")

    async def _catch_up(self, service: str) -> None:
        await self._detachments.tell(service, but=self._places)
        try:
            state = await self._services.ask(service, QueryService(), ServiceState)
        except AskError as error:  # the next ``service_is_ready`` asks again
            log.info("a service did not say who computes alone", service=service, error=str(error))
            return
        alone = {
            job: place.model_copy(update={"alone": True})
            for job, place in self._places.items()
            if place.service == service and job in state.isolated
        }
        self._set_places({**self._places, **alone})
        self.decide()

    def _later(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run ``work`` in the background; ``close`` cancels it if it still runs."""
        task = asyncio.create_task(work, name=name)
        self._work.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._work.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("what was begun for a service has failed", what=task.get_name(), exc_info=error)

    def close(self) -> None:
        """Stop telling services of ended jobs; the head's next life tells them what is noted."""
        for task in self._work:
            task.cancel()

    def submitted(self, job: str) -> None:
        """Give the job its number in the order of the queue."""
        self._submissions += 1
        self._known[job] = Submission(self._submissions)

    # ------------------------------------------------------------ what a job's run asks

    async def admit(self, job: JobConfig, run_dir: Path, model_path: Path, say: Say) -> None:
        known = self._of(job.name)
        known.job, known.say, known.reason = job, say, ""
        if place := self._places.get(job.name):
            known.state_bytes = place.state_bytes
            return
        if problems := problems_with(job, self.rules):
            where, wrong, fix = problems[0]
            raise NeverServed(f"{where}: {wrong}. {fix}")
        suitable = [service for service in self.rules.services if not problems_on(job, service)]
        known.state_bytes = await self._services.machine.run_blocking(trained_bytes, job, model_path, suitable)
        known.waiting = waiting = asyncio.get_running_loop().create_future()
        try:
            self.decide()
            await waiting  # may take as long as others run: the operator sees why, and may cancel the job
        finally:
            known.waiting = None

    async def address(self, job: str) -> ActorAddress:
        place = self._places.get(job)
        if place is None:
            raise ServiceGone(f"{job} has no place on a service any more; resume it")
        # the job's next trainer asks: its last one, on the service where the job was before, has ended
        self._later(self._detachments.tell_of(job, but=place.service), f"detach {job} from where it was")
        return await self._services.address(place.service)

    async def leave(self, job: str) -> None:
        self._known.pop(job, None)
        place = self._places.get(job)
        if place is not None:
            self._detachments.note(place.service, job)
            await self._detachments.tell_of(job)
            self._set_places({name: other for name, other in self._places.items() if name != job})
            self._later(self._detachments.tell(place.service, but=self._places), f"detach from {place.service}")
        self.decide()

    def _of(self, job: str) -> Submission:
        if job not in self._known:
            self.submitted(job)
        return self._known[job]

    # ------------------------------------------------------------ what is heard

    def heard(self, job: str, progress: Mapping[str, Any]) -> None:
        """Take note of a job's progress map, which says after a step how the step used the service."""
        known = self._known.get(job)
        if known is None or known.job is None or "service_wait_s" not in progress:
            return
        self._register.try_again()
        waited_s, switch_s = float(progress["service_wait_s"]), float(progress.get("switch_s") or 0.0)
        busy_s, seconds = float(progress.get("compute_s") or 0.0), float(progress.get("seconds") or 0.0)
        was_known = known.profile.steps >= self.rules.cold_steps
        known.profile = observed(
            known.profile,
            StepUse(
                step_alone_s(seconds, waited_s=waited_s, switch_s=switch_s, busy_s=busy_s),
                busy_s,
                switch_s,
                asyncio.get_running_loop().time() - busy_s,
            ),
        )
        if (place := self._places.get(job)) is not None:
            use, now_s = self.use_of(place.service), asyncio.get_running_loop().time()
            use.step(job, now_s, seconds, waited_s=waited_s, switch_s=switch_s, compute_s=busy_s)
        known.steps_left = max(0, known.job.steps - int(progress.get("step") or 0))
        if not was_known and known.profile.steps >= self.rules.cold_steps:
            self.decide()

    # ------------------------------------------------------------ decisions

    def decide(self) -> None:
        """Ask the policy, and carry out its decision. Called whenever something may have changed."""
        if not any(known.waiting is not None for known in self._known.values()):
            return
        decision = decide(self._placement_rules(), self._view())
        for placed in decision.place:
            known = self._known[placed.job]
            self._take(placed.job, placed.service, known)
            if known.waiting is not None and not known.waiting.done():
                known.waiting.set_result(None)
        for job, reason in decision.refuse.items():
            waiting = self._known[job].waiting
            if waiting is not None and not waiting.done():
                waiting.set_exception(NeverServed(f"trainer.service: {job} can never be served: {reason}"))
        for job, reason in decision.wait.items():
            known = self._known[job]
            if known.reason != reason:
                known.reason = reason
                known.say(f"queued: {reason}")
        for move in decision.move:
            self._take(move.job, move.service, self._known[move.job])
            self._on_move(move.job)

    def _take(self, job: str, service: str, known: Submission) -> None:
        log.info("a job has a place on a service", job=job, service=service, state_bytes=known.state_bytes)
        before = self._places.get(job)
        if before is not None and before.service != service:
            self._detachments.note(before.service, job)
        self._detachments.is_back(service, job)
        place = ServicePlace(service=service, state_bytes=known.state_bytes, since_s=time_of_day_s())
        self._set_places({**self._places, job: place})
        known.reason = ""

    def _set_places(self, places: dict[str, ServicePlace]) -> None:
        """Change the places, and with them the use and the register; nothing else may change them."""
        before, self._places = self._places, places
        now_s = asyncio.get_running_loop().time()
        for job in dict.fromkeys([*before, *places]):
            was, now = before.get(job), places.get(job)
            if was is not None and (now is None or now.service != was.service):
                self.use_of(was.service).left(job, now_s)
            if now is not None and (was is None or now.service != was.service):
                self.use_of(now.service).joined(job)
        if places != self._register.now.places:
            self._register.set_places(places)

    def _placement_rules(self) -> PlacementRules:
        rules = self.rules
        quotas = {quota.project: Quota(quota.jobs_max, quota.memory_bytes, quota.share) for quota in rules.quotas}
        return PlacementRules(rules.placement, rules.cold_steps, rules.duty_max, rules.slowdown_max, quotas)

    def _view(self) -> PlacementView:
        jobs = [self._job_view(name, known) for name, known in self._known.items()
                if known.waiting is not None or name in self._places]  # fmt: skip
        services = [self._service_view(service, jobs) for service in self._services.all]
        return PlacementView(services, jobs)

    def _job_view(self, name: str, known: Submission) -> JobView:
        job, place = known.job, self._places.get(name)
        if job is None:  # a job of a former life of the head, which has not asked for its place yet
            return JobView(name, place.state_bytes, on=place.service, alone=place.alone) if place else JobView(name, 0)
        wanted = job.trainer.service
        left = known.steps_left
        return JobView(
            name,
            known.state_bytes,
            on=place.service if place else None,
            alone=place is not None and place.alone,
            named=None if wanted == AUTO else wanted,
            suits=[service.name for service in self.rules.services if not disagreements(job, service)],
            project=job.trainer.project,
            priority=job.trainer.priority,
            submitted=known.number,
            profile=known.profile,
            remaining_s=None if left is None else left * known.profile.period_s,
        )

    def _service_view(self, service: Service, jobs: list[JobView]) -> ServiceView:
        config = service.config
        return ServiceView(
            config.name,
            config.memory_bytes,
            _room_for_all(config, jobs),
            config.jobs_max,
            draining=service.draining or bool(service.failure),
        )

    def queue(self) -> list[dict[str, Any]]:
        """Waiting jobs, in the order in which they were submitted."""
        return [
            {
                "job": name,
                "service": known.job.trainer.service,
                "project": known.job.trainer.project,
                "priority": known.job.trainer.priority,
                "state_bytes": known.state_bytes,
                "why": f"queued: {known.reason}" if known.reason else "queued",
            }
            for name, known in sorted(self._known.items(), key=lambda item: item[1].number)
            if known.waiting is not None and known.job is not None
        ]


def problems_on(job: JobConfig, service: ServiceConfig) -> bool:
    """Whether ``job`` does not suit ``service``, or names another one."""
    return job.trainer.service not in (AUTO, service.name) or bool(disagreements(job, service))


def trained_bytes(job: JobConfig, model_path: Path, services: list[ServiceConfig]) -> int:
    """Bytes of the job's trained state on the service where it is largest; 0: the model's files do not say."""
    replicas = [
        replicas_of(model_path, backend=service.backend, device=_without_torch(service.device), threads=service.threads)
        for service in services
    ]
    models = [model_path, *([Path(job.critic.path or model_path)] if job.algorithm.has_critic else [])]
    adapters = adapter_spec(job.model.adapter), None  # a critic has none
    return sum(
        state_bytes(
            path,
            dtype=state_dtype(job.trainer.backend, job.model.dtype),
            replicas=max(replicas, default=1),
            adapter=adapter,
            optimizer=job.trainer.optimizer,
        )
        for path, adapter in zip(models, adapters, strict=False)
    )


def _without_torch(device: str) -> str:
    """Count ``auto`` as the CPU, which needs more: to find the real device takes torch, which a head does not load."""
    return "cpu" if device == "auto" else device


def _room_for_all(config: ServiceConfig, jobs: list[JobView]) -> int:
    """Bytes for the states of all jobs of a service.

    A state that is stored again keeps its old copy meanwhile, so room for the largest state is left free.
    """
    if not config.host_bytes + config.disk_bytes:
        return config.memory_bytes
    known = [job.state_bytes for job in jobs if config.name in (job.on, job.named) or config.name in (job.suits or ())]
    return config.host_bytes + config.disk_bytes - max(known, default=0)
