"""One rank's shard of a model that ranks train together; a backend has one such model, or two with a critic.

micro-batch ─ our part ─▶ forward ─ losses ─ backward ─▶ gradients summed into our rows ─ AdamW ─▶ rows
"""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from actors.trainer.backend import NO_STATS, AdamStep, BackendSpec, Learned, LossSpec, MicroBatch, MicroBatchStats
from actors.trainer.backends.fsdp import parts
from actors.trainer.backends.fsdp.kept_experts import kept_parameters
from actors.trainer.backends.fsdp.orders import nothing
from actors.trainer.backends.fsdp.sharded_model import Rows, local, own_piece, piece_of
from actors.trainer.backends.fsdp.world import World
from actors.trainer.backends.torch.causal_lm import response_positions
from actors.trainer.backends.torch.optimizers import MOMENTS, set_adam
from actors.trainer.backends.torch.recompute import use_way
from actors.trainer.backends.torch.replicas import Member, learn


class ShardedAdam:
    """Torch's AdamW over one rank's rows of ``parameters``: matrices decay, vectors do not, as in the torch backend.

    gradient sums ─ norm over all ranks ─▶ sums / weight ─ clip ─ AdamW ─▶ rows
                                       └▶ or left as they are: not finite, on all ranks alike
    """

    def __init__(self, parameters: list[tuple[str, nn.Parameter]], spec: BackendSpec, world: World) -> None:
        self._named = parameters
        self._world = world
        groups: list[dict[str, Any]] = [
            {"params": [own for _, own in parameters if own.dim() >= 2], "decays": True},
            {"params": [own for _, own in parameters if own.dim() < 2], "decays": False},
        ]
        groups = [group for group in groups if group["params"]]
        self._adam = torch.optim.AdamW(groups, lr=spec.learning_rate, betas=spec.adam_betas, fused=True)

    def gathered_norm(self, weight: float) -> float:
        """Norm of the gradient, the same on all ranks. A parameter that no pass has reached has a gradient of 0."""
        norms: list[Tensor] = []
        for _, own in self._named:
            if own.grad is None:
                own.grad = torch.zeros_like(own)
            norms.append(torch.linalg.vector_norm(local(own.grad), dtype=torch.float64))
        squares = sum(norm**2 for norm in torch.stack(norms).tolist())
        return math.sqrt(self._world.summed_over_shards(squares)) / weight

    def take(self, adam: AdamStep, norm: float, weight: float) -> None:
        scale = adam.scale(norm) / weight
        for _, own in self._named:
            if own.grad is not None:
                local(own.grad).mul_(scale)
        set_adam(self._adam, adam)
        self._adam.step()

    def leave(self) -> None:
        """Drop the gradient sums."""
        self._adam.zero_grad(set_to_none=True)

    @property
    def later_bytes(self) -> int:
        """Bytes of the device that moments will take, which do not exist yet; 0 where they lie in main memory."""
        device = self._world.device.type
        coming = (local(own) for _, own in self._named)
        return 0 if self._adam.state else 2 * sum(own.nbytes for own in coming if own.device.type == device)

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

    def forget_optimizer(self) -> None:
        for name, tensor in self.state().items():
            if not name.startswith("master."):
                local(tensor).zero_()
        self.set_steps(0)

    @property
    def steps(self) -> int:
        """Steps that were taken, skipped ones not counted."""
        return int(next((state["step"] for state in self._adam.state.values()), 0))

    def set_steps(self, count: int) -> None:
        """Set the step count of moments that were loaded."""
        for state in self._adam.state.values():
            state["step"].fill_(count)


