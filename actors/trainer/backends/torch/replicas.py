"""One micro-batch on several threads: each computes a share of it, with a replica that shares the weights.

    micro-batch ─ shares ─┬─▶ replica 0   forward ─ token losses ─ backward ─▶ its gradient sums ┐
                          └─▶ replica 1   forward ─ token losses ─ backward ─▶ its gradient sums ┴─ the step adds them

Torch splits each operation between threads that meet at its end, thousands of times in a step, and when one of them
has lost its core for a moment the others wait. Replicas meet once in a micro-batch. The price is a set of gradient
sums for each. On an accelerator, and with one thread, there is one replica, which is the model itself.

Invariants
- Which replica computes what depends on the micro-batch alone, and sums are added in the replicas' order: whichever is
  faster, the step is the same, bit for bit.
- While replicas compute, nothing writes the weights; ``accumulate`` returns, or raises, when all of them are done.
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

from actors.trainer.backend import NO_STATS, BackendSpec, Learned, LossSpec, MicroBatch, MicroBatchStats, summed
from actors.trainer.backends.torch.attention.context import ContextRanks
from actors.trainer.backends.torch.causal_lm import ResponseLogits, load_model, response_positions
from actors.trainer.backends.torch.device_sums import DeviceSums, on_device
from actors.trainer.backends.torch.flat import FlatParameters, GradientSums
from actors.trainer.backends.torch.flat_memory import flat_memory
from actors.trainer.learning.losses import TokenColumns, TokenLosses, token_losses
from actors.trainer.learning.own_functions import own_loss

R = TypeVar("R")

UNEVEN_MAX: Final = 1.25
"""Siblings stay together unless that makes the largest share more than this many times an even one."""


class Replica:
    """Holds one thread's model. Without ``sums`` gradients add up in the parameters' ``grad``."""

    def __init__(
        self, model: nn.Module, device: str, sums: GradientSums | None = None, ranks: ContextRanks | None = None
    ) -> None:
        self._device = device
        self.logits = ResponseLogits(model, device, sums, ranks)
        self._sums = sums
        self._stats = DeviceSums()

    def score(self, batch: MicroBatch, temperature: float) -> np.ndarray:
        return scored(self.logits, batch, temperature)

    def accumulate(self, batch: MicroBatch, loss: LossSpec, *, learn: bool = True) -> MicroBatchStats:
        """Add to the gradient sums, if ``learn``."""
        try:
            return self._accumulate(batch, loss, learn=learn)
        finally:
            self.logits.forget()

    def learn(self, batch: MicroBatch, loss: LossSpec, *, backward: bool) -> Learned:
        """Add to the gradient sums, if ``backward``, and tell the log-probabilities of all response tokens."""
        where = response_positions(batch)
        try:
            columns, losses = self._losses(batch, loss, where, learn=backward)
            weight = self._at(batch.loss_weight, where)
            total = torch.dot(torch.where(weight != 0, losses.loss, 0.0), weight)
            if backward:
                self._add_gradients(total)
        finally:
            self.logits.forget()
        logprobs = np.zeros(batch.input_ids.shape, np.float32)
        logprobs[where] = columns.new.detach().cpu().numpy()
        return Learned(logprobs=logprobs, loss_sum=float(total.detach()))

    def _losses(
        self, batch: MicroBatch, loss: LossSpec, where: np.ndarray, *, learn: bool
    ) -> tuple[TokenColumns, TokenLosses]:
        """What the model gives for the tokens at ``where`` bool[B, T], and their losses."""
        with torch.set_grad_enabled(learn):
            predicted = self.logits(batch, where)
            new, entropy = predicted.logprobs(loss.temperature, learns_entropy=loss.entropy_coefficient > 0)
        columns = TokenColumns(
            new=new,
            engine=self._at(batch.behaviour_logprobs, where),
            advantages=self._at(batch.advantages, where),
            stale=torch.ones_like(new, dtype=torch.bool) if batch.stale is None else self._at(batch.stale, where),
            where=on_device(where, self._device),
            old=None if batch.old_logprobs is None else self._at(batch.old_logprobs, where),
            reference=None if batch.reference_logprobs is None else self._at(batch.reference_logprobs, where),
            entropy=entropy,
            ratio_mask=None if batch.ratio_mask is None else self._at(batch.ratio_mask, where),
        )
        with torch.set_grad_enabled(learn):
            return columns, token_losses(columns, loss, own_loss(loss.function) if loss.function else None)

    def _add_gradients(self, total: Tensor) -> None:
        total.backward()  # type: ignore[no-untyped-call]
        if self._sums is not None:
            self._sums.collect()

    def _accumulate(self, batch: MicroBatch, loss: LossSpec, *, learn: bool) -> MicroBatchStats:
        where = batch.loss_weight != 0
        columns, losses = self._losses(batch, loss, where, learn=learn)
        assert columns.entropy is not None
        weight = self._at(batch.loss_weight, where)
        total = torch.dot(losses.loss, weight)
        imbalance = weight.new_zeros(())
        if self.logits.experts is not None and loss.load_balancing is not None:
            with torch.set_grad_enabled(learn and loss.load_balancing > 0):
                balance = self.logits.experts.balance()
            total = total + loss.load_balancing * weight.sum() * balance
            imbalance = balance.detach() / self.logits.experts.top_k * len(weight)
        if learn:
            self._add_gradients(total)
        older = np.broadcast_to(batch.older_rows[:, None], where.shape)
        of_older = losses.mismatch * self._at(older, where)
        self._stats.add(
            loss_sum=total,
            clipped_sum=losses.clipped.sum(),
            cut_sum=losses.cut.sum(),
            kl_sum=losses.kl.sum(),
            entropy_sum=columns.entropy.sum(),
            mismatch_sum=losses.mismatch.sum(),
            older_mismatch_sum=of_older.sum(),
            imbalance_sum=imbalance,
        )
        return dataclasses.replace(
            NO_STATS,
            tokens=int(where.sum()),
            weight=float(batch.loss_weight.sum(dtype=np.float64)),
            older_tokens=int((where & older).sum()),
        )

    def taken_stats(self) -> MicroBatchStats:
        return self._stats.taken()

    def _at(self, column: np.ndarray, where: np.ndarray) -> Tensor:
        return on_device(column[where], self._device)


class Member(Protocol):
    """One thread's model, of the policy or of a critic."""

    logits: ResponseLogits

    def score(self, batch: MicroBatch, temperature: float) -> np.ndarray: ...

    def accumulate(self, batch: MicroBatch, loss: LossSpec, *, learn: bool = True) -> MicroBatchStats: ...

    def taken_stats(self) -> MicroBatchStats:
        """What the device has summed up since this was last called; waits for it."""
        ...


