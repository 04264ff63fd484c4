"""One rank's part of the sharded backend: all that touches torch, the same for the leader and its followers.

    accumulate   this rank's rows of a micro-batch: forward ─ token losses ─ backward ─▶ sums over all ranks, in rows
    step         norm over all ranks ─ AdamW on this rank's rows

Invariants
- Ranks make the same calls in the same order, and in each of them as many forward and backward passes: a rank without a
  part of the micro-batch passes something of weight 0 through the model.
- All calls come from one thread.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import nn
from torch._C._distributed_c10d import Store

from actors.host.adapter import NAME_PREFIX
from actors.trainer.backend import BackendSpec, LossSpec, MicroBatch, MicroBatchStats, StepResult
from actors.trainer.backends.fsdp import parts
from actors.trainer.backends.fsdp.optimizer import ShardedAdam
from actors.trainer.backends.fsdp.orders import Meeting, nothing
from actors.trainer.backends.fsdp.sharded_model import Rows, local, shard
from actors.trainer.backends.fsdp.world import World, join, leave
from actors.trainer.backends.torch.adapter import add_adapter
from actors.trainer.backends.torch.causal_lm import ResponseLogits, load_model, response_positions
from actors.trainer.backends.torch.replicas import Replica, scored
from actors.trainer.backends.torch.torch_backend import TENSOR_FILE, TorchBackend
from actors.trainer.backends.torch.trained_adapter import TrainedAdapter
from actors.trainer.backends.torch.trained_model import is_finite
from actors.trainer.errors import BackendClosed

_NO_STATS: Final = MicroBatchStats(
    tokens=0, weight=0.0, loss_sum=0.0, clipped_sum=0.0, kl_sum=0.0, entropy_sum=0.0, mismatch_sum=0.0
)


class FsdpCore:
    """Holds this rank's rows of the model. Made in the thread that calls it, at the same time on all ranks."""

    def __init__(self, spec: BackendSpec, meeting: Meeting, rank: int, store: Store | None = None) -> None:
        torch.set_num_threads(spec.threads if spec.threads > 0 else len(os.sched_getaffinity(0)))
        torch.manual_seed(spec.seed)
        self._spec = spec
        self.world: World = join(meeting, rank, spec.device, store)
        try:
            self.adapter = None if spec.adapter is None else TrainedAdapter(spec.model_path, spec.adapter)
            self.model = self._load(meeting.offload, trained=True)
            self._replica = Replica(self.model, str(self.world.device))
            self._reference: ResponseLogits | None = None
            if spec.needs_reference and self.adapter is None:
                frozen = self._load(meeting.offload, trained=False)
                self._reference = ResponseLogits(frozen, str(self.world.device))
        except BaseException:
            self.close()
            raise
        prefix, kind = ("", "") if self.adapter is None else (NAME_PREFIX, self.adapter.kind)
        self.rows = Rows(self.model, spec.dtype, prefix=prefix, kind=kind)
        self.adam = ShardedAdam(self.rows.parameters, spec, self.world)
        self.steps = 0

    @property
    def dtype(self) -> str:
        """What the weights are published and computed in."""
        return self._spec.dtype

    def _load(self, offload: bool, *, trained: bool) -> nn.Module:
        """Loaded on the CPU, as it was stored: a rank keeps a copy of its rows alone."""
        spec = self._spec
        model = load_model(spec.model_path, dataclasses.replace(spec, device="cpu"))
        model.requires_grad_(trained and self.adapter is None)
        if self.adapter is not None:
            add_adapter(model, self.adapter.spec, self.adapter.switch, seed=spec.seed)
        shard(model, self.world, spec, offload=offload)
        return model

    def score(self, part: MicroBatch, temperature: float, reference: bool) -> np.ndarray:
        if not reference:
            return self._replica.score(part, temperature)
        if not self._spec.needs_reference:
            raise BackendClosed("no reference model was loaded; start the backend with needs_reference")
        if self._reference is not None:
            return scored(self._reference, part, temperature)
        assert self.adapter is not None, "a whole model has a reference of its own"
        with self.adapter.switch.off():
            return self._replica.score(part, temperature)

    def accumulate(self, part: MicroBatch, loss: LossSpec) -> MicroBatchStats:
        if (part.loss_weight != 0).any():
            return self._replica.accumulate(part, loss)
        empty = nothing()
        logits = self._replica.logits(empty, response_positions(empty)).logits
        logits[:0].sum().backward()  # type: ignore[no-untyped-call]
        return _NO_STATS

    def step(self, weight: float) -> StepResult:
        norm = self.adam.norm(weight)
        rate = self._spec.learning_rate_of(self.steps)
        skipped = not is_finite(norm)
        if not skipped:
            self.adam.take(rate, norm, weight)
        self.adam.leave()
        self.steps += 1
        return StepResult(grad_norm=norm, learning_rate=rate, skipped=skipped)

    # ------------------------------------------------------------ files

    def write_rows(self, path: Path) -> None:
        if self.world.is_first_replica:
            self.rows.write(path)

    def save(self, directory: Path) -> None:
        if self.world.is_first_replica:
            parts.save(directory, self.adam.state(), self.world.rank)

    def restore(self, directory: Path, kind: str, steps: int, optimizer_steps: int) -> None:
        """Take over what a backend of ``kind`` has saved; sums are forgotten."""
        state = self.adam.state()
        if self.world.is_first_replica:
            if kind == TorchBackend.kind:
                parts.load_flat(directory / TENSOR_FILE, state, self.rows, self._spec.model_path)
            else:
                parts.load(directory, state, self._spec.model_path)
        for tensor in state.values():
            self.world.from_first_replica(local(tensor))
        self.adam.set_steps(optimizer_steps)
        self.adam.leave()
        self.steps = steps

    def close(self) -> None:
        leave()
