"""What a model of a Tinker client computes with, as a protocol: whoever trains implements it.

    factory.check(spec) ─▶ factory.make(spec) ─▶ load? ─▶ forward_backward* ─▶ optim_step ─▶ save? ─▶ … ─▶ close

Invariants
- A learner computes one call at a time, and equal calls after an equal state give equal bits: what follows a saved
  state can be executed again.
- A call that raises OperationRefused has changed nothing; only a refused ``optim_step`` has forgotten the gradient.
  So has one that raises LearnerBusy, and it may be repeated. After any other error the learner is closed, and another
  one is made, loaded, and given the calls since the saved state.
- Gradients add up as sums over calls until ``optim_step``, which forgets them; ``load`` forgets them too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from actors.protocol.datums import Datum
from actors.protocol.training import AdamStep


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Says which model a client has created."""

    base_model: str
    rank: int
    """Rank of the LoRA adapter; 0: the whole model is trained."""
    seed: int
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True


class Learner(Protocol):
    """Holds and trains one model."""

    async def forward_backward(
        self, datums: list[Datum], loss: str, parameters: dict[str, float], *, forward_only: bool
    ) -> tuple[list[np.ndarray], dict[str, float]]:
        """Compute the sum of a loss over all tokens, and unless ``forward_only`` add its gradient to what is there.

        Returns: log-probabilities, float32, of each datum in the shape of its targets; and metrics by names that end
        with how they are reduced over calls, such as ``loss:sum``, which is always there.

        Raises:
            OperationRefused: this model cannot take these datums, or this loss.
            LearnerLost: what computes is gone.
        """
        ...

    async def optim_step(self, adam: AdamStep) -> dict[str, float]:
        """Take one step with the gradient there is, and forget it; returns metrics.

        Raises:
            OperationRefused: the gradient is not finite; it is forgotten, and the weights are as they were.
            LearnerLost: what computes is gone.
        """
        ...

    async def save(self, directory: Path) -> None:
        """Write weights and optimizer into the new ``directory``; all is on the disk when this returns."""
        ...

    async def load(self, directory: Path, *, optimizer: bool) -> None:
        """Take over what ``save`` wrote; without ``optimizer`` as if no step had been taken.

        Raises:
            OperationRefused: it was saved from a model of another form.
        """
        ...

    async def export(self, directory: Path) -> None:
        """Write a PEFT or Hugging Face directory, which samplers load; all is on the disk when this returns."""
        ...

    async def close(self) -> None:
        """Release everything. Never raises; called once, also after an error."""
        ...


class LearnerFactory(Protocol):
    """Makes learners."""

    def check(self, spec: ModelSpec) -> None:
        """Raises OperationRefused: the base model is not served, or a flag of ``spec`` cannot be honoured."""
        ...

    async def make(self, spec: ModelSpec, number: int) -> Learner:
        """A model that no step has been taken with; ``number`` is that of the model, in all lives of the server.

        Raises:
            LearnerLost, OperationRefused.
            LearnerBusy: there is no room for it now.
        """
        ...
