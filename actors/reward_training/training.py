"""Bradley–Terry: a model's logits r learn to rank pairs, by the loss -log σ(r_chosen - r_rejected).

    pairs ─▶ ids, once ─▶ epochs in an order drawn from the seed ─▶ steps of batch_pairs ───▶ batches by tokens
                                                                                               │ gradients added
    held out ─▶ accuracy, live on some and at the end on all ◀── AdamW: up for a tenth, then down to 0

The loss is that of Ouyang et al. 2022 (InstructGPT, eq. 1) with K = 2, after Bradley and Terry 1952; Stiennon et al.
2020 use the same. The accuracy is the share of held-out pairs with r_chosen > r_rejected: a tie counts as wrong.

Invariants
- Equal seeds give equal models, on a CPU with equal threads.
- Held-out pairs are used for the accuracy alone.
- The accuracy at the end is that of the model as it is written, in the number format of its files.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from actors.environments.errors import ScorerBroken
from actors.environments.scoring.reward_text import token_batches
from actors.host.user_code import described
from actors.reward_training.backbone import Backbone
from actors.reward_training.errors import CannotTrain, TrainingFailed
from actors.reward_training.preferences import Pair
from configs.reward_training import RewardTraining

_BETAS = (0.9, 0.98)
_CLIPPED_NORM = 1.0
"""The gradient is scaled down to this norm."""
_RISING = 0.1
"""Share of the steps in which the learning rate rises."""
_LOOKS = 10
"""Number of times that the accuracy is measured in the course of a training."""
_LIVE_PAIRS = 256
"""Held-out pairs of such a measurement: enough for a standard error of about 3 %, and quick."""

Ids = np.ndarray
"""int32[tokens] of one text."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """Holds pairs as token ids."""

    pairs: list[tuple[Ids, Ids]]
    cut: int
    """Number of texts that are longer than the model reads: each has lost its beginning."""
    alike: int
    """Number of pairs that were left out, since the model would read the same text twice."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Tells how far a training is."""

    step: int
    steps: int
    loss: float
    accuracy: float | None
    """Held-out accuracy; None where it was not measured."""


def encode(pairs: Sequence[Pair], backbone: Backbone) -> Encoded:
    """Token ids of all texts.

    Raises:
        CannotTrain: the template or the tokenizer refuses one, or a token is beyond the model's vocabulary.
    """
    found: list[tuple[Ids, Ids]] = []
    cut = alike = 0
    for pair in pairs:
        both: list[Ids] = []
        for read in pair.read(backbone.text):
            try:
                ids, was_cut = backbone.text.ids(read)
            except ScorerBroken as error:
                raise CannotTrain(
                    f"{pair.where}: one of its texts cannot be read: {error}; leave the row out"
                ) from error
            except Exception as error:  # a template is a program, so it can raise anything
                raise CannotTrain(
                    f"{pair.where}: the model's tokenizer or template refuses it: {described(error)}"
                ) from error
            both.append(np.array(ids, np.int32))
            cut += was_cut
        if np.array_equal(both[0], both[1]):
            alike += 1
        else:
            found.append((both[0], both[1]))
    return Encoded(found, cut, alike)


class RewardTrainer:
    """Trains one model, step by step."""

    def __init__(self, backbone: Backbone, train: Encoded, held_out: Encoded, how: RewardTraining, seed: int) -> None:
        self._backbone = backbone
        self._train, self._held_out = train.pairs, held_out.pairs
        self._how = how
        self.steps = how.steps or math.ceil(len(self._train) * how.epochs / how.batch_pairs)
        self._order = self._endlessly(random.Random(f"headrace reward training {seed}"))
        parameters: Any = backbone.model.parameters()
        self._optimizer = torch.optim.AdamW(parameters, how.lr, betas=_BETAS, weight_decay=0.0)

    def _endlessly(self, draw: random.Random) -> Iterator[tuple[Ids, Ids]]:
        while True:
            yield from draw.sample(self._train, len(self._train))

    def run(self, tell: Callable[[Progress], None]) -> list[float]:
        """Run all steps; returns the loss of each.

        Raises:
            TrainingFailed: a loss or gradient is not finite.
        """
        losses: list[float] = []
        every = max(1, self.steps // _LOOKS)
        for step in range(self.steps):
            losses.append(self._step(step))
            looks = (step + 1) % every == 0 and step + 1 < self.steps
            accuracy = self.accuracy(self._held_out[:_LIVE_PAIRS]) if looks else None
            tell(Progress(step + 1, self.steps, losses[-1], accuracy))
        return losses

    def _step(self, step: int) -> float:
        pairs = [next(self._order) for _ in range(min(self._how.batch_pairs, len(self._train)))]
        total = 0.0
        for rows in _batches(pairs, self._how.batch_tokens):
            chosen, rejected = self._logits([pairs[i] for i in rows])
            loss = -torch.nn.functional.logsigmoid(chosen - rejected).sum() / len(pairs)
            loss.backward()
            total += loss.item()
        parameters = [one for one in self._backbone.model.parameters() if one.grad is not None]
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, _CLIPPED_NORM))
        if not math.isfinite(total) or not math.isfinite(norm):
            raise TrainingFailed(
                f"the loss is {total:g} and its gradient {norm:g} at step {step + 1} of {self.steps}: lower the "
                f"learning rate (lr {self._how.lr:g}), and look whether the model's own weights are numbers"
            )
        for group in self._optimizer.param_groups:
            group["lr"] = self._how.lr * _share_of_rate(step, self.steps)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return total

    def _logits(self, pairs: Sequence[tuple[Ids, Ids]]) -> tuple[torch.Tensor, ...]:
        """Logits float32[len(pairs)] of the chosen and of the rejected texts, computed as one batch."""
        with self._backbone.computing():
            logits = self._backbone.text.logits([pair[side].tolist() for side in (0, 1) for pair in pairs])
        return logits.float().chunk(2)

    def accuracy(self, pairs: Sequence[tuple[Ids, Ids]] | None = None) -> float:
        """Share of ``pairs`` that are ranked right; by default of all held-out pairs."""
        return share_ranked_right(self.rewards(self._held_out if pairs is None else pairs))

    def rewards(self, pairs: Sequence[tuple[Ids, Ids]] | None = None) -> list[tuple[float, float]]:
        """The logits (chosen, rejected) of each of ``pairs``, by default of all held-out pairs."""
        pairs = self._held_out if pairs is None else pairs
        found = [(math.nan, math.nan)] * len(pairs)
        for rows in _batches(pairs, self._how.batch_tokens):
            with torch.inference_mode():
                chosen, rejected = self._logits([pairs[i] for i in rows])
            for i, *two in zip(rows, chosen.tolist(), rejected.tolist(), strict=True):
                found[i] = (two[0], two[1])
        return found


def share_ranked_right(rewards: Sequence[tuple[float, float]]) -> float:
    return statistics.fmean(chosen > rejected for chosen, rejected in rewards)


def _batches(pairs: Sequence[tuple[Ids, Ids]], tokens_max: int) -> Iterator[list[int]]:
    """Indices of pairs of similar length, by batch; both texts of a pair are in one, since the loss needs both."""
    return token_batches({i: 2 * max(map(len, pair)) for i, pair in enumerate(pairs)}, tokens_max)


def _share_of_rate(step: int, steps: int) -> float:
    rising = max(1, round(_RISING * steps))
    return (step + 1) / rising if step < rising else (steps - step) / (steps - rising + 1)
