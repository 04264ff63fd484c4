"""One model and its optimizer: what a backend trains one of, or with a critic two.

gradient sums ─ gathered ─▶ norm ─▶ taken: sums / weight ─ clip ─ AdamW ─▶ weights in the model's dtype
                                 └▶ or left: the weights and the optimizer stay as they are
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from actors.trainer.backend import BackendSpec, StepResult
from actors.trainer.backends.torch.adam import MOMENTS, Adam
from actors.trainer.backends.torch.replicas import Replicas
from actors.trainer.errors import CheckpointCorrupt


class TrainedModel:
    """Holds the replicas of one model, its weights and its optimizer."""

    def __init__(self, replicas: Replicas, spec: BackendSpec) -> None:
        self._max_norm = spec.max_grad_norm
        self.replicas = replicas
        self.parameters = replicas.parameters
        self.adam = Adam(self.parameters, spec)

    def gathered_norm(self, weight: float) -> float:
        """Norm of the gradient, from the sums of all replicas. Once, before ``take`` or ``leave``."""
        self.parameters.gather_gradients()
        return float(torch.linalg.vector_norm(self.parameters.grad)) / weight

    def take(self, rate: float, norm: float, weight: float) -> None:
        """Update the weights."""
        self.parameters.grad.mul_(min(1.0, self._max_norm / (norm + 1e-6)) / weight)
        self.adam.step(rate)
        self.parameters.publish_master()

    def leave(self) -> None:
        """Forget the sums."""
        self.parameters.zero_gradients()

    @property
    def state_bytes(self) -> int:
        """Bytes that ``save`` writes: master weights and Adam's two moments."""
        return 3 * self.parameters.master.numel() * self.parameters.master.element_size()

    def save(self, path: Path) -> None:
        tensors = {"master": self.parameters.master}
        for index, state in enumerate(self.adam.states()):
            tensors |= {f"{key}.{index}": value for key, value in state.items()}
        contiguous = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
        save_file(contiguous, path, metadata={"layout": self.parameters.fingerprint()})

    def load(self, path: Path, model_path: Path) -> None:
        """Take over what ``save`` wrote; sums are forgotten.

        Raises:
            CheckpointCorrupt: it cannot be read, or is of another model than ``model_path``.
        """
        try:
            with safe_open(path, framework="pt") as file:
                layout = (file.metadata() or {}).get("layout")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 safe_open is no mapping
        except (OSError, ValueError, SafetensorError) as error:
            raise CheckpointCorrupt(f"{path}: {error}; resume from another checkpoint") from error
        if layout != self.parameters.fingerprint():
            raise CheckpointCorrupt(f"{path}: holds another model or dtype than {model_path}")
        self.parameters.load_master(tensors["master"])
        self.parameters.zero_gradients()
        for index, own in enumerate(self.adam.states()):
            for key, value in own.items():
                value.copy_(tensors[f"{key}.{index}"])

    def load_parts(self, directory: Path, model_path: Path, steps: int) -> None:
        """Take over what the ranks of a sharded backend have saved, after so many steps of their optimizer.

        Raises:
            CheckpointCorrupt: it cannot be read, or is of another model than ``model_path``.
        """
        from actors.trainer.backends.fsdp import parts

        parts.load(directory, self._by_name_on_disk(), model_path)
        self.parameters.publish_master()
        self.parameters.zero_gradients()
        self.adam.set_counts([float(steps)] * self.adam.groups)

    def _by_name_on_disk(self) -> dict[str, Tensor]:
        """Master weights and moments as ranks save them: views, so that they can be filled."""
        parameters, states = self.parameters, self.adam.states()
        itemsize, tensors = parameters.flat.element_size(), dict[str, Tensor]()
        for entry in parameters.entries:
            start, count = entry.offset_bytes // itemsize, entry.length_bytes // itemsize
            is_second = 0 < parameters.first_vector <= start  # of Adam's groups: it is a vector, and there are matrices
            less = parameters.first_vector if is_second else 0
            places = {name: (states[is_second][name], start - less) for name in MOMENTS} | {
                "master": (parameters.master, start)
            }
            for name, (whole, at) in places.items():
                tensors[f"{name}.{entry.name}"] = whole[at : at + count].view(entry.shape)
        return tensors


class Trained(Protocol):
    """One model, whole or a rank's part of it."""

    def gathered_norm(self, weight: float) -> float: ...

    def take(self, rate: float, norm: float, weight: float) -> None: ...

    def leave(self) -> None: ...


def step(policy: Trained, critic: Trained | None, spec: BackendSpec, number: int, weight: float) -> StepResult:
    """Take the step ``number``, from 0, of all models, or of none: if a norm is not finite it is skipped."""
    norm = policy.gathered_norm(weight)
    critic_norm = None if critic is None else critic.gathered_norm(weight)
    alone = spec.trains_critic_alone(number)
    rate = 0.0 if alone else spec.learning_rate_of(number)
    skipped = not all(map(math.isfinite, (norm, critic_norm or 0.0)))
    if not skipped and not alone:
        policy.take(rate, norm, weight)
    if not skipped and critic is not None and critic_norm is not None and spec.critic is not None:
        critic.take(spec.learning_rate_of(number, spec.critic.learning_rate), critic_norm, weight)
    for model in (policy, critic):
        if model is not None:
            model.leave()
    return StepResult(grad_norm=norm, learning_rate=rate, skipped=skipped, critic_grad_norm=critic_norm)
