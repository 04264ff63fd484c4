"""Which processes of a job are given a device of their node.

    one        trainer · rollout workers · a ranker on CUDA · rewards by a reward model        unless on the CPU
    none       weights · gateway · rewards by rule or over HTTP: nothing there computes, and a library that only looks
               for a device would take half a gigabyte of its memory
    sees all   rewards and environments that run the user's own code, which may bring a model of its own. Whether it
               does is unknown, so such a process takes no device from others, and none is hidden from it

A simulated role computes nothing either. ``auto`` counts as a device: torch decides inside the process, and if it finds
none there, the given device stays unused.
"""

from __future__ import annotations

import os

from configs.errors import Found
from configs.schema import JobConfig
from configs.services import ServiceConfig


def devices_wanted(job: JobConfig, role: str) -> int | None:
    """How many devices a process of ``role`` is given, on a node that has any; None: it sees all, and takes none."""
    match role:
        case "trainer":
            trainer = job.trainer
            return int(trainer.service is None and trainer.backend != "simulated" and trainer.device != "cpu")
        case "rollout":
            return int(job.rollout.engine != "simulated" and job.rollout.device != "cpu")
        case "ranker":
            return int(job.rollout.ranker_device != "cpu")
        case "rewards":
            return _by_rewards(job)
        case "environments":
            return None
        case _:
            return 0


def devices_wanted_by_service(service: ServiceConfig) -> int:
    """How many devices a training service is given: it is the trainer of all of its jobs."""
    return int(service.backend != "simulated" and service.device != "cpu")


def device_problems(job: JobConfig, here: int) -> list[Found]:
    """Keys of ``job`` that want more devices of the head's machine than ``here``, the number that it has.

    A machine without any computes ranks on its cores. The devices of other machines are known when they join: a machine
    with too few is not chosen (``Nodes.choose``).
    """
    found: list[Found] = []
    ranks = job.ranks_here
    if ranks > here > 0 and devices_wanted(job, "trainer") and not job.only_evaluates:
        wrong = f"{ranks} ranks with a device each, but this machine has {here} for its processes"
        most = here * (job.trainer.ranks // ranks)
        found.append(("trainer.ranks", wrong, f"Set it to at most {most}, or trainer.device to cpu"))
    ranks = job.rollout.tensor_parallel
    if ranks > here > 0 and devices_wanted(job, "rollout") and _generates_here(job):
        wrong = f"{ranks} ranks with a device each, but this machine has {here} for its processes"
        found.append(("rollout.tensor_parallel", wrong, f"Set it to at most {here}, or let others generate (nodes)"))
    return found


def core_warnings(job: JobConfig, here: int, cores: int | None = None) -> list[str]:
    """Sentences about ranks that share a core of the head's machine, which is allowed.

    Args:
        here: number of the machine's devices.
        cores: number of its cores; None: those that this process may use.
    """
    cores = len(os.sched_getaffinity(0)) if cores is None else cores
    of_machine = (
        ("trainer.ranks", job.ranks_here, "trainer", not job.only_evaluates),
        ("rollout.tensor_parallel", job.rollout.tensor_parallel, "rollout", _generates_here(job)),
    )
    return [
        f"{key}: {ranks} ranks share {cores} {'core' if cores == 1 else 'cores'}, which is slower than fewer ranks. "
        f"Set it to at most {cores}, if the model fits"
        for key, ranks, role, is_here in of_machine
        if ranks > cores and is_here and not (here and devices_wanted(job, role))
    ]


def _generates_here(job: JobConfig) -> bool:
    """Whether the head's machine has rollout workers, or has them while no other machine is there."""
    place = job.cluster.place_rollout
    return job.rollout.workers > 0 and (place in ("local", "elastic") or (place == "spread" and not job.cluster.nodes))


def _by_rewards(job: JobConfig) -> int | None:
    rewards = [reward for _, reward in job.reward.each]
    if any(reward.kind == "model" and reward.device != "cpu" for reward in rewards):
        return 1  # several models share it, as one process on one device
    return None if any(reward.kind == "function" for reward in rewards) else 0
