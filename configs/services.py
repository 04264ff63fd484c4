"""The services file, typed: training services that several jobs share, and the rules by which they share them.

    SERVICES.yaml ─▶ load_services ─▶ ServicesConfig ─▶ the head: a process ``service.<NAME>`` each
    JOB.yaml ─▶ trainer.service: NAME | auto ────────▶ problems_with(job): what can never go together

    services:
      - {name: train-0, threads: 1, memory_bytes: 4_000_000_000}
    placement: pack

Invariants
- A job that names no service is not affected by this file.
- A job is refused here only if it could never be served. If services are only full just now, it waits in a queue.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from configs.errors import ConfigError, Found
from configs.names import SERVING, SHARED
from configs.schema import JobConfig, NonNegativeInt, PositiveFloat, PositiveInt, Section
from configs.validation import load_file, validate

AUTO: Final = "auto"
"""Value of ``trainer.service`` that lets the placement policy choose; no service may have this name."""
ServiceName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,31}$")]
Placement = Literal["isolated", "pack", "spread", "spread_backfill"]


class QueueConfig(Section):
    """Which job's burst (all calls of a training step) a service runs next."""

    policy: Literal["hrrs", "fifo", "round_robin"] = "hrrs"
    """``hrrs``: the highest response ratio first, switches of jobs counted in. ``fifo``: whoever has waited longest.
    ``round_robin``: the jobs in turn."""
    hysteresis: Annotated[float, Field(ge=0)] = 0.2
    """``hrrs``: how much higher, as a part, another job's ratio must be before the job in memory has to make room."""
    starvation_s: PositiveFloat = 300.0
    """Whoever has waited this long is next, whatever the ratios."""
    gap_s: PositiveFloat = 1.0
    """A job that asks for nothing for so long in mid-burst yields to those that wait."""


class ServiceConfig(Section):
    """One training service: a process on the head's machine, or several ranks, that hold the trained state of several
    jobs.
    """

    name: ServiceName
    """What jobs call it in ``trainer.service``."""
    backend: Literal["torch", "fsdp", "simulated"] = "torch"
    """As a job's ``trainer.backend``; its jobs have the same."""
    ranks: PositiveInt = 1
    """Processes that share each job's state, with a device each; its jobs have the same number in ``trainer.ranks``.
    ``backend: fsdp`` alone; all are on the head's machine."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``auto``: CUDA where there is a device."""
    threads: NonNegativeInt = 0
    """Torch threads of a burst, in each rank; 0: all cores, shared among the ranks. A job may leave its
    ``trainer.threads`` at 0, or say the same."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Set: jobs of this ``model.dtype`` only."""
    memory_bytes: PositiveInt
    """Bytes of trained state (weights, float32 master, optimizer, gradients) in the device's memory at once, in the
    devices of all ranks together. On a CPU a budget of main memory."""
    host_bytes: NonNegativeInt = 16_000_000_000
    """Bytes of main memory for the stored states of all its jobs, and once more for the largest of them: what it has
    stored outlives its process. 0, and no ``disk_bytes``: nothing is stored, and all jobs are in memory at once."""
    disk_bytes: NonNegativeInt = 0
    """Bytes of the disk for jobs that main memory has no room for; 0: none."""
    jobs_max: PositiveInt = 3
    """Jobs that it serves at once."""
    queue: QueueConfig = QueueConfig()


class QuotaConfig(Section):
    """Bounds for the jobs of one project (``trainer.project``) on all services together."""

    project: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
    """Whose jobs are meant."""
    jobs_max: PositiveInt | None = None
    """Jobs on services at once; unset: any number."""
    memory_bytes: PositiveInt | None = None
    """Bytes of trained state of its jobs together; unset: as many as there is room for."""
    share: PositiveFloat = 1.0
    """Weight among projects when jobs wait: twice the share gets twice the time."""


class ServicesConfig(Section):
    """Training services that several jobs share (``headrace run … --services FILE``)."""

    services: list[ServiceConfig]
    """The services, each with a name of its own."""
    placement: Placement = "pack"
    """On which service a job with ``trainer.service: auto`` is put. ``isolated``: one that serves nobody. ``pack``: the
    fullest that fits. ``spread``: the least loaded. ``spread_backfill``: the same, and a job that fits now may pass one
    that waits, if that does not delay it."""
    cold_steps: NonNegativeInt = 3
    """Steps that a job runs before its measured profile counts for its placement."""
    duty_max: Annotated[float, Field(gt=0, le=1)] = 0.8
    """A service gets no further job that would keep it computing for more than this part of the time."""
    slowdown_max: Annotated[float, Field(ge=1)] = 1.10
    """A service gets no further job by which any of its jobs is predicted to take longer than this many times."""
    quotas: tuple[QuotaConfig, ...] = ()
    """Bounds by project; a project that is not named has none."""

    def service(self, name: str) -> ServiceConfig | None:
        return next((service for service in self.services if service.name == name), None)

    def quota(self, project: str) -> QuotaConfig | None:
        return next((quota for quota in self.quotas if quota.project == project), None)


