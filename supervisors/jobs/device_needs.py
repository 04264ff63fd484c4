"""Which processes of a job are given a device of their node.

    one        trainer · rollout workers · a ranker on CUDA · rewards by a reward model        unless on the CPU
    none       weights · gateway · rewards by rule or over HTTP: nothing there computes, and a library that only looks
               for a device would take half a gigabyte of its memory
    sees all   rewards and environments that run the user's own code, which may bring a model of its own. Nobody can
               know, so it takes none from others, and nothing that works today is hidden from it

What is simulated computes nothing either. ``auto`` counts as a device: torch decides inside the process, and one that
finds none there leaves its place empty.
"""

from __future__ import annotations

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
    """The same of a training service: it is the trainer of all of its jobs."""
    return int(service.backend != "simulated" and service.device != "cpu")


def _by_rewards(job: JobConfig) -> int | None:
    rewards = [reward for _, reward in job.reward.each]
    if any(reward.kind == "model" and reward.device != "cpu" for reward in rewards):
        return 1  # several models share it, as one process on one device
    return None if any(reward.kind == "function" for reward in rewards) else 0
