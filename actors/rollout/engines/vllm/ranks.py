"""One rank among several that compute each step of vLLM's together: where they meet, and what they agree on.

    leader    rendezvous(size) ─▶ <directory>/met, and a name of it for each rank ─▶ told to the followers
    a rank    Place ─▶ vLLM's arguments and executor ─▶ EngineCore; goes_on, all_agree between its steps

Each rank has a scheduler of its own, and all come to the same decisions because they are told the same. So nothing
that one rank alone knows, such as the time, may decide anything: the leader does, and tells.

Invariants
- Ranks are processes of one machine. They meet through a file that only their user can open, and talk over loopback.
- No exchange waits longer than ``silence_s``: a rank that has died is noticed at once, a silent one after that time.
- On a CPU they exchange through gloo. vLLM's own way through shared memory spins for ever when a rank is gone, and
  leaves its memory behind.
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
"""Talk over loopback, and by NCCL alone: other ways look for the other ranks' devices, and a rank sees its own only."""


@contextlib.contextmanager
def rendezvous(size: int) -> Iterator[Path]:
    """A directory where ``size`` ranks meet; it is there as long as they still may."""
    directory = make_meeting_place()
    try:
        for rank in range(size):
            (directory / f"rank{rank}").symlink_to("met")
        yield directory
    finally:
        remove_meeting_place(directory)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Says which rank of how many an engine is, and where it meets the others."""

    rank: int
    size: int
    directory: Path
    silence_s: float
    """Time after which a rank that says nothing is given up."""

    def engine_arguments(self) -> dict[str, Any]:
        """Arguments of vLLM's ``EngineArgs``."""
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
        """vLLM's executor for one rank that somebody else has started."""
        from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

        rank = self.rank
        # Names that differ, which vLLM compares, keep it from its shared memory.
        init_method = f"file://{self.directory}/rank{rank}"

        class RankExecutor(ExecutorWithExternalLauncher):
            """Is vLLM's executor of one rank, which meets the others where we say."""

            def _distributed_args(self) -> tuple[str, int, int]:
                import torch

                several = torch.cuda.is_available() and torch.cuda.device_count() > 1
                return init_method, rank, rank if several else 0

        return RankExecutor


@contextlib.contextmanager
def without_shared_memory() -> Iterator[None]:
    """Keep vLLM from making queues in shared memory: nobody uses them here, and they outlive a rank that is killed."""
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    name = "create_from_process_group"
    made = MessageQueue.__dict__[name]
    setattr(MessageQueue, name, staticmethod(lambda *_, **__: None))
    try:
        yield
    finally:
        setattr(MessageQueue, name, made)


def goes_on(decision: bool | None) -> bool:
    """What the leader has decided, in every rank; followers say None."""
    import torch
    from torch import distributed

    said = torch.tensor([int(bool(decision))])
    distributed.broadcast(said, src=LEADER, group=_group())
    return bool(said.item())


def all_agree(well: bool) -> bool:
    """Whether all ranks say so."""
    import torch
    from torch import distributed

    said = torch.tensor([int(well)])
    distributed.all_reduce(said, op=distributed.ReduceOp.MIN, group=_group())
    return bool(said.item())


def _group() -> Any:
    from vllm.distributed.parallel_state import get_tp_group

    return get_tp_group().cpu_group
