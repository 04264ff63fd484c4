"""The train backend, with which a trainer computes. ``setup.py`` has the table of kinds; a training service is another.

Invariants (asserted for every kind by ``tests/contracts/test_train_backend_contract.py``)
- Gradients accumulate as *sums* over tokens of weight times loss; ``step`` divides once. So the result of a step
  does not depend on how the batch was cut into micro-batches, beyond rounding.
- Nothing but ``step`` and ``load`` changes the weights; a failed ``accumulate`` or ``learn`` leaves them unchanged.
- ``learn`` adds to the same sums as ``accumulate``, and nothing without ``backward``. Its log-probabilities are those
  of the pass that its gradients come from; no statistics of ``step`` count it.
- With an AdamStep, ``step`` takes all hyper-parameters from it, for this step alone.
- A call that raises CallRefused has changed nothing.
- A call that finds too little memory raises OutOfMemory. ``drop_sums`` then makes the sums what they were after the
  last ``step``, or raises if this life of the backend cannot go on.
- ``save`` then ``load`` restores weights, optimizer, schedule and step count bit for bit.
- Blocking work runs off the event loop.
- ``close`` may be called twice; other calls before ``start`` or after ``close`` raise BackendClosed.

    connect → start → ( [score] · [values] · (accumulate | learn)* · step · [export] · committed )* → close
                └─ steps of the state that was kept of the job; None: ``load`` follows, if there is a checkpoint

Some backends call other processes: the ranks that they lead, or a training service. They do so through the ctx of
``connect``, and ``heard`` tells them which of these that ctx has lost. ``LocalBackend`` answers for those without any.

With a critic (``BackendSpec.critic``) a backend trains two models: ``accumulate`` adds gradients of both, of the same
micro-batch, ``step`` updates both or neither, ``save`` and ``load`` hold both. What is exported is the policy.

With an adapter (``BackendSpec.adapter``) only the adapter is trained of the policy, and ``export_segment``, ``save``
and ``export_checkpoint`` write only the adapter: the last as a PEFT directory.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import msgspec
import numpy as np

from actors.core.context import Context
from actors.core.watch import Down
from actors.models.adapter import AdapterSpec
from actors.protocol.training import (
    NO_STATS,
    AdamStep,
    Learned,
    LossSpec,
    MicroBatch,
    MicroBatchStats,
    StepResult,
    StoredBytes,
    summed,
)
from actors.protocol.weights import Manifest
from actors.ranks.followers import NOBODY, Followers
from actors.trainer.errors import CallRefused
from actors.trainer.learning.learning_rate import learning_rate
from configs.limits import DEFAULT_LIMITS, Limits
from configs.schema import LrSchedule

__all__ = [
    "NO_STATS",
    "AdamStep",
    "BackendSpec",
    "CriticSpec",
    "Learned",
    "LedRanks",
    "LocalBackend",
    "LossSpec",
    "MemoryUse",
    "MicroBatch",
    "MicroBatchStats",
    "StepResult",
    "StoredBytes",
    "TrainBackend",
    "summed",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticSpec:
    """Says which model becomes the critic, and how its training differs from the policy's."""

    model_path: Path
    learning_rate: float = 1e-5
    warmup_steps: int = 0
    """Steps, from the first, that leave the policy and its optimizer as they are."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Tells what one micro-batch has taken of a device's memory."""

    peak_bytes: int
    """Bytes that it took at most, beside those that were taken before."""
    free_bytes: int
    """Bytes that are free for a micro-batch; on a CPU, other processes of this machine may want them as well."""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendSpec:
    model_path: Path
    dtype: str = "float32"
    device: str = "cpu"
    threads: int = 1
    replicas: int = 1
    """Copies of the model, on the CPU, that share the weights and divide the threads among them."""
    optimizer: str = "adamw"
    """Name among ``OPTIMIZERS`` (``backends/torch/optimizers.py``)."""
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
    recompute: str = "none"
    """How activations come to the backward pass, a key of ``WAYS`` (``backends/torch/recompute.py``); ``auto``:
    ``use_recompute`` will say it."""
    compile: bool = False
    """Whether layers go through ``torch.compile`` (``backends/torch/layers/compiled_layers.py``)."""
    attention: str = "blocks"
    """How attention over packed rows is computed, one of ``row_attention.KINDS``."""
    critic: CriticSpec | None = None
    adapter: AdapterSpec | None = None
    """Adapter that is trained in place of the model; the model is then the reference as well."""
    expert_parallel: bool = False
    """Whether experts stay at the rank that has them, and tokens travel (``backends/fsdp/kept_experts.py``)."""
    router_replay: bool = False
    """Whether micro-batches may say which experts a mixture of experts is to take (``MicroBatch.routes``)."""
    load_balancing: bool = False
    """Whether the balance of the experts is measured; its weight in the loss is the ``LossSpec``'s."""
    parkable: bool = False
    """Whether the state will be parked (``parking.py``): on CUDA, tensors then keep their addresses while it is."""

    def as_json(self) -> str:
        """The spec as text, for another process that computes with it."""
        return msgspec.json.encode(self, enc_hook=str).decode()

    @staticmethod
    def from_json(text: str) -> BackendSpec:
        """Raises msgspec.DecodeError or TypeError when ``text`` is no spec."""
        return msgspec.json.decode(text, type=BackendSpec, dec_hook=lambda kind, value: kind(value))

    def learning_rate_of(self, step: int, peak: float | None = None) -> float:
        """Rate of the optimizer step number ``step``, from 0; ``peak``: a peak other than the policy's."""
        return learning_rate(
            step,
            peak=self.learning_rate if peak is None else peak,
            schedule=self.lr_schedule,
            warmup_steps=self.warmup_steps,
            total_steps=self.total_steps,
        )

    def adam_at(self, rate: float) -> AdamStep:
        """Hyper-parameters of a step with this learning rate, the others as the spec has them for every step."""
        first, second = self.adam_betas
        return AdamStep(
            learning_rate=rate,
            beta1=first,
            beta2=second,
            weight_decay=self.weight_decay,
            max_grad_norm=self.max_grad_norm,
        )

    def check_learn(self) -> None:
        """Raise CallRefused if ``TrainBackend.learn`` cannot be called: a critic would be left untrained."""
        if self.critic is not None:
            raise CallRefused("critic: explicit targets train the policy alone; start the backend without a critic")

    def check_adam(self, adam: AdamStep) -> None:
        """Check the hyper-parameters of one step.

        Raises:
            CallRefused: another optimizer than AdamW, or a critic, is trained; or a number is out of its range.
        """
        self.check_learn()
        if self.optimizer != "adamw":
            raise CallRefused(
                f"adam: hyper-parameters of AdamW cannot be those of {self.optimizer}, which trains this model; leave "
                "them out, or begin a model with adamw"
            )
        for name, (least, most) in _ADAM_RANGES.items():
            value = getattr(adam, name)
            if not least <= value <= most:  # nor NaN
                raise CallRefused(f"adam.{name}: {value!r}, expected a number from {least:g} to {most:g}")

    def trains_critic_alone(self, step: int) -> bool:
        """Whether the step number ``step``, from 0, leaves the policy as it is."""
        return self.critic is not None and step < self.critic.warmup_steps