class TrainedShard(ShardedAdam):
    """Holds this rank's rows of one model, their optimizer, and the ``member`` that computes with the model."""

    def __init__(
        self, model: nn.Module, member: Member, world: World, spec: BackendSpec, *, prefix: str = "", kind: str = ""
    ) -> None:
        """``model`` is sharded already. ``prefix`` and ``kind``: see ``FlatParameters``."""
        self.model = model
        self.member = member
        self.rows = Rows(model, spec.dtype, prefix=prefix, kind=kind)
        self._kept = kept_parameters(model)
        super().__init__(self.rows.parameters, spec, world)

    def gathered_norm(self, weight: float) -> float:
        """See ``ShardedAdam``. FSDP has added up the copies' gradients, but for experts that it does not know."""
        for own in self._kept:
            if own.grad is None:
                own.grad = torch.zeros_like(own)
            self._world.sum_over_replicas(local(own.grad))
        return super().gathered_norm(weight)

    def score(self, batch: MicroBatch, temperature: float) -> np.ndarray:
        return self.member.score(batch, temperature)

    def accumulate(self, batch: MicroBatch, loss: LossSpec, *, learn: bool = True) -> MicroBatchStats:
        """Add to the gradient sums if ``learn``. Something passes through the model even if our part is empty, since
        the other ranks wait for our rows.
        """
        if (batch.loss_weight != 0).any():
            return self.member.accumulate(batch, loss, learn=learn)
        empty = nothing()
        if not learn:
            self.member.score(empty, 1.0)
            return NO_STATS
        logits = self.member.logits(empty, response_positions(empty)).logits
        logits[:0].sum().backward()  # type: ignore[no-untyped-call]
        return NO_STATS

    def learn(self, batch: MicroBatch, loss: LossSpec, *, backward: bool) -> Learned:
        return learn(self.member, batch, loss, backward=backward)

    def taken_stats(self) -> MicroBatchStats:
        return self.member.taken_stats()

    def use_recompute(self, way: str) -> None:
        use_way(self.model, way)

    def leave(self) -> None:
        super().leave()
        self.taken_stats()

    @property
    def numbers(self) -> int:
        """Count of weights, those of all ranks."""
        return sum(own.numel() for _, own in self.rows.parameters)

    def save(self, directory: Path, sharers: Collection[int] = ()) -> None:
        """Write this rank's rows to a file of its own, or give them to the leader, which writes that file.

        ``sharers``: ranks on other machines that write for themselves (``World.sharers``).
        """
        world = self._world
        if not world.is_first_replica:
            return
        state = self.state()
        if world.is_elsewhere and world.rank not in sharers:
            for own in state.values():
                world.give(local(own))
            return
        parts.save(directory, {name: own_piece(own) for name, own in state.items()}, world.rank)
        for rank in self._led(sharers):
            theirs = {name: piece_of(own, rank, own.dtype) for name, own in state.items()}
            for piece in theirs.values():
                world.take(piece.rows, rank)
            parts.save(directory, theirs, rank)

    def _led(self, sharers: Collection[int]) -> list[int]:
        """Ranks whose rows this rank writes and reads besides its own."""
        return [rank for rank in self._world.elsewhere if self._world.rank == 0 and rank not in sharers]

    def restore(
        self, path: Path, model_path: Path, steps: int, sharers: Collection[int] = (), *, is_flat: bool
    ) -> None:
        """Load the state at ``path``, saved after so many optimizer steps, and drop the gradient sums.

        ``is_flat``: ``path`` is the file of a torch backend, else a directory of shards.
        """
        state, world = self.state(), self._world
        read = partial(parts.load_flat, rows=self.rows) if is_flat else parts.load
        if world.is_elsewhere and world.rank not in sharers:
            for own in state.values():
                world.take(local(own))
        elif world.is_first_replica:
            read(path, {name: own_piece(own) for name, own in state.items()}, model_path=model_path)
            for rank in self._led(sharers):
                theirs = {name: piece_of(own, rank, own.dtype) for name, own in state.items()}
                read(path, theirs, model_path=model_path)
                for piece in theirs.values():
                    world.give(piece.rows, rank)
        for tensor in state.values():
            world.from_first_replica(local(tensor))
        self.set_steps(steps)
        self.leave()
