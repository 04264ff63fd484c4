"""The world of a rank: which other ranks there are, and how they exchange tensors.

    leader     opens a store ─▶ Begin(its file on this machine, or host and port) ─▶ followers
    all        join: process group over that store ─▶ mesh [replicas, shards], and groups of neighbours that share rows

What lies in the CPU's memory goes over streams that nobody else can open (``actors/ranks/process_group.py``), and what
lies on CUDA by nccl over loopback, whose ranks know each other by a random number that the store tells them. Between
machines it is gloo and nccl over the interface by which a rank reaches the leader's: nothing there has keys.

Checkpoints are the leader's. A rank of the first replica on another machine gives it what it writes and is given what
it reads, tensor by tensor, over the same connections; a checkpoint that both see it writes and reads itself. Versions
of the weights stay on the machines of their ranks (``machine_shares.py``).

A process is in one world at a time; a further ``join`` shares that world, and the last ``leave`` ends it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from actors.ranks.meeting_place import make_meeting_place
from actors.ranks.process_group import use_streams
from actors.trainer.backend import LOOPBACK
from actors.trainer.backends.fsdp.orders import Meeting, hold_meeting
from actors.trainer.backends.torch.attention.context import ContextRanks
from actors.weights.segments import host_id
from transport.own_address import interface_towards

REPLICATE, SHARD, CONTEXT = "replicate", "shard", "context"
PROBE: Final = ".seen-by-ranks"
"""Name of a file in a checkpoint's directory, by which ranks find out whether they see the same one."""


def open_store(meeting: Meeting) -> tuple[Store, Meeting]:
    """The leader's store, and the meeting with the store's place filled in; those of the world it is in, if it is.

    On one machine the store is a file which no other user can read. Else it listens at the leader's address alone, on a
    port of the system's choice.
    """
    if _shared is not None:
        store, known = _shared
        hold_meeting(known)
        return store, msgspec.structs.replace(meeting, directory=known.directory, port=known.port)
    if meeting.host == LOOPBACK:
        meeting = msgspec.structs.replace(meeting, directory=str(make_meeting_place()))
        return _file_store(meeting), meeting
    host = meeting.host
    listening = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    meeting = msgspec.structs.replace(meeting, port=listening.getsockname()[1])
    timeout = timedelta(seconds=meeting.timeout_s)
    store = TCPStore(
        host, meeting.port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listening.detach()
    )
    return store, meeting


def _file_store(meeting: Meeting) -> Store:
    """A store without a number of users, which never removes its file: ``remove_meeting`` does."""
    return FileStore(f"{meeting.directory}/store")


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """Says which rank this is and how ranks are arranged. ``mesh`` has a dimension of replicas if there are several."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    machines: tuple[tuple[int, ...], ...]
    """Ranks of the first replica, machine by machine, the leader's first."""
    context: ContextRanks | None
    """Ranks that share each row with this one."""

    @property
    def elsewhere(self) -> tuple[int, ...]:
        """Ranks of the first replica that are on another machine than the leader, rank 0."""
        return tuple(sorted(rank for ranks in self.machines[1:] for rank in ranks))

    def machine_of(self, rank: int) -> int:
        """Number of the machine in ``machines`` on which a rank of the first replica is."""
        return next(number for number, ranks in enumerate(self.machines) if rank in ranks)

    @property
    def machine(self) -> int:
        """Number of this rank's machine, if the rank is of the first replica."""
        return self.machine_of(self.rank)

    @property
    def is_elsewhere(self) -> bool:
        """Whether this is such a rank, which has no access to the leader's files."""
        return self.rank in self.elsewhere

    @property
    def replicas(self) -> int:
        return self.size // self.shards

    @property
    def shards(self) -> int:
        return self.mesh.size(self.mesh.ndim - 1)

    @property
    def is_first_replica(self) -> bool:
        """Whether this rank's rows belong to the same copy of the weights as the leader's."""
        return self.rank < self.shards

    def summed_over_shards(self, value: float) -> float:
        """The sum of all shards' values, added in their order: the same bits on every rank."""
        if self.shards == 1:
            return value
        mine = torch.tensor([value], dtype=torch.float64, device=self.device)
        found = [torch.empty_like(mine) for _ in range(self.shards)]
        dist.all_gather(found, mine, group=self.mesh.get_group(self.mesh.ndim - 1))
        return sum(float(part) for part in found)

    def from_first_replica(self, tensor: Tensor) -> None:
        """Overwrite ``tensor`` with that of the first replica's rank that holds the same rows."""
        if self.replicas > 1:
            moved = tensor.to(self.device)  # with offload it lies in the CPU's memory
            dist.broadcast(moved, self.rank % self.shards, group=self.mesh.get_group(REPLICATE))
            if moved is not tensor:
                tensor.copy_(moved)

    def sum_over_replicas(self, tensor: Tensor) -> None:
        """Overwrite ``tensor`` with the sum of those of all replicas' ranks that hold the same rows."""
        if self.replicas > 1:
            moved = tensor.to(self.device)
            dist.all_reduce(moved, group=self.mesh.get_group(REPLICATE))
            if moved is not tensor:
                tensor.copy_(moved)

    def give(self, rows: Tensor, to: int = 0) -> None:
        """Send ``rows`` to a rank, which takes as many of the same dtype."""
        if rows.numel():
            self._pass(dist.isend, rows.to(self.device).contiguous(), to)

    def take(self, rows: Tensor, sender: int = 0) -> None:
        """Overwrite ``rows`` with those that a rank gives."""
        if rows.numel():
            moved = rows.to(self.device).contiguous()
            self._pass(dist.irecv, moved, sender)
            if moved is not rows:
                rows.copy_(moved)

    def sharers(self, directory: Path) -> frozenset[int]:
        """Those of ``elsewhere`` that have the leader's ``directory`` on a file system in common with it.

        Called by the leader and by them, at once. Each of them knows of itself alone. Shown by a file with a random
        number in it, so an older copy of the directory is not taken for it.
        """
        if self.rank not in (0, *self.elsewhere):
            return frozenset()
        number, probe = torch.tensor([secrets.randbits(62)]), directory / PROBE
        if self.rank != 0:
            self.take(number)
            sees = _content(probe) == str(int(number))
            self.give(torch.tensor([int(sees)]))
            return frozenset([self.rank] if sees else [])
        found: set[int] = set()
        with contextlib.suppress(OSError):  # if it cannot be written, nobody sees it
            probe.write_text(str(int(number)))
        for rank in self.elsewhere:
            self.give(number, rank)
            self.take(answer := torch.zeros(1, dtype=torch.int64), rank)
            found |= {rank} if int(answer) else set()
        with contextlib.suppress(OSError):
            probe.unlink()
        return frozenset(found)

    @staticmethod
    def _pass(how: Callable[..., Any], tensor: Tensor, other: int) -> None:
        # as a batch of one, since nccl would connect each pair of ranks once more for a single message
        for work in dist.batch_isend_irecv([dist.P2POp(how, tensor, other)]):
            work.wait()
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()


