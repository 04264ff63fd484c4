"""Experts that stay at their rank: tokens travel to the experts, and not the experts' weights to the tokens.

    hidden [n, H], chosen [n, k] ─▶ pairs of a token and an expert, in the order of the experts
        ─ all-to-all ─▶ the rank that has the expert computes ─ all-to-all ─▶ pairs, weighed and added to [n, H]

Rank r of a copy keeps the rows of its experts as FSDP would shard them, so files and versions are the same. The rest of
the model stays FSDP's.

Invariants
- All ranks exchange in every layer, forward and backward, also a rank whose experts no token has chosen: they are then
  no part of the graph, the exchanges are.
- Gradients of experts are sums over the copy's tokens as they come; copies are added up before the step.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.func import functional_call

from actors.models.experts import are_experts
from actors.trainer.backend import BackendSpec
from actors.trainer.backends.fsdp.world import World
from actors.trainer.backends.torch.layers.adapted_experts import AdaptedExperts
from actors.trainer.errors import ModelNotLoadable


def keep_experts(model: nn.Module, world: World, spec: BackendSpec, *, offload: bool) -> set[nn.Parameter]:
    """Cut the experts of ``model`` down to this rank's, and let it exchange tokens; returns their parameters.

    ``offload``: whether they are kept in the CPU's memory. A model without experts is left as it is.

    Raises:
        ModelNotLoadable: some rank would have none of them, or they have an adapter.
    """
    kept: set[nn.Parameter] = set()
    for layer in experts_of(model):
        if isinstance(layer.forward, AdaptedExperts):
            raise ModelNotLoadable(
                "trainer.expert_parallel: experts that are kept at their ranks have no adapters; name other layers in "
                "model.adapter.targets, or unset it"
            )
        if -(-layer.num_experts // world.shards) * (world.shards - 1) >= layer.num_experts:
            raise ModelNotLoadable(
                f"trainer.expert_parallel: {type(model).__name__} has {layer.num_experts} experts a layer, which "
                f"leaves none for some of the {world.shards} ranks of a copy; lower trainer.ranks, or unset it"
            )
        layer.forward = _Exchanging(layer, world, getattr(torch, spec.dtype))
        for name, whole in list(layer.named_parameters()):
            own = _rows_of(whole, world, torch.device("cpu") if offload else world.device)
            setattr(layer, name, own)
            kept.add(own)
    return kept


def experts_of(model: nn.Module) -> list[Any]:
    """Modules with all experts of a layer in each parameter."""
    return [part for part in model.modules() if are_experts(part)]


def kept_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Trained parameters of experts that stay at their rank."""
    layers = [layer for layer in experts_of(model) if isinstance(layer.forward, _Exchanging)]
    return [own for layer in layers for own in layer.parameters() if own.requires_grad]


def _rows_of(whole: nn.Parameter, world: World, device: torch.device) -> nn.Parameter:
    """This rank's rows, sharded as by FSDP."""
    placements = [*[Replicate()] * (world.mesh.ndim - 1), Shard(0)]
    (rows, *_), (first, *_) = compute_local_shape_and_global_offset(whole.shape, world.mesh, placements)
    # a copy, wherever it lies: a view would keep all experts in memory
    mine = whole.detach()[first : first + rows].to(device, copy=True)
    sharded = DTensor.from_local(
        mine, world.mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return nn.Parameter(sharded, requires_grad=whole.requires_grad)


class _Exchanging:
    """The forward pass of a layer's experts. ``layer``: still has all experts; transformers computes with ours."""

    def __init__(self, layer: Any, world: World, dtype: torch.dtype) -> None:
        self._group = world.mesh.get_group(world.mesh.ndim - 1)
        self._ranks, self._place = world.shards, world.rank % world.shards
        self._a_rank = -(-layer.num_experts // self._ranks)
        self._dtype, self._device = dtype, world.device
        self._ours = copy.copy(layer)  # has the same parameters, and computes as the class says
        self._ours.num_experts = len(range(layer.num_experts)[self._place * self._a_rank :][: self._a_rank])

    def __call__(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """As transformers' experts: [n, H] of [n, H], int[n, k] and [n, k]."""
        experts, order = torch.sort(chosen.reshape(-1), stable=True)
        sent = torch.bincount(experts // self._a_rank, minlength=self._ranks)
        taken = torch.empty_like(sent)
        dist.all_to_all_single(taken, sent, group=self._group)
        there, here = sent.tolist(), taken.tolist()
        tokens = _exchanged(hidden[order // chosen.shape[-1]], here, there, self._group)
        results = self._computed(tokens, _exchanged(experts, here, there, self._group))
        pairs = _exchanged(results, there, here, self._group)[torch.argsort(order)]
        weighed = pairs * weights.reshape(-1, 1)
        return weighed.view(*chosen.shape, -1).sum(1).to(hidden.dtype)

    def _computed(self, tokens: Tensor, experts: Tensor) -> Tensor:
        """[m, H] of the tokens [m, H] that are here, each by one of our experts, int[m] as the model numbers them."""
        if not len(tokens):
            return tokens  # and so still a part of the graph
        rows = {
            name: own.to_local().to(self._device, self._dtype)  # type: ignore[operator]
            for name, own in self._ours.named_parameters()
        }
        alone = (experts - self._place * self._a_rank)[:, None]
        return functional_call(self._ours, rows, (tokens, alone, torch.ones_like(alone, dtype=tokens.dtype)))


class _Exchange(torch.autograd.Function):
    """Rows to all ranks of a group and rows from all, and in the backward pass their gradients the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, taken: list[int], sent: list[int], group: Any) -> Tensor:
        ctx.way = (sent, taken, group)
        found = rows.new_empty(sum(taken), *rows.shape[1:])
        dist.all_to_all_single(found, rows.contiguous(), taken, sent, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _exchanged(grads[0], *ctx.way), None, None, None


def _exchanged(rows: Tensor, taken: list[int], sent: list[int], group: Any) -> Tensor:
    """``taken`` and ``sent``: how many rows from each rank and to each, in the order of the ranks."""
    return _Exchange.apply(rows, taken, sent, group)  # type: ignore[no-any-return]
