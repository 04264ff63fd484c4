"""From a job file to what an engine needs to start."""

from __future__ import annotations

import os
from pathlib import Path

from actors.host.adapter import adapter_spec
from actors.rollout.engine import EngineSpec
from configs.model_files import context_tokens_max
from configs.schema import JobConfig


def engine_spec(job: JobConfig, model_path: str) -> EngineSpec:
    """The spec of one worker's engine.

    Threads default to this machine's cores, in off-policy modes half of them, since the trainer computes at the same
    time, divided by the job's workers and their ranks.
    """
    rollout = job.rollout
    return EngineSpec(
        model_path=Path(model_path),
        dtype=job.model.dtype,
        device=rollout.device,
        max_running=rollout.max_running,
        max_context_tokens=max(context_tokens_max(j, Path(model_path)) for j in (job, job.evaluation)),
        threads=rollout.threads or _threads(job),
        seed=job.seed,
        tensor_parallel=rollout.tensor_parallel,
        adapter=adapter_spec(job.model.adapter),
        prefix_cache_bytes=job.limits.prefix_cache_bytes,
        options=rollout.engine_options,
    )


def _threads(job: JobConfig) -> int:
    cores = _cores() if job.staleness == 0 else _cores() // 2
    return max(1, cores // max(1, job.rollout.workers * job.rollout.tensor_parallel))


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on this platform
        return os.cpu_count() or 1
