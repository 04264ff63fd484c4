"""The train backend: what a trainer drives. Kinds: ``backends/torch_backend.py``, ``simulated_backend.py``.

Invariants (asserted for every kind by ``tests/contracts/test_train_backend_contract.py``)
- Gradients accumulate as *sums* over tokens of weight times loss; ``step`` divides once. So the result of a step
  does not depend on how the batch was cut into micro-batches, beyond rounding.
- Nothing but ``step`` changes the weights; a failed ``accumulate`` leaves them unchanged.
- ``save`` then ``load`` restores weights, optimizer, schedule and step count bit for bit.
- Blocking work runs off the event loop.

    start → ( [score] · accumulate* · step · [export] )* → close
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from actors.weights.messages import Manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Padded sequences for one forward and backward pass. B sequences, T positions (prompt and response).

    Position t holds the token; ``loss_weight[b, t]`` weighs the loss of *predicting* the token at t and is 0 on
    the prompt, on padding, and where nothing is to be learned. Prompt first, response after it, padding last.
    """

    input_ids: np.ndarray  # int32[B, T]
    lengths: np.ndarray  # int32[B], tokens before padding
    prompt_lengths: np.ndarray  # int32[B]
    behaviour_logprobs: np.ndarray  # float32[B, T], of the engine that generated, 0 where loss_weight is 0
    advantages: np.ndarray  # float32[B, T]
    loss_weight: np.ndarray  # float32[B, T]
    reference_logprobs: np.ndarray | None = None  # float32[B, T]


@dataclass(frozen=True, kw_only=True, slots=True)
class LossSpec:
    """The policy loss, all of it (``losses.py`` gives the formulas and their sources)."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coefficient: float = 0.0
    importance_cap: float = 2.0
    """Truncated importance sampling: weights trainer/engine probability ratios up to this cap."""
    temperature: float = 1.0
    """The sampling temperature; the trainer's log-probabilities are of the same distribution."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatchStats:
    """Sums over weighted tokens, so that they add up over micro-batches and ranks."""

    tokens: int
    weight: float
    loss_sum: float
    clipped_sum: float
    kl_sum: float
    entropy_sum: float
    mismatch_sum: float
    """|trainer - engine log-probability|, the engine mismatch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    grad_norm: float
    learning_rate: float
    skipped: bool
    """A non-finite gradient: the step was not taken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendSpec:
    model_path: Path
    dtype: str = "float32"
    device: str = "cpu"
    threads: int = 1
    learning_rate: float = 1e-6
    warmup_steps: int = 0
    weight_decay: float = 0.0
    adam_betas: tuple[float, float] = (0.9, 0.999)
    max_grad_norm: float = 1.0
    seed: int = 0
    needs_reference: bool = False


class TrainBackend(Protocol):
    kind: str

    async def start(self, spec: BackendSpec) -> None: ...

    async def score(self, batch: MicroBatch, *, temperature: float, reference: bool) -> np.ndarray:
        """Log-probabilities float32[B, T] of the tokens of ``batch`` under the current or the reference model."""
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

    async def offload(self) -> None: ...

    async def onload(self) -> None: ...

    async def close(self) -> None: ...
