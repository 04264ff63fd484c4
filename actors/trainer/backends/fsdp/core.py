"""One rank's part of the sharded backend: all of its torch code, the same for the leader and its followers.

    accumulate   this rank's rows of a micro-batch: forward ─ token losses ─ backward ─▶ sums over all ranks, in rows
    step         norm over all ranks ─ AdamW on this rank's rows

With a critic both happen to two models, policy first, as in the torch backend.

Invariants
- Ranks make the same calls in the same order, each with the same number of forward and backward passes: a rank without
  a part of the micro-batch passes tokens of weight 0 through the models.
- All calls come from one thread.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import torch
from torch import nn
from torch._C._distributed_c10d import Store

from actors.models.adapter import NAME_PREFIX
from actors.trainer.backend import BackendSpec, CriticSpec
from actors.trainer.backends.fsdp import machine_shares
from actors.trainer.backends.fsdp.kept_experts import experts_of
from actors.trainer.backends.fsdp.orders import Meeting, Restore
from actors.trainer.backends.fsdp.sharded_model import shard
from actors.trainer.backends.fsdp.trained_shard import TrainedShard
from actors.trainer.backends.fsdp.world import World, join, leave
from actors.trainer.backends.torch.adapter import add_adapter
from actors.trainer.backends.torch.causal_lm import load_model
from actors.trainer.backends.torch.critic import CriticReplica, load_critic
from actors.trainer.backends.torch.replicas import Replica
from actors.trainer.backends.torch.torch_backend import CRITIC_FILE, CRITIC_PARTS, TENSOR_FILE, TorchBackend
from actors.trainer.backends.torch.trained_adapter import TrainedAdapter
from actors.trainer.backends.torch.trained_model import BackendModels
from actors.trainer.errors import ModelNotLoadable


class FsdpCore(BackendModels[TrainedShard]):
    """Holds this rank's rows of each model. All ranks make theirs at the same time, in the thread that calls it."""

    def __init__(self, spec: BackendSpec, meeting: Meeting, rank: int, store: Store | None = None) -> None:
        torch.set_num_threads(spec.threads if spec.threads > 0 else len(os.sched_getaffinity(0)))
        torch.manual_seed(spec.seed)
        self._spec = spec
        self._offload = meeting.offload
        self.world: World = join(meeting, rank, spec.device, store)
        try:
            adapter = None if spec.adapter is None else TrainedAdapter(spec.model_path, spec.adapter)
            policy = self._load_policy(adapter)
            critic = None if spec.critic is None else self._load_critic(spec.critic)
            reference = self._load_reference() if spec.needs_reference and adapter is None else None
        except BaseException:
            self.close()
            raise
        super().__init__(spec, policy, critic, adapter, reference)

    @property
    def dtype(self) -> str:
        """Dtype in which the weights are published and computed with."""
        return self._spec.dtype

    @property
    def _as_stored(self) -> BackendSpec:
        """The spec for loading a whole model on the CPU; only this rank's rows are moved to its device."""
        return dataclasses.replace(self._spec, device="cpu")

    def _sharded(self, model: nn.Module) -> tuple[nn.Module, str]:
        """``model`` once it is sharded, and the device that it computes on."""
        shard(model, self.world, self._spec, offload=self._offload)
        return model, str(self.world.device)

    def _load_policy(self, adapter: TrainedAdapter | None) -> TrainedShard:
        model = load_model(self._spec.model_path, self._as_stored)
        if self._spec.expert_parallel and not experts_of(model):
            raise ModelNotLoadable(
                f"trainer.expert_parallel: {type(model).__name__} has no experts that transformers keeps as one tensor "
                "a layer; unset it"
            )
        prefix, kind = "", ""
        if adapter is not None:
            add_adapter(model.requires_grad_(False), adapter.spec, adapter.switch, seed=self._spec.seed)
            prefix, kind = NAME_PREFIX, adapter.kind
        member = Replica(*self._sharded(model), ranks=self.world.context)
        return TrainedShard(model, member, self.world, self._spec, prefix=prefix, kind=kind)

    def _load_critic(self, critic: CriticSpec) -> TrainedShard:
        model = load_critic(self._as_stored, critic)
        member = CriticReplica(*self._sharded(model), ranks=self.world.context)
        return TrainedShard(model, member, self.world, self._spec)

    def _load_reference(self) -> Replica:
        plain = dataclasses.replace(self._as_stored, router_replay=False, load_balancing=False, recompute="none")
        model = load_model(self._spec.model_path, plain).requires_grad_(False)
        return Replica(*self._sharded(model), ranks=self.world.context)

    # ------------------------------------------------------------ files

    def write_rows(self, path: Path) -> None:
        if self.world.is_first_replica:
            self.policy.rows.write(path, self.world)

    def write_share(self, segment: Path) -> None:
        machine_shares.write(self.policy.rows, self.world, segment)

    def seal_share(self, segment: Path, chunk_bytes: int) -> tuple[bytes, ...]:
        return machine_shares.seal_share(self.policy.rows, self.world, segment, chunk_bytes)

    def save(self, directory: Path) -> None:
        sharers = self.world.sharers(directory)
        self.policy.save(directory, sharers)
        if self.critic is not None:
            self.critic.save(directory / CRITIC_PARTS, sharers)

    def restore(self, order: Restore) -> None:
        """Load what a backend of the order's kind has saved, and clear the gradient sums."""
        directory, is_flat = Path(order.directory), order.kind == TorchBackend.kind
        policy, critic = (TENSOR_FILE, CRITIC_FILE) if is_flat else ("", CRITIC_PARTS)
        sharers = self.world.sharers(directory)
        self.policy.restore(directory / policy, self._spec.model_path, order.optimizer_steps, sharers, is_flat=is_flat)
        if self.critic is not None and self._spec.critic is not None:
            path = self._spec.critic.model_path
            self.critic.restore(directory / critic, path, order.critic_steps, sharers, is_flat=is_flat)
        self.steps = order.steps
        if not order.optimizer:
            self.forget_optimizer()

    def close(self) -> None:
        leave()
