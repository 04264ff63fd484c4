"""A model of which each rank holds some rows of every parameter, by torch's FSDP2.

    loaded on the CPU ─ fully_shard a layer, then the rest ─▶ rows; what is trained in float32, the master weights
    forward, backward   rows gathered in the model's dtype, a layer at a time ─▶ gradients summed into rows, in float32

What is frozen, such as the model beside an adapter, is sharded too, and gets no gradient.

Gradients are sums over the ranks, never means: what a rank computes is its share of one micro-batch. What is gathered
is let go after every forward pass, also that of the root: kept, it would be older than the next step's weights.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from actors.trainer.backend import BackendSpec
from actors.trainer.backends.fsdp.world import World
from actors.trainer.backends.torch.flat import bytes_of, fingerprint, trained_parameters
from actors.trainer.backends.torch.recompute import outermost_layers
from actors.weights.manifest import layout

warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view", category=UserWarning)
"""It warns of operations in place on what a layer returns; nothing here does that."""


def shard(model: nn.Module, world: World, spec: BackendSpec, *, offload: bool) -> None:
    """Leave this rank its rows of ``model``, whose parameters are in the spec's dtype, on its device."""
    how: dict[str, Any] = {
        "mesh": world.mesh,
        "reshard_after_forward": True,
        "mp_policy": MixedPrecisionPolicy(param_dtype=getattr(torch, spec.dtype), reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy() if offload and world.device.type == "cuda" else OffloadPolicy(),
    }
    for part in [*outermost_layers(model), model]:
        fully_shard(part, **how)
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo has no sums but these
    model._apply(lambda own: own.float() if own.requires_grad else own)  # noqa: SLF001  float() takes all of a model


class Rows:
    """Knows where this rank's rows lie in the segment, whose bytes are those that a whole model would have given.

    ``prefix`` and ``kind``: see ``FlatParameters``.
    """

    def __init__(self, model: nn.Module, dtype: str, *, prefix: str = "", kind: str = "") -> None:
        """``model`` may be sharded by now."""
        self.parameters = [(prefix + name, own) for name, own in trained_parameters(model)]
        self._kind = kind
        self._dtype: torch.dtype = getattr(torch, dtype)
        self.entries, self.total_bytes = layout([(name, dtype, tuple(own.shape)) for name, own in self.parameters])

    def fingerprint(self) -> str:
        """That of the flat parameters which hold the same."""
        return fingerprint(self.entries, self._kind)

    def write(self, path: Path) -> None:
        """Write them into the file, which is there and has its size."""
        descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW)
        try:
            for entry, (_, own) in zip(self.entries, self.parameters, strict=True):
                start, rows = first_row(own), local(own)
                row_bytes = entry.length_bytes // max(1, entry.shape[0])
                _write(
                    descriptor, bytes_of(rows.to(self._dtype).reshape(-1).cpu()), entry.offset_bytes + start * row_bytes
                )
        finally:
            os.close(descriptor)


def _write(descriptor: int, data: memoryview, at: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, at)
        data, at = data[written:], at + written


def local(tensor: Tensor) -> Tensor:
    """This rank's rows, not a copy."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def first_row(tensor: Tensor) -> int:
    """Number of the first of them."""
    if not isinstance(tensor, DTensor):
        return 0
    return compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)[1][0]
