"""Which actors each kind of process hosts. Strings only, so that listing roles imports none of them.

A role's ``build`` function gets the process's arguments (RoleArgs for a job's process; ServiceArgs for a training
service and ServingArgs for the model server, which have no job) and returns its actors by name. The process is started
by a node agent as ``python -m main actor`` (``supervisors/machine/processes/process.py``), spawns these actors and then
reports ready.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from configs.names import SERVING, SHARED
from configs.schema import JobConfig
from configs.services import ServiceConfig
from configs.serving import ServingConfig
from transport.address import ActorAddress

if TYPE_CHECKING:
    from actors.core.actor import Actor


class ProcessArgs(msgspec.Struct, frozen=True, kw_only=True, tag_field="serves"):
    """Arguments of every process, be it a job's or a training service's."""

    role: str
    name: str
    """The main actor's name, such as ``rollout-0``."""
    node: str
    run_dir: str
    """Directory of the job or training service; the process's output goes into ``logs`` there."""
    metrics: ActorAddress
    """Actor of the head that records the metrics that the process reports."""
    run_id: str = ""
    """Id of the run's shared memory (``actors/weights/segments.py``); empty: as kept in ``run_dir``."""
    rank: int = 0
    """Number in its rank group, 0 for the leader; a process that is in no group has 0 of ``size`` 1."""
    size: int = 1
    """Number of ranks in its group."""
    leader: str = ""
    """Name of the actor that leads the group of a ``rank``."""
    kind: str = ""
    """Kind of follower that a ``rank`` runs, a key of ``actors/ranks/followers.py``."""

    @property
    def name_of_job(self) -> str:
        """The name under which the process reports its metrics."""
        raise NotImplementedError


class RoleArgs(ProcessArgs, frozen=True, kw_only=True, tag="job"):
    """Arguments of a job's process. ``job`` is the resolved job file as JSON."""

    job: str
    model_path: str
    scheduler: ActorAddress
    resume_from: str = ""
    """Checkpoint directory that a trainer starts from; empty: the newest one of the run directory, else the model."""
    beside_trainer: bool = False
    """Whether a rollout worker is placed on the head's machine, which is the trainer's."""
    service: ActorAddress | None = None
    """Training service that computes for a trainer; None: the trainer computes itself. A restarted service listens
    elsewhere: a trainer that loses it ends, and its next life is told the new address."""

    @property
    def job_config(self) -> JobConfig:
        return _parsed(self.job)

    @property
    def name_of_job(self) -> str:
        return self.job_config.name


class ServiceArgs(ProcessArgs, frozen=True, kw_only=True, tag="service"):
    """Arguments of a training service's process, or of a rank that follows it.

    ``service`` is its ServiceConfig as JSON, ``name`` its name.
    """

    service: str
    followers: tuple[ActorAddress, ...] = ()
    """The ranks that the service leads, which are ready before it starts."""

    @property
    def config(self) -> ServiceConfig:
        return ServiceConfig.model_validate_json(self.service)

    @property
    def name_of_job(self) -> str:
        return service_process(self.leader or self.name)


class ServingArgs(ProcessArgs, frozen=True, kw_only=True, tag="serving"):
    """Arguments of the model server's process, or of a sampler's, which samples the base model ``model``.

    ``serving`` is the ServingConfig as JSON, ``service`` the ServiceConfig of who trains.
    """

    serving: str
    service: str
    model: str = ""
    head: ActorAddress
    """Actor of the head that knows where the other processes are."""

    @property
    def config(self) -> ServingConfig:
        return ServingConfig.model_validate_json(self.serving)

    @property
    def service_config(self) -> ServiceConfig:
        return ServiceConfig.model_validate_json(self.service)

    @property
    def name_of_job(self) -> str:
        return SERVING


AnyArgs = RoleArgs | ServiceArgs | ServingArgs


def service_process(name: str) -> str:
    """The name by which a node agent knows the process of the training service ``name``."""
    return f"{SHARED}.{name}"


@functools.lru_cache(maxsize=16)
def _parsed(job: str) -> JobConfig:
    """Cached, since a process asks for its one job again and again."""
    return JobConfig.model_validate_json(job)


ROLES: dict[str, str] = {
    "train_service": "actors.train_service.service:build",
    "rollout": "actors.rollout.worker:build",
    "trainer": "actors.trainer.trainer:build",
    "rank": "actors.ranks.rank:build",
    "weights": "actors.weights.server:build",
    "rewards": "actors.environments.scoring.reward_worker:build",
    "ranker": "actors.ranker.ranker:build",
    "gateway": "actors.gateway.service:build",
    "environments": "actors.environments.episodes.worker:build",
    "models": "actors.serving.model_server:build",
    "sampler": "actors.sampling.service:build",
}


BESIDE: dict[str, str] = {"rank": "actors.weights.share:beside"}
"""What serves beside the actors of a role, in their process."""


def build_role(args: AnyArgs) -> dict[str, Actor]:
    """The actors of a process of ``args.role``, by name. Imports that role's code and nothing else's."""
    return _built(ROLES[args.role], args) | actors_beside(args)


def actors_beside(args: AnyArgs) -> dict[str, Actor]:
    """The actors of ``BESIDE`` for that process."""
    return _built(BESIDE[args.role], args) if args.role in BESIDE else {}


def _built(place: str, args: AnyArgs) -> dict[str, Actor]:
    module, _, function = place.partition(":")
    build: Callable[[AnyArgs], dict[str, Actor]] = getattr(importlib.import_module(module), function)
    return build(args)
