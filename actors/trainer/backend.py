"""The train backend: what a trainer drives. Kinds: ``backends/torch_backend.py``, ``simulated_backend.py``.

Invariants (asserted for every kind by ``tests/contracts/test_train_backend_contract.py``)
- Gradients accumulate as *sums* over tokens of weight times loss; ``step`` divides once. So the result of a step
  does not depend on how the batch was cut into micro-batches, beyond rounding.
- Nothing but ``step`` changes the weights; a failed ``accumulate`` leaves them unchanged.
- ``save`` then ``load`` restores weights, optimizer, schedule and step count bit for bit.
- Blocking work runs off the event loop.

    start → ( [score] · [values] · accumulate* · step · [export] )* → close

With a critic (``BackendSpec.critic``) a backend trains two models: ``accumulate`` adds gradients of both, of the same
micro-batch, ``step`` updates both or neither, ``save`` and ``load`` hold both. What is exported is the policy.

With an adapter (``BackendSpec.adapter``) that is all a backend trains of the policy, and all that ``export_segment``,
``save`` and ``export_checkpoint`` hold: the last writes a PEFT directory.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import numpy as np

from actors.host.adapter import AdapterSpec
from actors.protocol.training import LossSpec, MicroBatch, MicroBatchStats, StepResult, StoredBytes
from actors.protocol.weights import Manifest
from actors.trainer.learning_rate import learning_rate
from configs.schema import LrSchedule

__all__ = [
    "BackendSpec",
    "CriticSpec",
    "LossSpec",
    "MicroBatch",
    "MicroBatchStats",
    "StepResult",
    "StoredBytes",
    "TrainBackend",
]


NUMERICS: Final = 1e-4
"""Log-probabilities this close are the same: float32 engines are within about 1e-6, bfloat16 ones beyond 1e-3."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticSpec:
    """Says which model becomes the critic, and what of its training differs from the policy's."""

    model_path: Path
    learning_rate: float = 1e-5
    warmup_steps: int = 0
    """Steps, from the first, that leave the policy and its optimizer as they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendSpec:
    model_path: Path
    dtype: str = "float32"
    device: str = "cpu"
    threads: int = 1
    replicas: int = 1
    """Copies of the model, on the CPU, that share the weights and these threads between them."""
    learning_rate: float = 1e-6
    warmup_steps: int = 0
    lr_schedule: LrSchedule = "constant"
    total_steps: int = 1
    """Steps of the whole run, over which the learning rate falls."""
    weight_decay: float = 0.0
    adam_betas: tuple[float, float] = (0.9, 0.999)
    max_grad_norm: float = 1.0
    seed: int = 0
    needs_reference: bool = False
    gradient_checkpointing: bool = False
    critic: CriticSpec | None = None
    adapter: AdapterSpec | None = None
    """Adapter that is trained in place of the model; the model is then the reference as well."""
    parkable: bool = False
    """Whether the state will be parked (``parking.py``): on CUDA, tensors then keep their addresses while it is."""

    def learning_rate_of(self, step: int, peak: float | None = None) -> float:
        """Rate of the optimizer step number ``step``, from 0; ``peak``: another one than the policy's."""
        return learning_rate(
            step,
            peak=self.learning_rate if peak is None else peak,
            schedule=self.lr_schedule,
            warmup_steps=self.warmup_steps,
            total_steps=self.total_steps,
        )

    def trains_critic_alone(self, step: int) -> bool:
        """Whether the step number ``step``, from 0, leaves the policy as it is."""
        return self.critic is not None and step < self.critic.warmup_steps


class TrainBackend(Protocol):
    kind: str

    async def start(self, spec: BackendSpec) -> None: ...

    def stored_bytes(self) -> StoredBytes:
        """After ``start``."""
        ...

    async def score(self, batch: MicroBatch, *, temperature: float, reference: bool) -> np.ndarray:
        """Log-probabilities float32[B, T] of the tokens of ``batch`` under the current or the reference model."""
        ...

    async def values(self, batch: MicroBatch) -> np.ndarray:
        """What the critic expects before each token, float32[B, T], 0 where no response token stands."""
        ...

    async def accumulate(self, batch: MicroBatch, loss: LossSpec) -> MicroBatchStats:
        """Forward, backward, add to the gradient sums."""
        ...

    async def step(self, *, weight: float) -> StepResult:
        """Divide the gradient sums by ``weight``, clip, update, clear."""
        ...

    async def export_segment(self, path: Path, *, job: str, policy_version: int, chunk_bytes: int) -> Manifest:
        """Lay the weights out in the file ``path`` (HF names, offsets aligned to 64 bytes) and describe them."""
        ...

    async def save(self, directory: Path) -> None: ...

    async def load(self, directory: Path) -> None: ...

    async def export_checkpoint(self, directory: Path) -> None:
        """Write an HF directory that ``AutoModelForCausalLM.from_pretrained`` and vLLM load."""
        ...

    async def close(self) -> None: ...