_ADAM_RANGES: Final = {
    "learning_rate": (0.0, 100.0),  # a step moves each weight by about as much
    "beta1": (0.0, 1.0 - 1e-7),
    "beta2": (0.0, 1.0 - 1e-7),
    "eps": (1e-30, 1.0),  # less is 0 in float32, and a weight without gradient would become NaN
    "weight_decay": (0.0, 1e6),
    "max_grad_norm": (0.0, 1e30),
}
"""Least and largest value of each field of AdamStep."""
LOOPBACK: Final = "127.0.0.1"
"""Address of a leader for followers on its own machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LedRanks:
    """Says with which further ranks a backend computes; by default with none."""

    followers: Followers = NOBODY
    limits: Limits = DEFAULT_LIMITS
    replicas: int = 1
    """Copies of the weights, each sharded over its share of the ranks."""
    context: int = 1
    """Ranks that share each row."""
    offload: bool = False
    """Whether weights and moments are kept in the CPU's memory."""
    host: str = LOOPBACK
    """Address by which the followers reach this machine."""


ALONE: Final = LedRanks()


class TrainBackend(Protocol):
    kind: str
    is_shared: bool
    """Whether calls wait for those of other jobs, at a training service. If so, the trainer's process is ready before
    the backend has started, and the service keeps the limit of each call, without counting the wait."""

    def connect(self, ctx: Context) -> None:
        """Use ``ctx``, the trainer's, to reach other processes."""
        ...

    async def start(self, spec: BackendSpec, *, checkpoint_step: int = 0) -> int | None:
        """Load the model. ``checkpoint_step``: steps in the newest checkpoint.

        Returns:
            Steps of the job's state that the backend had kept and goes on from, more than ``checkpoint_step``; or None.
        """
        ...

    def heard(self, message: Down) -> None:
        """Note that the ctx has lost a process. Raises, here or in a task of the ctx, if the backend needs that."""
        ...

    def committed(self, steps: int) -> None:
        """Note that the job has committed so many steps: its trainer's next life may go on from that state."""
        ...

    def taken_metrics(self) -> dict[str, float]:
        """Columns to add to a step's row, about the backend's work since the last call of this."""
        ...

    def stored_bytes(self) -> StoredBytes:
        """Sizes of a segment and of a checkpoint, known after ``start``."""
        ...

    async def score(self, batch: MicroBatch, *, temperature: float, reference: bool) -> np.ndarray:
        """Log-probabilities float32[B, T] of the tokens of ``batch`` under the current or the reference model."""
        ...

    async def values(self, batch: MicroBatch) -> np.ndarray:
        """The critic's value before each token, float32[B, T], 0 where no response token stands."""
        ...

    async def accumulate(self, batch: MicroBatch, loss: LossSpec) -> MicroBatchStats:
        """Forward, backward, add to the gradient sums. Statistics that only a device knows come with ``step``."""
        ...

    async def learn(self, batch: MicroBatch, loss: LossSpec, *, backward: bool = True) -> Learned:
        """As ``accumulate``, and answer with the log-probability of every response token, also where the weight is 0,
        under the present weights. Waits for the device. Without ``backward`` nothing is added to the sums.

        Raises:
            CallRefused: a critic is trained.
        """
        ...

    async def drop_sums(self) -> None:
        """Forget what was accumulated since the last ``step``, whole or in part."""
        ...

    async def use_recompute(self, way: str) -> None:
        """Let activations come to the backward pass in that way from now on (``BackendSpec.recompute`` is ``auto``)."""
        ...

    async def measure(self, batch: MicroBatch, loss: LossSpec) -> MemoryUse | None:
        """Compute as ``accumulate`` does, drop the sums, and tell what memory that took; None: nobody can tell."""
        ...

    async def step(self, *, weight: float, adam: AdamStep | None = None) -> StepResult:
        """Divide the gradient sums by ``weight``, clip, update, clear. ``adam``: as the spec says, if there is none.

        Raises:
            CallRefused: see ``BackendSpec.check_adam``.
        """
        ...

    async def export_segment(self, path: Path, *, job: str, policy_version: int, chunk_bytes: int) -> Manifest:
        """Lay the weights out in the file ``path`` (HF names, offsets aligned to 64 bytes) and describe them."""
        ...

    async def save(self, directory: Path) -> None: ...

    async def load(self, directory: Path, *, optimizer: bool = True) -> None:
        """Restore what ``save`` wrote. Without ``optimizer`` its state, the schedule and the step count begin anew."""
        ...

    async def export_checkpoint(self, directory: Path) -> None:
        """Write an HF directory that ``AutoModelForCausalLM.from_pretrained`` and vLLM load."""
        ...

    async def close(self, *, keep: bool = True) -> None:
        """End. ``keep``: the trainer's next life may go on from what was committed; else the job is over."""
        ...


class LocalBackend:
    """Answers as a backend that computes in its trainer's process, calls no other one, and keeps nothing."""

    is_shared = False

    def connect(self, ctx: Context) -> None:
        """Do nothing: there is no process to reach."""

    def heard(self, message: Down) -> None:
        """Do nothing: there is no process to lose."""

    def committed(self, steps: int) -> None:
        """Do nothing: the next life starts from a checkpoint."""

    def taken_metrics(self) -> dict[str, float]:
        return {}

    async def use_recompute(self, way: str) -> None:
        """Do nothing: no activations are kept."""

    async def measure(self, batch: MicroBatch, loss: LossSpec) -> MemoryUse | None:
        """Tell nothing."""
        return None

    async def settled(self) -> None:
        """Return: there are no ranks that could wait for each other after a failed call."""