def _content(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""


_users: int = 0
_shared: tuple[Store, Meeting] | None = None
"""The leader's store and meeting of the world that this process is in."""


def join(meeting: Meeting, rank: int, device: str, store: Store | None = None) -> World:
    """Wait until all ranks of the meeting are there. ``store``: the leader's own."""
    global _users, _shared
    if not dist.is_initialized():
        timeout = timedelta(seconds=meeting.timeout_s)
        interface = "lo" if meeting.directory else interface_towards(meeting.host)
        os.environ |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}  # "=": exactly this name
        if meeting.directory:
            store = store or _file_store(meeting)
        store = store or TCPStore(meeting.host, meeting.port, is_master=False, timeout=timeout)
        kind = "nccl"
        if device != "cpu":
            torch.cuda.set_device(rank % torch.cuda.device_count())
        else:
            kind = use_streams(Path(meeting.directory)) if meeting.directory else "gloo"
        dist.init_process_group(kind, store=store, rank=rank, world_size=meeting.size, timeout=timeout)
        _shared = (store, meeting)
    _users += 1
    shape, names = (meeting.size,), (SHARD,)
    if meeting.replicas > 1:
        shape, names = (meeting.replicas, meeting.size // meeting.replicas), (REPLICATE, SHARD)
    own = torch.device(device) if device == "cpu" else torch.device(device, torch.cuda.current_device())
    mesh = init_device_mesh(own.type, shape, mesh_dim_names=names)
    context: ContextRanks | None = None
    if meeting.context > 1:
        across = init_device_mesh(
            own.type, (meeting.size // meeting.context, meeting.context), mesh_dim_names=("rows", CONTEXT)
        )
        context = ContextRanks(across.get_group(CONTEXT), rank % meeting.context, meeting.context)
    hosts = _hosts(meeting.size, own)  # a rank that fails after this leaves no other one half joined
    machines: dict[int, list[int]] = {}
    for shard in range(mesh.size(mesh.ndim - 1)):
        machines.setdefault(hosts[shard], []).append(shard)
    apart = tuple(map(tuple, machines.values()))
    return World(rank=rank, size=meeting.size, device=own, mesh=mesh, machines=apart, context=context)


def _hosts(size: int, device: torch.device) -> list[int]:
    """The machine of each rank, as a number."""
    digest = hashlib.blake2b(host_id().encode(), digest_size=8).digest()
    mine = torch.tensor([int.from_bytes(digest, signed=True)], dtype=torch.int64, device=device)
    found = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(found, mine)
    return [int(number) for number in found]


def leave() -> None:
    """Leave the world; the last user ends the process group."""
    global _users, _shared
    _users -= 1
    if _users == 0 and dist.is_initialized():
        _shared = None
        dist.destroy_process_group()
