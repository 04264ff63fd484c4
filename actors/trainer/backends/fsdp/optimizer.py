"""Torch's AdamW over the rows of one rank: matrices decay, vectors do not, as in the torch backend.

gradient sums ─ norm over all ranks ─▶ sums / weight ─ clip ─ AdamW ─▶ rows
                                   └▶ or left: not finite, on all ranks alike
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from actors.trainer.backend import BackendSpec
from actors.trainer.backends.fsdp.sharded_model import local
from actors.trainer.backends.fsdp.world import World
from actors.trainer.backends.torch.adam import MOMENTS


class ShardedAdam:
    """Updates ``parameters``, sharded alike on all ranks, from the sums in their gradients."""

    def __init__(self, parameters: list[tuple[str, nn.Parameter]], spec: BackendSpec, world: World) -> None:
        self._named = parameters
        self._world = world
        self._max_norm = spec.max_grad_norm
        groups: list[dict[str, Any]] = [
            {"params": [own for _, own in parameters if own.dim() >= 2], "weight_decay": spec.weight_decay},
            {"params": [own for _, own in parameters if own.dim() < 2], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        self._adam = torch.optim.AdamW(groups, lr=spec.learning_rate, betas=spec.adam_betas, fused=True)

    def gathered_norm(self, weight: float) -> float:
        """Norm of the gradient, the same on all ranks. A parameter that no pass has reached has a gradient of 0."""
        squares = 0.0
        for _, own in self._named:
            if own.grad is None:
                own.grad = torch.zeros_like(own)
            squares += float(torch.linalg.vector_norm(local(own.grad), dtype=torch.float64)) ** 2
        return math.sqrt(self._world.summed_over_shards(squares)) / weight

    def take(self, rate: float, norm: float, weight: float) -> None:
        """Update the rows."""
        scale = min(1.0, self._max_norm / (norm + 1e-6)) / weight
        for _, own in self._named:
            if own.grad is not None:
                local(own.grad).mul_(scale)
        for group in self._adam.param_groups:
            group["lr"] = rate
        self._adam.step()

    def leave(self) -> None:
        """Forget the sums."""
        self._adam.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Rows and both moments by their names on disk, the moments made now if no step was taken yet."""
        tensors: dict[str, Tensor] = {}
        for name, own in self._named:
            tensors[f"master.{name}"] = own.detach()
            state = self._adam.state[own]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=own.device)
                state |= {moment: torch.zeros_like(own.detach()) for moment in MOMENTS}
            tensors |= {f"{moment}.{name}": state[moment] for moment in MOMENTS}
        return tensors

    @property
    def steps(self) -> int:
        """Steps that were taken, skipped ones not counted."""
        return int(next((state["step"] for state in self._adam.state.values()), 0))

    def set_steps(self, count: int) -> None:
        """After the moments were taken over."""
        for state in self._adam.state.values():
            state["step"].fill_(count)
