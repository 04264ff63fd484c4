"""Makes the trainer's parts from the job file."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Final

from actors.host.host_memory import keep_freed_memory
from actors.host.thread_pool import let_waiting_threads_rest
from actors.models.adapter import adapter_spec
from actors.ranks.followers import NOBODY, Followers
from actors.ranks.group import GroupFollowers
from actors.roles import RoleArgs
from actors.trainer.backend import ALONE, LOOPBACK, BackendSpec, CriticSpec, LedRanks, LossSpec, TrainBackend
from actors.trainer.backends.service_backend import ServiceBackend, ServiceClient
from actors.weights.segments import run_id
from configs.limits import DEFAULT_LIMITS, Limits
from configs.schema import JobConfig, TrainerConfig
from transport.endpoints import host_of, is_loopback

SHARED_OUT_BYTES: Final = 8_000_000
"""Bytes of weights from which the trainer uses every core beside generation. On two hardware threads of one core, 5
million float32 parameters train 1.4 times as fast with a second replica; with 0.3 million it gains nothing."""

REPLICAS_MAX: Final = 2
"""Most replicas. Each has gradient sums of its own; further threads work inside the replicas' operations."""


BACKENDS: Final[dict[str, str]] = {
    "torch": "actors.trainer.backends.torch.torch_backend",
    "fsdp": "actors.trainer.backends.fsdp.parkable_ranks",
    "simulated": "actors.trainer.backends.simulated_backend",
}
"""Modules by kind (``trainer.backend``); ``build`` in them makes a backend from the ranks that it will lead."""


def make_backend(kind: str, ranks: LedRanks = ALONE) -> TrainBackend:
    """A backend of that kind in this process; imports no other kind's code."""
    if kind not in BACKENDS:
        raise ValueError(f"trainer.backend: {kind!r}, expected one of {', '.join(map(repr, BACKENDS))}")
    if kind != "simulated":
        let_waiting_threads_rest()
        keep_freed_memory(one_arena=True)
    return importlib.import_module(BACKENDS[kind]).build(ranks)


def leading_backend(
    trainer: TrainerConfig, followers: Followers = NOBODY, limits: Limits = DEFAULT_LIMITS, *, host: str = LOOPBACK
) -> TrainBackend:
    """The backend of rank 0 of ``trainer.ranks``. ``followers``: the other ranks, which reach this machine by ``host``.

    Raises:
        ValueError: their number does not fit ``trainer.ranks``.
    """
    if 1 + followers.count != trainer.ranks:
        raise ValueError(f"trainer.ranks: {trainer.ranks}, and {1 + followers.count} are there")
    ranks = LedRanks(
        followers=followers,
        limits=limits,
        replicas=trainer.replicas,
        context=trainer.context_ranks,
        offload=trainer.offload,
        host=host,
    )
    return make_backend(trainer.backend, ranks)


def backend_of(args: RoleArgs, job: JobConfig) -> TrainBackend:
    """The backend of a job's trainer: its own, or a training service's, which loads nothing here."""
    trainer = job.trainer
    if args.service is None:
        followers = GroupFollowers(args) if args.size > 1 else NOBODY
        return leading_backend(trainer, followers, job.limits, host=host_of_ranks(args, job))
    run = args.run_id or run_id(Path(args.run_dir))
    client = ServiceClient(
        job=job.name,
        run=run,
        backend=trainer.backend,
        ranks=trainer.ranks,
        priority=trainer.priority,
        share=trainer.share,
    )
    return ServiceBackend(client, args.service)


def host_of_ranks(args: RoleArgs, job: JobConfig) -> str:
    """Address by which ranks reach this machine, the head's: its own if some ranks are elsewhere, else loopback."""
    host = host_of(args.scheduler.endpoint) if job.trainer_machines > 1 else LOOPBACK
    return LOOPBACK if is_loopback(host) else host


