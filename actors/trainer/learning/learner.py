"""A model that somebody else's program trains, call by call: sums of gradients over any calls, and then a step.

    forward_backward* ─ checked ─ cut ─▶ TrainBackend.learn* ─▶ log-probabilities, loss        optim_step ─▶ step
           └─ the call fails in the middle ─▶ sums dropped ─▶ those of the calls before it computed again

Always true
- Gradients are sums over all calls since the last step, and nothing is divided: two calls are as one with the datums of
  both, beyond rounding.
- A call counts whole or not at all. One that is refused was never begun; one that has failed or was cancelled is undone
  before the next call, by computing the micro-batches of the calls before it once more.
- Micro-batches become half as large when the device finds no memory for one, and stay so.
- Calls come one after another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from actors.protocol.datums import Datum
from actors.protocol.training import AdamStep, Learned, LossSpec, MicroBatch
from actors.trainer.backend import TrainBackend
from actors.trainer.errors import CallRefused, OutOfMemory
from actors.trainer.learning.datum_batches import DatumBatch, check_datums, cut_datums, explicit_loss, logprobs_of


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnedDatums:
    """Holds what one call has computed, under the weights of its time."""

    logprobs: list[np.ndarray]
    """Log-probabilities of each datum's targets, float32 of their shape, in the order of the datums."""
    metrics: dict[str, float]
    """Numbers of the whole call by name and reduction; ``loss:sum`` is there always."""


class Learner:
    """Trains the policy of a started backend. It is the only one to call it.

    Args:
        vocabulary: number of token ids of the model.
        context_tokens: length of its longest inputs.
        budget_tokens: padded tokens of one micro-batch at most.
    """

    def __init__(self, backend: TrainBackend, *, vocabulary: int, context_tokens: int, budget_tokens: int) -> None:
        self._backend = backend
        self._vocabulary, self._context_tokens = vocabulary, context_tokens
        self.budget_tokens = budget_tokens
        """Padded tokens of one micro-batch now."""
        self._since_step: list[tuple[MicroBatch, LossSpec]] = []
        """What the gradient sums consist of."""
        self._is_void = False
        """Whether the backend's sums may be others than those of ``_since_step``."""

    async def forward_backward(
        self, datums: Sequence[Datum], loss: str, parameters: Mapping[str, float] | None = None, *,
        forward_only: bool = False,
    ) -> LearnedDatums:  # fmt: skip
        """Compute a loss of ``EXPLICIT_LOSSES``, and unless ``forward_only`` add its gradients to the sums.

        Raises:
            CallRefused: the loss, a parameter or a datum is not what was expected, or a datum alone finds no memory.
        """
        spec = explicit_loss(loss, parameters or {})
        check_datums(datums, loss, vocabulary=self._vocabulary, context_tokens=self._context_tokens)
        await self._make_sums_whole()
        while True:
            parts = cut_datums(datums, loss, budget_tokens=self.budget_tokens)
            self._is_void = True
            try:
                answers = [await self._backend.learn(part.batch, spec, backward=not forward_only) for part in parts]
                break
            except OutOfMemory as error:
                await self._make_sums_whole()
                self._make_smaller(parts, error)
        self._is_void = False
        if not forward_only:
            self._since_step += [(part.batch, spec) for part in parts]
        return _told(datums, parts, answers)

    def _make_smaller(self, parts: Sequence[DatumBatch], error: OutOfMemory) -> None:
        """Let micro-batches be at most half of the largest of ``parts``."""
        if all(len(part.places) == 1 for part in parts):
            longest = max(part.batch.input_ids.shape[1] for part in parts) - 1
            raise CallRefused(
                f"datums: the longest has {longest} tokens, for which there is no memory even alone; send shorter ones"
            ) from error
        self.budget_tokens = max(1, max(part.batch.input_ids.size for part in parts if len(part.places) > 1) // 2)

    async def _make_sums_whole(self) -> None:
        """Let the gradient sums be those of all calls since the step that have succeeded."""
        if not self._is_void:
            return
        await self._backend.drop_sums()
        for batch, spec in self._since_step:
            await self._backend.learn(batch, spec)
        self._is_void = False

    async def optim_step(self, adam: AdamStep) -> dict[str, float]:
        """Take a step with the gradient sums, and begin new ones.

        Returns:
            ``grad_norm`` before clipping, ``learning_rate``, and ``skipped``: 1 if no step was taken, as the gradient
            was not finite; then ``grad_norm`` is not finite either, and the sums are gone as well.

        Raises:
            CallRefused: a hyper-parameter is out of its range, or the model has another optimizer than AdamW.
        """
        await self._make_sums_whole()
        result = await self._backend.step(weight=1.0, adam=adam)
        self._since_step = []
        return {
            "grad_norm": result.grad_norm,
            "learning_rate": result.learning_rate,
            "skipped": float(result.skipped),
        }

    async def save(self, directory: Path) -> None:
        """Write weights and optimizer. Gradient sums are not saved."""
        await self._backend.save(directory)

    async def load(self, directory: Path, *, optimizer: bool) -> None:
        """Read what ``save`` has written, and drop the gradient sums. Without ``optimizer`` its state begins anew.

        Raises:
            CheckpointCorrupt: the files are missing, altered, or of another model.
        """
        await self._backend.load(directory, optimizer=optimizer)
        self._since_step, self._is_void = [], False

    async def export(self, directory: Path) -> None:
        """Write the model for other programs: a Hugging Face directory, of an adapter a PEFT directory."""
        await self._backend.export_checkpoint(directory)


def _told(datums: Sequence[Datum], parts: Sequence[DatumBatch], answers: Sequence[Learned]) -> LearnedDatums:
    metrics = {"loss:sum": sum((answer.loss_sum for answer in answers), 0.0)}
    return LearnedDatums(logprobs=logprobs_of(datums, parts, answers), metrics=metrics)
