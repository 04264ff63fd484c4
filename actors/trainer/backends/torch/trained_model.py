"""One trained model with its optimizer; a backend has one such model, or two with a critic.

gradient sums ─ gathered ─▶ norm ─▶ taken: sums / weight ─ clip ─ optimizer ─▶ weights in the model's dtype
                                 └▶ or left: the weights and the optimizer stay as they are
"""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path
from typing import Final, Generic, Protocol, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from actors.host.memory_account import MemoryMeter, free_bytes
from actors.trainer.backend import (
    AdamStep,
    BackendSpec,
    Learned,
    LossSpec,
    MemoryUse,
    MicroBatch,
    MicroBatchStats,
    StepResult,
    summed,
)
from actors.trainer.backends.out_of_memory import give_back_unused, or_out_of_memory
from actors.trainer.backends.torch.optimizers import MOMENTS, OPTIMIZERS
from actors.trainer.backends.torch.recompute import use_way
from actors.trainer.backends.torch.replicas import Replicas
from actors.trainer.backends.torch.trained_adapter import TrainedAdapter
from actors.trainer.errors import BackendClosed, CheckpointCorrupt

_OPTIMIZER: Final = "\noptimizer "
"""What stands before the optimizer's name in a file's layout, where it is not AdamW."""


class TrainedModel:
    """Holds the replicas of one model, its weights and its optimizer."""

    def __init__(self, replicas: Replicas, spec: BackendSpec) -> None:
        self.replicas = replicas
        self.parameters = replicas.parameters
        self.optimizer = OPTIMIZERS[spec.optimizer](self.parameters, spec, replicas.model)

    def score(self, batch: MicroBatch, temperature: float) -> np.ndarray:
        return self.replicas.score(batch, temperature)

    def accumulate(self, batch: MicroBatch, loss: LossSpec, *, learn: bool = True) -> MicroBatchStats:
        return self.replicas.accumulate(batch, loss, learn=learn)

    def learn(self, batch: MicroBatch, loss: LossSpec, *, backward: bool) -> Learned:
        return self.replicas.learn(batch, loss, backward=backward)

    def taken_stats(self) -> MicroBatchStats:
        return self.replicas.taken_stats()

    def use_recompute(self, way: str) -> None:
        for member in self.replicas.members:
            use_way(member.logits.model, way)

    def gathered_norm(self, weight: float) -> float:
        """Norm of the gradient, from the sums of all replicas. Call it once, before ``take`` or ``leave``."""
        self.parameters.gather_gradients()
        return float(torch.linalg.vector_norm(self.parameters.grad)) / weight

    def take(self, adam: AdamStep, norm: float, weight: float) -> None:
        self.parameters.grad.mul_(adam.scale(norm) / weight)
        self.optimizer.step(adam)
        self.parameters.publish_master()

    def leave(self) -> None:
        """Drop the gradient sums, and the statistics."""
        self.parameters.zero_gradients()
        self.taken_stats()

    def forget_optimizer(self) -> None:
        for tensor in self.optimizer.state().values():
            tensor.zero_()
        self.optimizer.set_counts([0.0] * self.optimizer.groups)

    @property
    def later_bytes(self) -> int:
        return 0 if self.optimizer.has_state else sum(size for _, size in self.optimizer.sizes)

    @property
    def state_bytes(self) -> int:
        """Bytes that ``save`` writes: master weights and the optimizer's state."""
        return self.parameters.master.nbytes + sum(size for _, size in self.optimizer.sizes)

    def save(self, path: Path) -> None:
        tensors = {"master": self.parameters.master, **self.optimizer.state()}
        contiguous = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
        contiguous |= {f"step.{i}": torch.tensor(count) for i, count in enumerate(self.optimizer.counts())}
        save_file(contiguous, path, metadata={"layout": self._layout})  # the order of two keys would vary

    @property
    def _layout(self) -> str:
        """A text that says which tensors a file holds."""
        known = self.parameters.fingerprint()
        return known if self.optimizer.name == "adamw" else f"{known}{_OPTIMIZER}{self.optimizer.name}"

    def load(self, path: Path, model_path: Path) -> None:
        """Load what ``save`` wrote, and drop the gradient sums.

        Raises:
            CheckpointCorrupt: the file cannot be read, or is of another model than ``model_path``.
        """
        try:
            with safe_open(path, framework="pt") as file:
                layout = (file.metadata() or {}).get("layout", "")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 safe_open is no mapping
        except (OSError, ValueError, SafetensorError) as error:
            raise CheckpointCorrupt(f"{path}: {error}; resume from another checkpoint") from error
        known, _, theirs = layout.partition(_OPTIMIZER)
        if known != self.parameters.fingerprint():
            raise CheckpointCorrupt(f"{path}: holds another model or dtype than {model_path}")
        self._check_optimizer(path, theirs or "adamw")
        self.parameters.load_master(tensors["master"])
        self.parameters.zero_gradients()
        for name, value in self.optimizer.state().items():
            value.copy_(tensors[name])
        self.optimizer.set_counts([float(tensors[f"step.{i}"]) for i in range(self.optimizer.groups)])

    def _check_optimizer(self, path: Path, theirs: str) -> None:
        if theirs != self.optimizer.name:
            raise CheckpointCorrupt(
                f"{path}: holds the state of {theirs}, and trainer.optimizer is {self.optimizer.name}; resume with the "
                "job as it was, or begin a new run from the model of the checkpoint"
            )

    def load_parts(self, directory: Path, model_path: Path, steps: int) -> None:
        """Load what the ranks of a sharded backend have saved after ``steps`` steps of their optimizer.

        Raises:
            CheckpointCorrupt: the file cannot be read, or is of another model than ``model_path``.
        """
        from actors.trainer.backends.fsdp import parts
        from actors.trainer.backends.fsdp.sharded_model import own_piece

        self._check_optimizer(directory, "adamw")
        parts.load(directory, {name: own_piece(own) for name, own in self._by_name_on_disk().items()}, model_path)
        self.parameters.publish_master()
        self.parameters.zero_gradients()
        self.optimizer.set_counts([float(steps)] * self.optimizer.groups)

    def _by_name_on_disk(self) -> dict[str, Tensor]:
        """Master weights and AdamW's moments as ranks save them: views, so that they can be filled."""
        parameters, state = self.parameters, self.optimizer.state()
        itemsize, tensors = parameters.flat.element_size(), dict[str, Tensor]()
        for entry in parameters.entries:
            start, count = entry.offset_bytes // itemsize, entry.length_bytes // itemsize
            is_second = 0 < parameters.first_vector <= start  # whether Adam has it in a second group, of vectors
            less = parameters.first_vector if is_second else 0
            places = {name: (state[f"{name}.{int(is_second)}"], start - less) for name in MOMENTS} | {
                "master": (parameters.master, start)
            }
            for name, (whole, at) in places.items():
                tensors[f"{name}.{entry.name}"] = whole[at : at + count].view(entry.shape)
        return tensors


