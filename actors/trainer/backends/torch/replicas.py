"""One micro-batch on several threads: each computes a share of it, with a replica that has the weights in common.

    micro-batch ─ shares ─┬─▶ replica 0   forward ─ token losses ─ backward ─▶ its gradient sums ┐
                          └─▶ replica 1   forward ─ token losses ─ backward ─▶ its gradient sums ┴─ the step adds them

Torch shares an operation out between threads that meet at its end, thousands of times in a step, and where one of them
has lost its core for a moment the others wait. Replicas meet once in a micro-batch. The price is a second set of
gradient sums. On an accelerator, and with one thread, there is one replica, which is the model itself.

Invariants
- Which replica computes what depends on the micro-batch alone, and sums are added in the replicas' order: whichever is
  faster, the step is the same, bit for bit.
- While replicas compute, nobody writes the weights; ``accumulate`` returns, or raises, when all of them rest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from itertools import pairwise
from typing import Final, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from actors.trainer.backend import BackendSpec, LossSpec, MicroBatch, MicroBatchStats
from actors.trainer.backends.torch.causal_lm import ResponseLogits, load_model, response_positions
from actors.trainer.backends.torch.flat import FlatParameters, GradientSums
from actors.trainer.backends.torch.flat_memory import flat_memory
from actors.trainer.losses import TokenColumns, token_losses
from actors.trainer.own_functions import own_loss

R = TypeVar("R")

NO_STATS: Final = MicroBatchStats(
    tokens=0, weight=0.0, loss_sum=0.0, clipped_sum=0.0, kl_sum=0.0, entropy_sum=0.0, mismatch_sum=0.0
)
"""Those of no tokens at all."""

UNEVEN_MAX: Final = 1.25
"""Siblings stay together unless the largest share would so be this many times an even one."""


class Replica:
    """Holds one thread's model. Without ``sums`` gradients add up where the backward pass leaves them."""

    def __init__(self, model: nn.Module, device: str, sums: GradientSums | None = None) -> None:
        self._device = device
        self.logits = ResponseLogits(model, device)
        self._sums = sums

    def score(self, batch: MicroBatch, temperature: float) -> np.ndarray:
        return scored(self.logits, batch, temperature)

    def accumulate(self, batch: MicroBatch, loss: LossSpec, *, learn: bool = True) -> MicroBatchStats:
        """Add to the gradient sums, if it is to ``learn``."""
        where = batch.loss_weight != 0
        with torch.set_grad_enabled(learn):
            predicted = self.logits(batch, where)
            new, entropy = predicted.logprobs(loss.temperature, learns_entropy=loss.entropy_coefficient > 0)
        columns = TokenColumns(
            new=new,
            engine=self._at(batch.behaviour_logprobs, where),
            advantages=self._at(batch.advantages, where),
            stale=torch.ones_like(new, dtype=torch.bool) if batch.stale is None else self._at(batch.stale, where),
            where=torch.from_numpy(where).to(self._device),
            old=None if batch.old_logprobs is None else self._at(batch.old_logprobs, where),
            reference=None if batch.reference_logprobs is None else self._at(batch.reference_logprobs, where),
            entropy=entropy,
        )
        with torch.set_grad_enabled(learn):
            losses = token_losses(columns, loss, own_loss(loss.function) if loss.function else None)
        weight = self._at(batch.loss_weight, where)
        total = torch.dot(losses.loss, weight)
        if learn:
            total.backward()  # type: ignore[no-untyped-call]
            if self._sums is not None:
                self._sums.collect()
        measured = (losses.clipped, losses.cut, losses.kl, entropy.detach(), losses.mismatch)
        sums = torch.stack([weight.sum(), total.detach(), *(column.sum() for column in measured)]).tolist()
        return MicroBatchStats(
            tokens=int(where.sum()),
            weight=sums[0],
            loss_sum=sums[1],
            clipped_sum=sums[2],
            cut_sum=sums[3],
            kl_sum=sums[4],
            entropy_sum=sums[5],
            mismatch_sum=sums[6],
        )

    def _at(self, column: np.ndarray, where: np.ndarray) -> Tensor:
        return torch.from_numpy(column[where]).to(self._device)


class Member(Protocol):
    """One thread's model, be it the policy's or a critic's."""

    logits: ResponseLogits

    def score(self, batch: MicroBatch, temperature: float) -> np.ndarray: ...

    def accumulate(self, batch: MicroBatch, loss: LossSpec, *, learn: bool = True) -> MicroBatchStats: ...


