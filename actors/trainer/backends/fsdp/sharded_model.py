"""A model of which each rank holds some rows of every parameter, by torch's FSDP2.

    loaded on the CPU ─ fully_shard a layer, then the rest ─▶ rows; trained ones in float32, the master weights
    forward, backward   rows gathered in the model's dtype, a layer at a time ─▶ gradients summed into rows, in float32

Experts stay with the rank that has their rows, if the spec says so (``kept_experts.py``).
Frozen parameters, such as those of the model beside an adapter, are sharded too, and get no gradient.

Gradients are sums over the ranks, never means: each rank computes its share of one micro-batch. Gathered weights are
freed after every forward pass, the root's too: if kept, they would be out of date after the next step.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import (
    _compute_local_shape_and_global_offset,
    compute_local_shape_and_global_offset,
)

from actors.protocol.weights import TensorEntry
from actors.trainer.backend import BackendSpec
from actors.trainer.backends.fsdp.kept_experts import keep_experts
from actors.trainer.backends.fsdp.world import World
from actors.trainer.backends.torch.flat import bytes_of, fingerprint, trained_parameters
from actors.trainer.backends.torch.recompute import outermost_layers
from actors.weights.manifest import layout

warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view", category=UserWarning)
"""FSDP2 warns of in-place operations on a layer's output; there are none here."""


def shard(model: nn.Module, world: World, spec: BackendSpec, *, offload: bool) -> None:
    """Cut ``model``, whose parameters are in the spec's dtype, down to this rank's rows, on its device."""
    how: dict[str, Any] = {
        "mesh": world.mesh,
        "reshard_after_forward": True,
        "mp_policy": MixedPrecisionPolicy(param_dtype=getattr(torch, spec.dtype), reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy() if offload and world.device.type == "cuda" else OffloadPolicy(),
    }
    kept = keep_experts(model, world, spec, offload=offload) if spec.expert_parallel else set[nn.Parameter]()
    for part in [*outermost_layers(model), model]:
        fully_shard(part, ignored_params=kept, **how)
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo has no other sums
    model._apply(lambda own: own.float() if own.requires_grad else own)  # noqa: SLF001  float() takes all of a model


class Rows:
    """Knows where this rank's rows lie in the segment, which is byte for byte that of an unsharded model.

    ``prefix`` and ``kind``: see ``FlatParameters``.
    """

    def __init__(self, model: nn.Module, dtype: str, *, prefix: str = "", kind: str = "") -> None:
        """``model`` may be sharded already."""
        self.parameters = [(prefix + name, own) for name, own in trained_parameters(model)]
        self._kind = kind
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.entries, self.total_bytes = layout([(name, dtype, tuple(own.shape)) for name, own in self.parameters])

    @property
    def with_entries(self) -> Iterable[tuple[TensorEntry, tuple[str, Tensor]]]:
        """Each tensor's entry, and the tensor by its name."""
        return zip(self.entries, self.parameters, strict=True)

    def fingerprint(self) -> str:
        """The fingerprint of flat parameters with the same tensors."""
        return fingerprint(self.entries, self._kind)

    def write(self, path: Path, world: World) -> None:
        """Write the rows into the leader's file, which exists and has its full size, or give them to the leader.

        The leader writes its own, and those of the ranks that have no access to the file.
        """
        if world.is_elsewhere:
            for _, own in self.parameters:
                world.give(local(own).to(self.dtype))
            return
        descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW)
        try:
            for entry, (_, own) in self.with_entries:
                self._write(descriptor, entry, own_piece(own))
            for rank in world.elsewhere if world.rank == 0 else ():
                for entry, (_, own) in self.with_entries:
                    piece = piece_of(own, rank, self.dtype)
                    world.take(piece.rows, rank)
                    self._write(descriptor, entry, piece)
        finally:
            os.close(descriptor)

    def _write(self, descriptor: int, entry: TensorEntry, piece: Piece) -> None:
        row_bytes = entry.length_bytes // max(1, entry.shape[0])
        data = bytes_of(piece.rows.to(self.dtype).reshape(-1).cpu())
        at = entry.offset_bytes + piece.first * row_bytes
        while data:
            written = os.pwrite(descriptor, data, at)
            data, at = data[written:], at + written


class Piece(NamedTuple):
    """Some rows of a tensor, and where they are in it."""

    rows: Tensor
    first: int
    """Number of the first of them."""
    whole: torch.Size
    """Shape of the whole tensor."""


def own_piece(tensor: Tensor) -> Piece:
    """This rank's rows, not a copy."""
    if not isinstance(tensor, DTensor):
        return Piece(tensor.detach(), 0, tensor.shape)
    _, (first, *_) = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Piece(local(tensor), first, tensor.shape)


def piece_of(tensor: Tensor, shard: int, dtype: torch.dtype) -> Piece:
    """Room in the CPU's memory for the rows that the rank ``shard`` of the first replica has of ``tensor``."""
    assert isinstance(tensor, DTensor), "a tensor that is not sharded is nobody else's"
    shape, first = place_of(tensor, shard)
    return Piece(torch.empty(shape, dtype=dtype), first, tensor.shape)


def place_of(tensor: DTensor, shard: int) -> tuple[torch.Size, int]:
    """Shape of the rows that the rank ``shard`` of the first replica has of ``tensor``, and the first one's number."""
    mesh = tensor.device_mesh
    coordinate = [0] * (mesh.ndim - 1) + [shard]
    shape, (first, *_) = _compute_local_shape_and_global_offset(tensor.shape, mesh.shape, coordinate, tensor.placements)
    return torch.Size(shape), first


def local(tensor: Tensor) -> Tensor:
    """This rank's rows, not a copy."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()
