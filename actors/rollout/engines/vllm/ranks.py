"""How ranks that compute each step of vLLM together meet, and what they exchange between steps.

    leader    rendezvous(size) ─▶ <directory>/met, and a link to it for each rank ─▶ told to the followers
    a rank    RankPlace ─▶ vLLM's arguments and executor ─▶ EngineCore; goes_on, all_agree between its steps

Each rank has its own vLLM scheduler, and all make the same decisions because they get the same input. So no decision
may depend on anything that one rank alone knows, such as the time: those the leader makes, and tells the others.

Invariants
- Ranks are processes of one machine. They meet in a directory that only their user can enter, and talk over streams in
  it, or by NCCL over loopback.
- No exchange waits longer than ``silence_s``: a rank that has died is noticed at once, a silent one after that time.
- On a CPU they exchange over those streams (``actors/ranks/process_group.py``). vLLM's own way through shared memory
  spins forever when a rank is gone, and leaves its shared memory behind.
"""

# pyright: reportMissingImports=false
# vLLM is an optional extra.

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.ranks.meeting_place import make_meeting_place, remove_meeting_place

LEADER = 0
_ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
}
"""Variables by which ranks talk over loopback and NCCL alone: other ways need the other ranks' devices, which a rank
cannot see."""


@contextlib.contextmanager
def rendezvous(size: int) -> Iterator[Path]:
    """A directory where ``size`` ranks meet while the context lasts."""
    directory = make_meeting_place()
    try:
        for rank in range(size):
            (directory / f"rank{rank}").symlink_to("met")
        yield directory
    finally:
        remove_meeting_place(directory)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlace:
    """Says which rank of how many an engine is, and where it meets the others."""

    rank: int
    size: int
    directory: Path
    silence_s: float
    """Seconds after which a silent rank is given up."""

    def engine_arguments(self) -> dict[str, Any]:
        """Arguments for vLLM's ``EngineArgs``; also sets ``_ENVIRONMENT``."""
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        return {
            "tensor_parallel_size": self.size,
            "distributed_executor_backend": "external_launcher",
            "distributed_timeout_seconds": max(1, round(self.silence_s)),
            "cpu_distributed_timeout_seconds": max(1, round(self.silence_s)),
            "disable_custom_all_reduce": True,  # see _ENVIRONMENT
        }

    def executor(self) -> Any:
        """vLLM's executor class for one rank whose process vLLM has not started."""
        from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

        rank = self.rank
        # vLLM uses shared memory between ranks whose init methods are equal, so each rank has its own name.
        init_method = f"file://{self.directory}/rank{rank}"

        class RankExecutor(ExecutorWithExternalLauncher):
            """vLLM's executor of one rank, which meets the others in our directory."""

            def _distributed_args(self) -> tuple[str, int, int]:
                import torch

                several = torch.cuda.is_available() and torch.cuda.device_count() > 1
                return init_method, rank, rank if several else 0

        return RankExecutor


@contextlib.contextmanager
def without_shared_memory() -> Iterator[None]:
    """Keep vLLM from making queues in shared memory: they are not used here, and outlive a rank that is killed."""
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    name = "create_from_process_group"
    made = MessageQueue.__dict__[name]
    setattr(MessageQueue, name, staticmethod(lambda *_, **__: None))
    try:
        yield
    finally:
        setattr(MessageQueue, name, made)


def goes_on(decision: bool | None) -> bool:
    """Broadcast the leader's ``decision`` to all ranks; followers pass None. Returns it in every rank."""
    import torch
    from torch import distributed

    said = torch.tensor([int(bool(decision))])
    distributed.broadcast(said, src=LEADER, group=_group())
    return bool(said.item())


def all_agree(well: bool) -> bool:
    """Whether ``well`` holds in all ranks. Each of them must call this."""
    import torch
    from torch import distributed

    said = torch.tensor([int(well)])
    distributed.all_reduce(said, op=distributed.ReduceOp.MIN, group=_group())
    return bool(said.item())


def _group() -> Any:
    from vllm.distributed.parallel_state import get_tp_group

    return get_tp_group().cpu_group
