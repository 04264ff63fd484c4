"""What people are told when a job's processes are about to start: how many, where, and what will be slow or open."""

from __future__ import annotations

from typing import Final

from configs.schema import JobConfig
from supervisors.jobs.device_needs import core_warnings
from supervisors.jobs.worker_room import Room
from supervisors.machine.membership.nodes import Nodes
from transport.endpoints import is_loopback_tcp

_UNENCRYPTED: Final = (
    "ranks of the trainer exchange weights and gradients between machines by gloo or NCCL, which know no keys and "
    "encrypt nothing (cluster.replicas_unencrypted): the network between them must be yours (docs/guides/security.md)"
)


def start_words(job: JobConfig, nodes: Nodes, endpoint: str) -> list[str]:
    """Sentences for people. ``endpoint``: where the head is reached."""
    beside = "reward worker" if job.only_evaluates else f"{_trainer_of(job)}, weight server and reward worker"
    room = Room.of(nodes.usable_by(job.name))
    warnings = [room.warning(job, job.rollout.workers), *core_warnings(job, nodes.devices_here)]
    if job.trainer_machines > 1 and job.trainer.backend != "simulated" and not is_loopback_tcp(endpoint):
        warnings.append(_UNENCRYPTED)
    return [
        f"starting {job.rollout.workers} rollout workers, {beside}",
        *(f"warning: {warning}" for warning in warnings if warning),
    ]


def _trainer_of(job: JobConfig) -> str:
    """The trainer, with its ranks if there are several."""
    ranks, elsewhere = job.trainer.ranks, job.trainer.ranks - job.ranks_here
    if ranks == 1:
        return "trainer"
    return f"trainer of {ranks} ranks" + (f" ({job.ranks_here} here, {elsewhere} on other nodes)" if elsewhere else "")