class Replicas:
    """Holds a spec's model, once for each thread that computes a share. Calls come from one thread.

    ``model``: the first one, whose weights the others share. ``load`` and ``member`` make it, by default as a policy.
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
        """Forward, and if ``learn`` backward: add to the gradient sums."""
        rows = shares(batch, len(self.members))
        return summed(self._on_each(lambda replica, part: replica.accumulate(part, loss, learn=learn), batch, rows))

    def learn(self, batch: MicroBatch, loss: LossSpec, *, backward: bool) -> Learned:
        """See ``Replica.learn``; the members are a policy's."""
        rows = shares(batch, len(self.members))
        return learned_of(batch, rows, self._on_each(partial(learn, loss=loss, backward=backward), batch, rows))

    def taken_stats(self) -> MicroBatchStats:
        return summed([member.taken_stats() for member in self.members])

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


def learn(member: Member, batch: MicroBatch, loss: LossSpec, *, backward: bool) -> Learned:
    """See ``Replica.learn``; the member is a policy's."""
    assert isinstance(member, Replica), "a critic learns no targets"
    return member.learn(batch, loss, backward=backward)


def learned_of(batch: MicroBatch, rows: list[slice], parts: list[Learned]) -> Learned:
    """The answer for ``batch``, from those for its ``rows``."""
    logprobs = np.zeros(batch.input_ids.shape, np.float32)
    for own, part in zip(rows, parts, strict=False):
        logprobs[own, : part.logprobs.shape[1]] = part.logprobs
    return Learned(logprobs=logprobs, loss_sum=sum(part.loss_sum for part in parts))


def scored(logits: ResponseLogits, batch: MicroBatch, temperature: float) -> np.ndarray:
    """Log-probabilities float32[B, T] of the response tokens of ``batch`` under one model."""
    where = response_positions(batch)
    result = np.zeros(batch.input_ids.shape, dtype=np.float32)
    try:
        with torch.no_grad():
            result[where] = logits(batch, where).logprobs(temperature)[0].cpu().numpy()
    finally:
        logits.forget()
    return result


def shares(batch: MicroBatch, count: int) -> list[slice]:
    """Cut the rows of ``batch`` into at most ``count`` runs of about equal work, if possible not between siblings.

    Neighbours with equal prompts are siblings; tokens that a row shares with the one before count as no work, since the
    layout may compute them once (``packing``).
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
    """int[B]: how many first tokens a row has in common with the row before; 0 if that is no sibling."""
    ids, prompts = batch.input_ids, batch.prompt_lengths
    alike = np.cumprod(ids[1:] == ids[:-1], axis=1).sum(1)
    alike = np.minimum(alike, np.minimum(batch.lengths[1:], batch.lengths[:-1]) - 1)  # the last token predicts nothing
    siblings = (prompts[1:] == prompts[:-1]) & (alike >= prompts[1:])
    return np.concatenate([[0], np.where(siblings, alike, 0)])


def _cuts(work: np.ndarray, places: list[int], count: int) -> list[slice]:
    """Cut at the ``places`` that come nearest to even shares."""
    before = np.concatenate([[0], np.cumsum(work)])
    ideal = before[-1] * np.arange(1, count) / count
    nearest = np.abs(before[places][:, None] - ideal).argmin(0)
    edges = sorted({0, len(work), *(places[index] for index in nearest.tolist())})
    return [slice(start, end) for start, end in pairwise(edges)]


def rows_of(batch: MicroBatch, rows: slice) -> MicroBatch:
    """The given rows of ``batch``, as wide as the longest of them."""
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
        targets=part_of(batch.targets),
        ratio_mask=part_of(batch.ratio_mask),
        routes=part_of(batch.routes),
    )
