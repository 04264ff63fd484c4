"""One rank's part of the sharded backend: all that touches torch, the same for the leader and its followers.

    accumulate   this rank's rows of a micro-batch: forward ─ token losses ─ backward ─▶ sums over all ranks, in rows
    step         norm over all ranks ─ AdamW on this rank's rows

With a critic both happen to two models, policy first, as in the torch backend.

Invariants
- Ranks make the same calls in the same order, and in each of them as many forward and backward passes: a rank without a
  part of the micro-batch passes something of weight 0 through the models.
- All calls come from one thread.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch._C._distributed_c10d import Store

from actors.host.adapter import NAME_PREFIX
from actors.trainer.backend import BackendSpec, CriticSpec, LossSpec, MicroBatch, MicroBatchStats, StepResult
from actors.trainer.backends.fsdp.orders import Meeting, Restore
from actors.trainer.backends.fsdp.sharded_model import shard
from actors.trainer.backends.fsdp.trained_shard import TrainedShard
from actors.trainer.backends.fsdp.world import World, join, leave
from actors.trainer.backends.torch.adapter import add_adapter
from actors.trainer.backends.torch.causal_lm import ResponseLogits, load_model
from actors.trainer.backends.torch.critic import CriticReplica, load_critic
from actors.trainer.backends.torch.replicas import Replica, scored, summed
from actors.trainer.backends.torch.torch_backend import CRITIC_FILE, CRITIC_PARTS, TENSOR_FILE, TorchBackend
from actors.trainer.backends.torch.trained_adapter import TrainedAdapter
from actors.trainer.backends.torch.trained_model import step
from actors.trainer.errors import BackendClosed


class FsdpCore:
    """Holds this rank's rows of each model. Made in the thread that calls it, at the same time on all ranks."""

    def __init__(self, spec: BackendSpec, meeting: Meeting, rank: int, store: Store | None = None) -> None:
        torch.set_num_threads(spec.threads if spec.threads > 0 else len(os.sched_getaffinity(0)))
        torch.manual_seed(spec.seed)
        self._spec = spec
        self._offload = meeting.offload
        self.world: World = join(meeting, rank, spec.device, store)
        try:
            self.adapter = None if spec.adapter is None else TrainedAdapter(spec.model_path, spec.adapter)
            self.policy = self._load_policy()
            self.critic = None if spec.critic is None else self._load_critic(spec.critic)
            self._reference = self._load_reference() if spec.needs_reference and self.adapter is None else None
        except BaseException:
            self.close()
            raise
        self.steps = 0

    @property
    def dtype(self) -> str:
        """What the weights are published and computed in."""
        return self._spec.dtype

    @property
    def _as_stored(self) -> BackendSpec:
        """A model is loaded on the CPU, as it was stored: a rank keeps a copy of its rows alone."""
        return dataclasses.replace(self._spec, device="cpu")

    def _sharded(self, model: nn.Module) -> tuple[nn.Module, str]:
        """``model`` once it is sharded, and the device that it computes on."""
        shard(model, self.world, self._spec, offload=self._offload)
        return model, str(self.world.device)

    def _load_policy(self) -> TrainedShard:
        model = load_model(self._spec.model_path, self._as_stored)
        prefix, kind = "", ""
        if self.adapter is not None:
            add_adapter(model.requires_grad_(False), self.adapter.spec, self.adapter.switch, seed=self._spec.seed)
            prefix, kind = NAME_PREFIX, self.adapter.kind
        member = Replica(*self._sharded(model))
        return TrainedShard(model, member, self.world, self._spec, prefix=prefix, kind=kind)

    def _load_critic(self, critic: CriticSpec) -> TrainedShard:
        model = load_critic(self._as_stored, critic)
        return TrainedShard(model, CriticReplica(*self._sharded(model)), self.world, self._spec)

    def _load_reference(self) -> ResponseLogits:
        model = load_model(self._spec.model_path, self._as_stored).requires_grad_(False)
        return ResponseLogits(*self._sharded(model))

    # ------------------------------------------------------------ computing

    def score(self, part: MicroBatch, temperature: float, reference: bool) -> np.ndarray:
        if not reference:
            return self.policy.member.score(part, temperature)
        if not self._spec.needs_reference:
            raise BackendClosed("no reference model was loaded; start the backend with needs_reference")
        if self._reference is not None:
            return scored(self._reference, part, temperature)
        assert self.adapter is not None, "a whole model has a reference of its own"
        with self.adapter.switch.off():
            return self.policy.member.score(part, temperature)

    def values(self, part: MicroBatch) -> np.ndarray:
        if self.critic is None:
            raise BackendClosed("no critic was loaded; start the backend with critic")
        return self.critic.member.score(part, 1.0)

    def accumulate(self, part: MicroBatch, loss: LossSpec) -> MicroBatchStats:
        stats = self.policy.accumulate(part, loss, learn=not self._spec.trains_critic_alone(self.steps))
        return stats if self.critic is None else summed([stats, self.critic.accumulate(part, loss)])

    def step(self, weight: float) -> StepResult:
        critic = None if self.critic is None else self.critic.adam
        result = step(self.policy.adam, critic, self._spec, self.steps, weight)
        self.steps += 1
        return result

    # ------------------------------------------------------------ files

    def write_rows(self, path: Path) -> None:
        if self.world.is_first_replica:
            self.policy.rows.write(path)

    def save(self, directory: Path) -> None:
        self.policy.save(directory)
        if self.critic is not None:
            self.critic.save(directory / CRITIC_PARTS)

    def restore(self, order: Restore) -> None:
        """Take over what a backend of that kind has saved; sums are forgotten."""
        directory, is_flat = Path(order.directory), order.kind == TorchBackend.kind
        policy, critic = (TENSOR_FILE, CRITIC_FILE) if is_flat else ("", CRITIC_PARTS)
        self.policy.restore(directory / policy, self._spec.model_path, order.optimizer_steps, is_flat=is_flat)
        if self.critic is not None and self._spec.critic is not None:
            path = self._spec.critic.model_path
            self.critic.restore(directory / critic, path, order.critic_steps, is_flat=is_flat)
        self.steps = order.steps

    def close(self) -> None:
        leave()
