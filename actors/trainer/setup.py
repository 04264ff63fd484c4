"""From the job file to what the trainer is made of."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from actors.host.adapter import adapter_spec
from actors.host.host_memory import keep_freed_memory
from actors.host.thread_pool import let_waiting_threads_rest
from actors.ranks.followers import Followers
from actors.ranks.simulated import SimulatedRanks
from actors.roles import RoleArgs
from actors.trainer.backend import BackendSpec, CriticSpec, LossSpec, TrainBackend
from actors.trainer.backends.service_backend import Client, ServiceBackend
from actors.weights.segments import run_id
from configs.limits import DEFAULT_LIMITS, Limits
from configs.schema import JobConfig, TrainerConfig
from transport.endpoints import host_of, is_loopback

LOOPBACK: Final = "127.0.0.1"
"""Where a leader is reached by followers on its own machine."""

SHARED_OUT_BYTES: Final = 8_000_000
"""Weights from which the trainer uses every core beside generation. On two hardware threads of one core, 5 million
float32 parameters train 1.4 times as fast with a second replica; with 0.3 million it gains nothing."""

REPLICAS_MAX: Final = 2
"""Each has gradient sums of its own; further threads work inside the operations of these."""


def make_backend(kind: str) -> TrainBackend:
    """The backend of that kind, in this process alone; imports its code and no other's."""
    if kind == "torch":
        _compute_here()
        from actors.trainer.backends.torch.torch_backend import TorchBackend

        return TorchBackend()
    if kind == "fsdp":
        return leading_backend(TrainerConfig(backend="fsdp"))
    if kind == "simulated":
        from actors.trainer.backends.simulated_backend import SimulatedBackend

        return SimulatedBackend()
    raise ValueError(f"trainer.backend: {kind!r}, expected 'torch', 'fsdp' or 'simulated'")


def leading_backend(
    trainer: TrainerConfig, followers: Followers | None = None, limits: Limits = DEFAULT_LIMITS, *, host: str = LOOPBACK
) -> TrainBackend:
    """The backend of rank 0 of ``trainer.ranks``. ``followers``: the others, which reach this machine by ``host``.

    Raises:
        ValueError: there are not as many.
    """
    found = 1 + (0 if followers is None else followers.count)
    if found != trainer.ranks:
        raise ValueError(f"trainer.ranks: {trainer.ranks}, and {found} are there")
    if trainer.backend == "simulated":
        from actors.trainer.backends.simulated_backend import SimulatedBackend

        return SimulatedBackend(ranks=SimulatedRanks(followers, limits.train_step_timeout_s))
    _compute_here()
    from actors.trainer.backends.fsdp.fsdp_backend import FsdpBackend

    return FsdpBackend(followers, limits, replicas=trainer.replicas, offload=trainer.offload, host=host)


def _compute_here() -> None:
    let_waiting_threads_rest()
    keep_freed_memory(one_arena=True)


def backend_of(
    args: RoleArgs, job: JobConfig, followers: Followers | None = None, limits: Limits = DEFAULT_LIMITS
) -> TrainBackend:
    """The backend of a job's trainer: its own, or a training service's, which loads nothing here.

    ``followers``: see ``leading_backend``.
    """
    trainer = job.trainer
    if args.service is None:
        if trainer.backend != "torch":
            return leading_backend(trainer, followers, limits, host=host_of_ranks(args, job))
        return make_backend(trainer.backend)
    run = args.run_id or run_id(Path(args.run_dir))
    client = Client(job=job.name, run=run, backend=trainer.backend, priority=trainer.priority, share=trainer.share)
    return ServiceBackend(client, args.service)


def host_of_ranks(args: RoleArgs, job: JobConfig) -> str:
    """By which address ranks reach this machine, which is the head's: its own if some are elsewhere, else loopback."""
    host = host_of(args.scheduler.endpoint) if job.cluster.place_replicas == "remote" else LOOPBACK
    return LOOPBACK if is_loopback(host) else host


def backend_spec(args: RoleArgs, job: JobConfig) -> BackendSpec:
    """What the backend is told at its start. A training service chooses what the job leaves to it: device, threads."""
    trainer, updates, shares = job.trainer, job.algorithm.updates, args.service is not None
    threads = trainer.threads if shares else resolve_threads(job, Path(args.model_path))
    return BackendSpec(
        model_path=Path(args.model_path),
        dtype=job.model.dtype,
        device=trainer.device if shares else resolve_device(trainer.device, trainer.backend),
        threads=threads,
        replicas=1 if shares or trainer.backend == "fsdp" else resolve_replicas(threads, Path(args.model_path)),
        learning_rate=trainer.lr,
        warmup_steps=trainer.warmup_steps * updates,
        lr_schedule=trainer.lr_schedule,
        total_steps=job.steps * updates,
        weight_decay=trainer.weight_decay,
        adam_betas=trainer.betas,
        max_grad_norm=trainer.max_grad_norm,
        seed=job.seed,
        needs_reference=job.algorithm.kl_coefficient > 0,
        gradient_checkpointing=trainer.gradient_checkpointing,
        critic=critic_spec(args, job),
        adapter=adapter_spec(job.model.adapter),
    )


def critic_spec(args: RoleArgs, job: JobConfig) -> CriticSpec | None:
    """The critic of a job that has one."""
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

    The operations of a small model take tens of microseconds, and two threads spend them on Python's lock.
    """
    if job.trainer.threads > 0:
        return job.trainer.threads
    cores = max(1, len(os.sched_getaffinity(0)) // job.ranks_here)
    if weights_bytes(model_path) >= SHARED_OUT_BYTES:
        return cores
    return max(1, cores - 1 if job.staleness == 0 else cores // 2)


def resolve_replicas(threads: int, model_path: Path) -> int:
    """Two, where there are threads for two and the operations are long enough."""
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
    """The policy loss of the job."""
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
        temperature=job.rollout.temperature,
        value_clip=job.critic.value_clip,
        function=algorithm.loss or "",
    )
