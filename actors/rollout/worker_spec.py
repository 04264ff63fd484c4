"""Makes the spec of an engine from a job file."""

from __future__ import annotations

import os
from pathlib import Path

from actors.models.adapter import adapter_spec
from actors.rollout.engine import EngineSpec
from configs.model_files import context_tokens_max
from configs.schema import JobConfig


def engine_kind(job: JobConfig, worker: str) -> str:
    """The kind of the engine of ``worker``, a key of ``engine_kinds.py``."""
    return "server" if job.rollout.server_of(worker) else job.rollout.engine


def engine_spec(job: JobConfig, model_path: str, worker: str = "") -> EngineSpec:
    """The spec of the engine of ``worker``, one of ``job``'s.

    Threads default to this machine's cores divided by the workers that compute and their ranks; in off-policy modes to
    half of that, since the trainer computes at the same time.
    """
    rollout, limits = job.rollout, job.limits
    server = rollout.server_of(worker)
    asked = {"answer_s": limits.server_answer_s, "start_s": limits.server_start_s, "load_s": limits.pull_timeout_s}
    return EngineSpec(
        model_path=Path(model_path),
        dtype=job.model.dtype,
        device=rollout.device,
        max_running=0 if rollout.max_running == "auto" else rollout.max_running,
        memory_share=1 / (1 + _computing(job)),  # the trainer, and as many workers, may be on this machine
        max_context_tokens=max(context_tokens_max(j, Path(model_path)) for j in (job, job.evaluation)),
        threads=rollout.threads or _threads(job),
        seed=job.seed,
        tensor_parallel=rollout.tensor_parallel,
        adapter=adapter_spec(job.model.adapter),
        prefix_cache_bytes=job.limits.prefix_cache_bytes,
        records_routes=job.trainer.router_replay,
        options={"url": server, **asked} if server else rollout.engine_options,
    )


def _computing(job: JobConfig) -> int:
    """Number of workers with an engine of their own."""
    return job.rollout.workers - len(job.rollout.servers)


def _threads(job: JobConfig) -> int:
    cores = _cores() if job.staleness == 0 else _cores() // 2
    return max(1, cores // max(1, _computing(job) * job.rollout.tensor_parallel))


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on this platform
        return os.cpu_count() or 1