class Replicas:
    """Holds the model of a spec, once for each thread that computes a share. Calls come from one thread.

    ``model``: the first one; the others have its weights. ``load`` and ``member`` make another model than the policy's.
    ``prefix`` and ``kind``: see ``FlatParameters``.
    """

    def __init__(
        self,
        spec: BackendSpec,
        load: Callable[[], nn.Module] | None = None,
        member: Callable[[nn.Module, str, GradientSums], Member] = Replica,
        *,
        prefix: str = "",
        kind: str = "",
    ) -> None:
        count = max(1, min(spec.replicas, spec.threads)) if spec.device == "cpu" else 1
        load = load or partial(load_model, spec.model_path, spec)
        self.model = load()
        device = next(self.model.parameters()).device
        memory = flat_memory(device, parkable=spec.parkable)
        self.parameters = FlatParameters(self.model, memory, prefix=prefix, kind=kind)
        self.members = [member(self.model, spec.device, self.parameters.sums[0])]
        for _ in range(count - 1):
            model = load()
            self.members.append(member(model, spec.device, self.parameters.attach(model)))
        least, more = divmod(spec.threads, count)
        self._threads = [
            ThreadPoolExecutor(1, f"replica-{index}", torch.set_num_threads, (least + (index < more),))
            for index in range(count if count > 1 else 0)
        ]

    def score(self, batch: MicroBatch, temperature: float) -> np.ndarray:
        """Log-probabilities float32[B, T] of the tokens of ``batch``, 0 where no response token stands."""
        result = np.zeros(batch.input_ids.shape, dtype=np.float32)
        rows = shares(batch, len(self.members))
        parts = self._on_each(lambda replica, part: replica.score(part, temperature), batch, rows)
        for part, scores in zip(rows, parts, strict=True):
            result[part, : scores.shape[1]] = scores
        return result

    def accumulate(self, batch: MicroBatch, loss: LossSpec, *, learn: bool = True) -> MicroBatchStats:
        """Forward, and if it is to ``learn`` backward: add to the gradient sums."""
        rows = shares(batch, len(self.members))
        return summed(self._on_each(lambda replica, part: replica.accumulate(part, loss, learn=learn), batch, rows))

    def _on_each(self, work: Callable[[Member, MicroBatch], R], batch: MicroBatch, rows: list[slice]) -> list[R]:
        if len(rows) == 1:
            return [work(self.members[0], batch)]
        futures = [
            thread.submit(work, replica, rows_of(batch, part))
            for thread, replica, part in zip(self._threads, self.members, rows, strict=False)
        ]
        wait(futures)
        return [future.result() for future in futures]

    def close(self) -> None:
        for thread in self._threads:
            thread.shutdown(wait=False)


def scored(logits: ResponseLogits, batch: MicroBatch, temperature: float) -> np.ndarray:
    """Log-probabilities float32[B, T] of the response tokens of ``batch`` under one model."""
    where = response_positions(batch)
    result = np.zeros(batch.input_ids.shape, dtype=np.float32)
    with torch.no_grad():
        result[where] = logits(batch, where).logprobs(temperature)[0].cpu().numpy()
    return result


def shares(batch: MicroBatch, count: int) -> list[slice]:
    """Cut the rows of ``batch`` into at most ``count`` runs of about equal work, if possible not between siblings.

    Neighbours with equal prompts are siblings; what a row has in common with the one before costs nothing, since the
    layout may compute it once (``packing``).
    """
    rows = len(batch.lengths)
    if count == 1 or rows == 1:
        return [slice(0, rows)]
    alike = _tokens_alike(batch)
    work = batch.lengths - alike
    cuts = _cuts(work, [0, *(np.flatnonzero(alike == 0)[1:].tolist()), rows], count)
    if max(work[part].sum() for part in cuts) > UNEVEN_MAX * work.sum() / count:
        cuts = _cuts(work, list(range(rows + 1)), count)
    return cuts


def _tokens_alike(batch: MicroBatch) -> np.ndarray:
    """int[B]: with how many tokens a row begins as its sibling before it does; 0 where that is none."""
    ids, prompts = batch.input_ids, batch.prompt_lengths
    alike = np.cumprod(ids[1:] == ids[:-1], axis=1).sum(1)
    alike = np.minimum(alike, np.minimum(batch.lengths[1:], batch.lengths[:-1]) - 1)  # the last one predicts nothing
    siblings = (prompts[1:] == prompts[:-1]) & (alike >= prompts[1:])
    return np.concatenate([[0], np.where(siblings, alike, 0)])


def _cuts(work: np.ndarray, places: list[int], count: int) -> list[slice]:
    """Cut at those of ``places`` that are nearest to even shares."""
    before = np.concatenate([[0], np.cumsum(work)])
    ideal = before[-1] * np.arange(1, count) / count
    nearest = np.abs(before[places][:, None] - ideal).argmin(0)
    edges = sorted({0, len(work), *(places[index] for index in nearest.tolist())})
    return [slice(start, end) for start, end in pairwise(edges)]


def rows_of(batch: MicroBatch, rows: slice) -> MicroBatch:
    """Those rows of ``batch``, as wide as the longest of them."""
    width = int(batch.lengths[rows].max())

    def part(column: np.ndarray) -> np.ndarray:
        return column[rows, :width]

    def part_of(column: np.ndarray | None) -> np.ndarray | None:
        return None if column is None else part(column)

    return MicroBatch(
        input_ids=part(batch.input_ids),
        lengths=batch.lengths[rows],
        prompt_lengths=batch.prompt_lengths[rows],
        behaviour_logprobs=part(batch.behaviour_logprobs),
        advantages=part(batch.advantages),
        loss_weight=part(batch.loss_weight),
        reference_logprobs=part_of(batch.reference_logprobs),
        old_logprobs=part_of(batch.old_logprobs),
        stale=part_of(batch.stale),
        old_values=part_of(batch.old_values),
        returns=part_of(batch.returns),
    )


def summed(parts: list[MicroBatchStats]) -> MicroBatchStats:
    """Sums of sums."""
    names = [field.name for field in dataclasses.fields(MicroBatchStats)]
    return MicroBatchStats(**{name: sum(getattr(part, name) for part in parts) for name in names})
