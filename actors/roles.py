"""Which actors each kind of process hosts. Strings only, so that listing roles imports none of them.

A role's ``build`` function gets what the process is told (RoleArgs for a job's, ServiceArgs for a training service,
which has no job) and returns the actors of the process by name. The process is started by a node agent as
``python -m main actor`` (``supervisors/machine/process.py``), spawns these actors and then reports ready.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from configs.names import SHARED
from configs.schema import JobConfig
from configs.services import ServiceConfig
from transport.address import ActorAddress

if TYPE_CHECKING:
    from actors.core.actor import Actor


class ProcessArgs(msgspec.Struct, frozen=True, kw_only=True, tag_field="serves"):
    """What every process is told, whomever it serves."""

    role: str
    name: str
    """The main actor's name, such as ``rollout-0``."""
    node: str
    run_dir: str
    """Directory of whom it serves; its output goes into ``logs`` there."""
    metrics: ActorAddress
    """Actor of the head's that keeps what the process tells of itself."""
    run_id: str = ""
    """Id of the run's shared memory (``actors/weights/segments.py``); empty: as kept in ``run_dir``."""

    @property
    def name_of_job(self) -> str:
        """The name under which it reports to the metrics."""
        raise NotImplementedError


class RoleArgs(ProcessArgs, frozen=True, kw_only=True, tag="job"):
    """All that a role's process is told. ``job`` is the resolved job file as JSON."""

    job: str
    model_path: str
    scheduler: ActorAddress
    resume_from: str = ""
    """Trainer: checkpoint directory to start from; empty: the newest one of the run directory, else the model."""
    beside_trainer: bool = False
    """Rollout: it is placed on the head's machine, which is the trainer's, and nowhere else."""
    service: ActorAddress | None = None
    """Trainer: the training service that computes for it, in its present life. A next life of the service listens
    elsewhere: a trainer that loses it ends, and its next life is told the new address. None: it computes itself."""

    rank: int = 0
    """Number in its rank group, 0 for the leader; a process that is in none leads a group of one."""
    size: int = 1
    """Number of ranks in its group."""
    leader: str = ""
    """Role ``rank``: name of the actor that leads its group."""
    kind: str = ""
    """Role ``rank``: what it runs, a key of ``actors/ranks/followers.py``."""

    @property
    def job_config(self) -> JobConfig:
        return _parsed(self.job)

    @property
    def name_of_job(self) -> str:
        return self.job_config.name


class ServiceArgs(ProcessArgs, frozen=True, kw_only=True, tag="service"):
    """All that a training service's process is told. ``service`` is its ServiceConfig as JSON, ``name`` its name."""

    service: str

    @property
    def config(self) -> ServiceConfig:
        return ServiceConfig.model_validate_json(self.service)

    @property
    def name_of_job(self) -> str:
        return service_process(self.name)


AnyArgs = RoleArgs | ServiceArgs


def service_process(name: str) -> str:
    """What the process of the training service ``name`` is called at its node agent."""
    return f"{SHARED}.{name}"


@functools.lru_cache(maxsize=16)
def _parsed(job: str) -> JobConfig:
    """A process asks again and again for the one job that it serves."""
    return JobConfig.model_validate_json(job)


ROLES: dict[str, str] = {
    "train_service": "actors.train_service.service:build",
    "rollout": "actors.rollout.worker:build",
    "trainer": "actors.trainer.trainer:build",
    "rank": "actors.ranks.rank:build",
    "weights": "actors.weights.server:build",
    "rewards": "actors.environments.worker:build",
    "ranker": "actors.ranker.ranker:build",
    "gateway": "actors.gateway.service:build",
    "environments": "actors.environments.episodes.worker:build",
}


def build_role(args: AnyArgs) -> dict[str, Actor]:
    """The actors of a process of ``args.role``, by name. Imports that role's code and nothing else's."""
    module, _, function = ROLES[args.role].partition(":")
    build: Callable[[AnyArgs], dict[str, Actor]] = getattr(importlib.import_module(module), function)
    return build(args)
