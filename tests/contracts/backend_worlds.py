"""The kinds of train backend, each in a world in which it can be started: alone, with ranks, or at a training service.

A world's name is a kind, ``service:`` in front of it if jobs share a service, the number of ranks behind it, and after
a dash what is different: ``adapter``, ``muon``, ``adamw8bit``, ``experts``, ``context``, ``cuda``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from actors.models.adapter import AdapterSpec
from actors.train_service.residency import remove_parked
from actors.trainer.backend import BackendSpec, CriticSpec, TrainBackend
from actors.trainer.backends.fsdp.fsdp_backend import FsdpBackend
from actors.trainer.backends.simulated_backend import SimulatedBackend
from actors.trainer.backends.torch.torch_backend import TorchBackend
from actors.trainer.bounded import BoundedBackend
from configs.limits import DEFAULT_LIMITS
from tests.actors.train_service.service_world import ServiceWorld
from tests.rank_processes import RankProcesses

KINDS: dict[str, Callable[[], TrainBackend]] = {
    "fsdp": FsdpBackend,
    "torch": TorchBackend,
    "simulated": SimulatedBackend,
    "bounded": lambda: BoundedBackend(SimulatedBackend(), DEFAULT_LIMITS),
}
ADAPTER = AdapterSpec(rank=4, alpha=8.0)
QUEUE = {"gap_s": 0.01}
"""A test's jobs take turns within one coroutine: none of them has anything to do while the other has."""
Start = Callable[..., Awaitable[TrainBackend]]
"""Keywords are fields of the spec. ``job``: which one's backend it is in a service, by default one of its own."""
STARTED_WITH: dict[int, int | None] = {}
"""Id of a started backend → what its ``start`` has returned."""


@dataclass(frozen=True)
class Place:
    """What a world is made of: models, a directory of its own, and processes of ranks by kind and number."""

    model_path: Path
    moe_path: Path
    directory: Path
    ranks: Callable[[str, int], RankProcesses]


@asynccontextmanager
async def started_backends(world_name: str, place: Place) -> AsyncIterator[Start]:
    """Starts backends in the world of that name, and closes them at the end."""
    started: list[TrainBackend] = []
    name, _, variant = world_name.partition("-")
    device, adapter = "cuda" if "cuda" in variant else "cpu", ADAPTER if "adapter" in variant else None
    kind, shared = name.removeprefix("service:"), name.startswith("service:")
    kind, _, size = kind.partition(":")
    shared_by = int(size) if "context" in variant else 1
    directory = place.directory
    world = ServiceWorld(
        directory,
        make=None if size else lambda kind: KINDS[kind](),
        followers=lambda: place.ranks("shared-fsdp", int(size)).followers(),
        backend=kind if shared else "simulated",
        ranks=int(size or 1) if shared else 1,
        jobs_max=8,
        queue=QUEUE,
    )
    if shared:
        await world.start()

    async def begin(*, critic_warmup: int | None = None, job: str = "", **changes: object) -> TrainBackend:
        if shared:
            backend: TrainBackend = (await world.trainer(job or f"j{len(started)}")).backend
        else:
            backend = (
                FsdpBackend(place.ranks("fsdp", int(size)).followers(), context=shared_by) if size else KINDS[kind]()
            )
        critic = CriticSpec(model_path=place.model_path, learning_rate=0.02, warmup_steps=critic_warmup or 0)
        changes["critic"] = None if critic_warmup is None else critic
        fixed = {"model_path": place.model_path, "device": device, "learning_rate": 0.01, "adapter": adapter}
        if "experts" in variant:
            fixed |= {"model_path": place.moe_path, "expert_parallel": True}
        fixed["optimizer"] = next((name for name in ("muon", "adamw8bit") if name in variant), "adamw")
        spec = BackendSpec(**(fixed | changes))  # type: ignore[arg-type]
        STARTED_WITH[id(backend)] = await backend.start(spec, checkpoint_step=0)
        started.append(backend)
        return backend

    yield begin
    STARTED_WITH.clear()
    for backend in started:
        await backend.close()
    if shared:
        await world.stop()
        remove_parked(directory)


async def weights_of(backend: TrainBackend, directory: Path) -> np.ndarray:
    """The exported bytes: all that a worker will ever see of the weights."""
    path = directory / "segment"
    await backend.export_segment(path, job="j", policy_version=0, chunk_bytes=1 << 20)
    return np.fromfile(path, dtype=np.float32)