def load_services(path: str | Path) -> ServicesConfig:
    """The services file at ``path``.

    Raises:
        ConfigError: it cannot be read or does not fit; the message names line and field.
    """
    return load_file(
        ServicesConfig, path, holds="services keys", example="configs/shared/services.yaml", check=_findings
    )


def service_from_mapping(values: Mapping[str, Any], where: str) -> ServiceConfig:
    """One service that came over the control socket as a plain map.

    Raises:
        ConfigError: as ``load_services``; ``where`` stands in place of the file's name.
    """
    config = validate(ServiceConfig, dict(values), lambda _: where)
    if why := _not_a_name(config.name):
        raise ConfigError.of(where, "name", why, "Choose another name, such as train-0")
    if wrong := _ranks_problem(config):
        raise ConfigError.of(where, "ranks", *wrong)
    return config


def _findings(config: ServicesConfig) -> list[Found]:
    """Problems that the types of single fields do not exclude."""
    found: list[Found] = []
    if not config.services:
        found.append(("services", "is empty", "Name a service, or leave --services out"))
    names: set[str] = set()
    for index, service in enumerate(config.services):
        field = f"services.{index}.name"
        if service.name in names:
            found.append((field, f"{service.name} is the name of two services", "Give each a name of its own"))
        if why := _not_a_name(service.name):
            found.append((field, why, "Choose another name, such as train-0"))
        names.add(service.name)
        if wrong := _ranks_problem(service):
            found.append((f"services.{index}.ranks", *wrong))
    projects = [quota.project for quota in config.quotas]
    for index, project in enumerate(projects):
        if project in projects[:index]:
            found.append((f"quotas.{index}.project", f"{project} has two quotas", "Keep one of the two"))
    return found


def _ranks_problem(service: ServiceConfig) -> tuple[str, str] | None:
    """What is wrong with the service's ranks, and what to do; None: nothing."""
    if service.ranks == 1 or service.backend == "fsdp":
        return None
    wrong = f"{service.ranks}, but backend is {service.backend}, which computes in one process"
    return wrong, "Set backend to fsdp, or ranks to 1"


def _not_a_name(name: str) -> str:
    if name == AUTO:
        return f"{AUTO} means that the placement chooses"
    taken = name in ("trainer", "weights", "rewards", "prompts", "ranker", "gateway")
    taken = taken or name.startswith(("rollout-", "environments-"))
    return f"{name} is what a job's own process is called" if taken else ""


# ------------------------------------------------------------ a job and the services


def problems_with(job: JobConfig, config: ServicesConfig | None) -> list[Found]:
    """Why ``job`` can never be served by what there is; empty if it names no service, or one that suits it."""
    wanted = job.trainer.service
    if wanted is None:
        return []
    if job.name in (SHARED, SERVING) or job.name.startswith((f"{SHARED}.", f"{SERVING}.")):
        return [("name", f"{job.name} is what processes of the services are called", "Choose another name")]
    if config is None or not config.services:
        return [
            (
                "trainer.service",
                f"{wanted} is named, but there are no services",
                "Add --services FILE to the command that starts the head, or leave trainer.service out",
            )
        ]
    if wanted == AUTO:
        refused = [disagreements(job, service) for service in config.services]
        if all(refused):  # the first stands for all: which one was meant is unknown
            return refused[0]
        return []
    service = config.service(wanted)
    if service is None:
        names = [service.name for service in config.services]
        near = difflib.get_close_matches(wanted, names, n=1)
        fix = f"Did you mean {near[0]!r}?" if near else f"Use one of: {', '.join(names)}, {AUTO}"
        return [("trainer.service", f"{wanted!r} is no service of this head", fix)]
    return disagreements(job, service)


def disagreements(job: JobConfig, service: ServiceConfig) -> list[Found]:
    """Keys of ``job`` in which it contradicts ``service``."""
    found: list[Found] = []
    trainer, name = job.trainer, service.name
    if trainer.backend != service.backend:
        found.append(_differs("trainer.backend", trainer.backend, name, service.backend))
    elif trainer.ranks != service.ranks:
        found.append(_differs("trainer.ranks", trainer.ranks, name, service.ranks))
    if "auto" not in (trainer.device, service.device) and trainer.device != service.device:
        found.append(_differs("trainer.device", trainer.device, name, service.device))
    if trainer.threads not in (0, service.threads):
        found.append(_differs("trainer.threads", trainer.threads, name, service.threads or "0 (all cores)"))
    if service.dtype is not None and job.model.dtype != service.dtype:
        found.append(_differs("model.dtype", job.model.dtype, name, service.dtype))
    return found


def _differs(field: str, ours: object, service: str, theirs: object) -> Found:
    fix = f"Write {str(theirs).partition(' ')[0]}, or choose another service"
    return field, f"{ours}, but the service {service} computes with {theirs}", fix
