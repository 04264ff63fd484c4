"""The world of a rank: who its others are, and how they exchange tensors.

    leader     opens a store ─▶ Begin(its file on this machine, or host and port) ─▶ followers
    all        join: process group over that store ─▶ mesh [replicas, shards]

gloo carries what lies in the CPU's memory, nccl what lies on CUDA, both over the interface by which a rank reaches the
leader's machine: loopback, unless ranks are on several. Neither knows any keys.

A process is in one world at a time; whoever joins it once more shares it, and the last to leave ends it.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from actors.ranks.meeting_place import make_meeting_place
from actors.trainer.backends.fsdp.orders import Meeting
from transport.own_address import interface_towards

LOOPBACK: Final = "127.0.0.1"
REPLICATE, SHARD = "replicate", "shard"


def open_store(meeting: Meeting) -> tuple[Store, Meeting]:
    """The leader's store, and the meeting with the place where it is.

    On one machine that is a file which no other user can read. Else it listens at the leader's address, and nowhere
    else, on a port of the system's choice.
    """
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
    """Without a number of users: ``remove_meeting`` removes the file, and not the store."""
    return FileStore(f"{meeting.directory}/store")


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """Says where one rank stands. ``mesh`` has a dimension of replicas where there are several."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh

    @property
    def replicas(self) -> int:
        return self.size // self.shards

    @property
    def shards(self) -> int:
        return self.mesh.size(self.mesh.ndim - 1)

    @property
    def is_first_replica(self) -> bool:
        """Whether this rank is one of those that hold all of the weights between them, with the leader."""
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
        """Have in ``tensor`` what the rank of the first replica that holds the same rows has in its own."""
        if self.replicas > 1:
            dist.broadcast(tensor, self.rank % self.shards, group=self.mesh.get_group(REPLICATE))


_users: int = 0


def join(meeting: Meeting, rank: int, device: str, store: Store | None = None) -> World:
    """Wait until all ranks of the meeting are there. ``store``: the leader's own."""
    global _users
    if not dist.is_initialized():
        timeout = timedelta(seconds=meeting.timeout_s)
        interface = "lo" if meeting.directory else interface_towards(meeting.host)
        os.environ |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}  # "=": no longer name
        if meeting.directory:
            store = store or _file_store(meeting)
        store = store or TCPStore(meeting.host, meeting.port, is_master=False, timeout=timeout)
        kind = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
        if device != "cpu":
            torch.cuda.set_device(rank % torch.cuda.device_count())
        dist.init_process_group(kind, store=store, rank=rank, world_size=meeting.size, timeout=timeout)
    _users += 1
    shape, names = (meeting.size,), (SHARD,)
    if meeting.replicas > 1:
        shape, names = (meeting.replicas, meeting.size // meeting.replicas), (REPLICATE, SHARD)
    own = torch.device(device) if device == "cpu" else torch.device(device, torch.cuda.current_device())
    mesh = init_device_mesh(own.type, shape, mesh_dim_names=names)
    dist.all_reduce(torch.zeros(1, device=own))  # whoever fails from here on leaves nobody half joined
    return World(rank=rank, size=meeting.size, device=own, mesh=mesh)


def leave() -> None:
    """The last one ends the process group."""
    global _users
    _users -= 1
    if _users == 0 and dist.is_initialized():
        dist.destroy_process_group()
