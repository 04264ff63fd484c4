"""Which actors each kind of process hosts. Strings only, so that listing roles imports none of them.

A role's ``build`` function gets RoleArgs and returns the actors of the process by name. The process is started by a
node agent as ``python -m main actor`` (``supervisors/machine/process.py``), spawns these actors and then reports ready.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from configs.schema import JobConfig
from transport.address import ActorAddress

if TYPE_CHECKING:
    from actors.core.actor import Actor


class RoleArgs(msgspec.Struct, frozen=True, kw_only=True):
    """All that a role's process is told. ``job`` is the resolved job file as JSON."""

    role: str
    name: str
    """The main actor's name, such as ``rollout-0``."""
    node: str
    job: str
    model_path: str
    run_dir: str
    scheduler: ActorAddress
    metrics: ActorAddress
    resume_from: str = ""
    """Trainer: checkpoint directory to start from; empty: the newest one of the run directory, else the model."""
    run_id: str = ""
    """Id of the run's shared memory (``actors/weights/segments.py``); empty: as kept in ``run_dir``."""
    beside_trainer: bool = False
    """Rollout: it is placed on the head's machine, which is the trainer's, and nowhere else."""

    @property
    def job_config(self) -> JobConfig:
        return _parsed(self.job)

    @property
    def name_of_job(self) -> str:
        return self.job_config.name


@functools.lru_cache(maxsize=16)
def _parsed(job: str) -> JobConfig:
    """A process asks again and again for the one job that it serves."""
    return JobConfig.model_validate_json(job)


ROLES: dict[str, str] = {
    "rollout": "actors.rollout.worker:build",
    "trainer": "actors.trainer.trainer:build",
    "weights": "actors.weights.server:build",
    "rewards": "actors.environments.worker:build",
    "ranker": "actors.ranker.ranker:build",
}


def build_role(args: RoleArgs) -> dict[str, Actor]:
    """The actors of a process of ``args.role``, by name. Imports that role's code and nothing else's."""
    module, _, function = ROLES[args.role].partition(":")
    build: Callable[[RoleArgs], dict[str, Actor]] = getattr(importlib.import_module(module), function)
    return build(args)