def backend_spec(args: RoleArgs, job: JobConfig) -> BackendSpec:
    """The spec for the backend's start. A training service chooses the device and threads if the job does not."""
    trainer, updates, shares = job.trainer, job.algorithm.updates, args.service is not None
    threads = trainer.threads if shares else resolve_threads(job, Path(args.model_path))
    is_whole = trainer.backend == "fsdp" or trainer.compile  # torch compiles on one thread at a time
    return BackendSpec(
        model_path=Path(args.model_path),
        dtype=job.model.dtype,
        device=trainer.device if shares else resolve_device(trainer.device, trainer.backend),
        threads=threads,
        replicas=1 if shares or is_whole else resolve_replicas(threads, Path(args.model_path)),
        optimizer=trainer.optimizer,
        learning_rate=trainer.lr,
        warmup_steps=trainer.warmup_steps * updates,
        lr_schedule=trainer.lr_schedule,
        total_steps=job.steps * updates,
        weight_decay=trainer.weight_decay,
        adam_betas=trainer.betas,
        max_grad_norm=trainer.max_grad_norm,
        seed=job.seed,
        needs_reference=job.algorithm.kl_coefficient > 0,
        recompute=trainer.recompute,
        compile=trainer.compile,
        attention=trainer.attention,
        critic=critic_spec(args, job),
        adapter=adapter_spec(job.model.adapter),
        expert_parallel=trainer.expert_parallel,
        router_replay=trainer.router_replay,
        load_balancing=job.algorithm.load_balancing is not None,
    )


def critic_spec(args: RoleArgs, job: JobConfig) -> CriticSpec | None:
    if not job.algorithm.has_critic:
        return None
    return CriticSpec(
        model_path=Path(job.critic.path or args.model_path).expanduser(),
        learning_rate=job.critic.lr,
        warmup_steps=job.critic.warmup_steps * job.algorithm.updates,
    )


def resolve_threads(job: JobConfig, model_path: Path) -> int:
    """The threads as configured. Unset: all cores for a model whose operations are long enough to share out
    (``replicas``); for a smaller one all but one in the on-policy modes, since generation rests while the trainer
    computes, and half of them in the others, since both compute at once. Ranks divide the cores between them.

    The operations of a small model take tens of microseconds, which two threads would spend on Python's lock.
    """
    if job.trainer.threads > 0:
        return job.trainer.threads
    cores = max(1, len(os.sched_getaffinity(0)) // job.ranks_here)
    if weights_bytes(model_path) >= SHARED_OUT_BYTES:
        return cores
    return max(1, cores - 1 if job.staleness == 0 else cores // 2)


def resolve_replicas(threads: int, model_path: Path) -> int:
    """Two replicas if there are threads for two and the operations are long enough, else one."""
    return min(REPLICAS_MAX, threads) if weights_bytes(model_path) >= SHARED_OUT_BYTES else 1


def weights_bytes(model_path: Path) -> int:
    """Bytes of the weight files in a model's directory; 0 where there are none."""
    return sum(file.stat().st_size for kind in ("*.safetensors", "*.bin") for file in model_path.glob(kind))


def resolve_device(configured: str, backend: str) -> str:
    """``auto`` is CUDA where torch sees a device, else the CPU; the simulated backend needs neither."""
    if configured != "auto":
        return configured
    if backend == "simulated":
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def loss_spec(job: JobConfig) -> LossSpec:
    algorithm = job.algorithm
    return LossSpec(
        surrogate=algorithm.surrogate,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        correction=algorithm.correction,
        importance_cap=algorithm.importance_cap,
        importance_floor=algorithm.importance_floor,
        kl_coefficient=0.0 if algorithm.kl_in_rewards else algorithm.kl_coefficient,
        kl_kind=algorithm.kl_kind,
        kl_unbiased=algorithm.kl_unbiased,
        entropy_coefficient=algorithm.entropy_coefficient,
        load_balancing=algorithm.load_balancing,
        temperature=job.rollout.temperature,
        value_clip=job.critic.value_clip,
        function=algorithm.loss or "",
    )