class Scorer(Protocol):
    """One model that gives a number for each token: its log-probability, or its value if the model is a critic."""

    def score(self, batch: MicroBatch, temperature: float) -> np.ndarray: ...


class Trained(Scorer, Protocol):
    """One trained model, whole or a rank's part of it."""

    def accumulate(self, batch: MicroBatch, loss: LossSpec, *, learn: bool = True) -> MicroBatchStats: ...

    def learn(self, batch: MicroBatch, loss: LossSpec, *, backward: bool) -> Learned:
        """As ``TrainBackend.learn``; only of a policy."""
        ...

    def taken_stats(self) -> MicroBatchStats:
        """What the device has summed up since this was last called; waits for it."""
        ...

    def use_recompute(self, way: str) -> None: ...

    def gathered_norm(self, weight: float) -> float: ...

    def take(self, adam: AdamStep, norm: float, weight: float) -> None: ...

    def leave(self) -> None: ...

    def forget_optimizer(self) -> None:
        """Let the optimizer's state begin anew."""
        ...

    @property
    def later_bytes(self) -> int:
        """Bytes that the model will take besides activations, and has not taken yet."""
        ...


T = TypeVar("T", bound=Trained)


class BackendModels(Generic[T]):
    """Holds the models of a backend, whole or a rank's part of each: policy, critic and reference.

    ``reference``: the model before training, if the spec needs one and no adapter is trained; with an adapter, the
    policy with its adapter switched off takes its place.
    """

    def __init__(
        self, spec: BackendSpec, policy: T, critic: T | None, adapter: TrainedAdapter | None, reference: Scorer | None
    ) -> None:
        self._spec = spec
        self.policy, self.critic, self.adapter = policy, critic, adapter
        self._reference = reference
        self.steps = 0

    @or_out_of_memory
    def score(self, batch: MicroBatch, temperature: float, reference: bool) -> np.ndarray:
        if not reference:
            return self.policy.score(batch, temperature)
        if not self._spec.needs_reference:
            raise BackendClosed("no reference model was loaded; start the backend with needs_reference")
        batch = dataclasses.replace(batch, routes=None)  # they were chosen by the policy
        if self._reference is not None:
            return self._reference.score(batch, temperature)
        assert self.adapter is not None, "a whole model has a reference of its own"
        with self.adapter.switch.off():
            return self.policy.score(batch, temperature)

    @or_out_of_memory
    def values(self, batch: MicroBatch) -> np.ndarray:
        if self.critic is None:
            raise BackendClosed("no critic was loaded; start the backend with critic")
        return self.critic.score(batch, 1.0)

    @or_out_of_memory
    def accumulate(self, batch: MicroBatch, loss: LossSpec) -> MicroBatchStats:
        stats = self.policy.accumulate(batch, loss, learn=not self._spec.trains_critic_alone(self.steps))
        return stats if self.critic is None else summed([stats, self.critic.accumulate(batch, loss)])

    @or_out_of_memory
    def learn(self, batch: MicroBatch, loss: LossSpec, backward: bool) -> Learned:
        self._spec.check_learn()
        return self.policy.learn(batch, loss, backward=backward)

    def check_learn(self) -> None:
        self._spec.check_learn()

    def check_adam(self, adam: AdamStep | None) -> None:
        if adam is not None:
            self._spec.check_adam(adam)

    def forget_optimizer(self) -> None:
        """Let the optimizers and the schedule begin anew, after ``load``."""
        for model in (self.policy, self.critic):
            if model is not None:
                model.forget_optimizer()
        self.steps = 0

    def drop_sums(self) -> None:
        """Clear the gradient sums, and free what a pass that failed has left."""
        for model in (self.policy, self.critic):
            if model is not None:
                model.leave()
        give_back_unused()

    def use_recompute(self, way: str) -> None:
        """See ``TrainBackend.use_recompute``."""
        for model in (self.policy, self.critic):
            if model is not None:
                model.use_recompute(way)

    @or_out_of_memory
    def measure(self, batch: MicroBatch, loss: LossSpec) -> MemoryUse:
        """See ``TrainBackend.measure``. The policy learns even where the critic would be trained alone at first."""
        trained = [model for model in (self.policy, self.critic) if model is not None]
        give_back_unused()
        began_s = time.perf_counter()
        with MemoryMeter(self._spec.device) as meter:
            for model in trained:
                model.accumulate(batch, loss)
                model.taken_stats()  # which waits for the device
        seconds = time.perf_counter() - began_s
        self.drop_sums()
        later_bytes = sum(model.later_bytes for model in trained)
        return MemoryUse(meter.peak_bytes, max(0, free_bytes(self._spec.device) - later_bytes), seconds)

    def step(self, weight: float, adam: AdamStep | None = None) -> StepResult:
        """Update all models, or none if a norm is not finite; in the critic's warm-up the policy stays as it is."""
        self.check_adam(adam)
        spec, policy, critic = self._spec, self.policy, self.critic
        norm = policy.gathered_norm(weight)
        critic_norm = None if critic is None else critic.gathered_norm(weight)
        alone = spec.trains_critic_alone(self.steps)
        used = adam or spec.adam_at(0.0 if alone else spec.learning_rate_of(self.steps))
        skipped = not all(map(math.isfinite, (norm, critic_norm or 0.0)))
        if not skipped and not alone:
            policy.take(used, norm, weight)
        if not skipped and critic is not None and critic_norm is not None and spec.critic is not None:
            rate = spec.learning_rate_of(self.steps, spec.critic.learning_rate)
            critic.take(spec.adam_at(rate), critic_norm, weight)
        trained = [model for model in (policy, critic) if model is not None]
        stats = summed([model.taken_stats() for model in trained])
        for model in trained:
            model.leave()
        self.steps += 1
        return StepResult(
            grad_norm=norm,
            learning_rate=used.learning_rate,
            skipped=skipped,
            critic_grad_norm=critic_norm,
            stats=stats,
        )
