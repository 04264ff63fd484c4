"""Log-probabilities of the reference model, which a KL term needs of every sample, whatever its advantage.

Always true
- A sample is scored once, with the tokens it is trained with: scores of other tokens are not used.
- Without early scores, samples are scored in the micro-batches that they are trained in, so that results repeat bit
  for bit.
- Only one step is held: tokens that came early, and 4 bytes for each token that is scored and not trained yet.

    EarlySamples ──offer──▶ waiting ──score_some──▶ known ─┐      while the trainer would wait (StreamRL 1.3)
    a window's samples ──────────── the rest is scored ────┴─ scored ──▶ the window's samples, with their scores
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from actors.protocol.groups import EarlySamples
from actors.protocol.training import MicroBatch
from actors.trainer.errors import BadGrant
from actors.trainer.learning.samples import TrainSample, pad, portions

Key = tuple[int, int, int]
"""Prompt, sibling and context of a sample (``TrainSample.name``)."""


class ReferenceScores:
    """Scores samples. ``score``: MicroBatch → float32[B, T], the reference model's log-probabilities of its tokens."""

    def __init__(self, score: Callable[[MicroBatch], Awaitable[np.ndarray]], *, budget_tokens: int) -> None:
        self._score = score
        self.budget_tokens = budget_tokens
        """Padded tokens of a micro-batch."""
        self._step = -1
        self._waiting: dict[Key, TrainSample] = {}
        self._known: dict[Key, tuple[np.ndarray, np.ndarray]] = {}
        """Tokens int32[t] and their scores float32[t]."""
        self.scored_early_tokens = 0
        """Tokens scored early in this step, prompts included."""

    def begin(self, step: int) -> None:
        """Forget earlier steps, and take samples of ``step`` alone from now on."""
        self._step = step
        self._waiting.clear()
        self._known.clear()
        self.scored_early_tokens = 0

    def begin_again(self) -> None:
        """Forget the scores of this step: it is repeated in smaller micro-batches."""
        self._known.clear()

    def offer(self, message: EarlySamples) -> bool:
        """Take samples that may be scored before they are trained; returns whether any was new.

        Raises:
            BadGrant: the columns do not fit together.
        """
        if message.step != self._step:
            return False
        try:
            samples = [_unjudged(*columns) for columns in message.split()]
        except ValueError as error:
            raise BadGrant(str(error)) from error
        new = [sample for sample in samples if sample.tokens.size and not self._is_known(sample)]
        self._waiting.update({sample.name: sample for sample in new})
        return bool(new)

    @property
    def has_waiting(self) -> bool:
        """Whether offered samples are left without scores."""
        return bool(self._waiting)

    async def score_some(self) -> None:
        """Score one micro-batch of offered samples, the longest first."""
        part = portions(self._waiting.values(), budget_tokens=self.budget_tokens)[0]
        await self._note(part)
        self.scored_early_tokens += sum(sample.length for sample in part)

    async def scored(self, samples: Sequence[TrainSample]) -> list[TrainSample]:
        """The same samples with their scores, which are not kept here; those without a response as they are."""
        missing = [sample for sample in samples if sample.tokens.size and not self._is_known(sample)]
        for part in portions(missing, budget_tokens=self.budget_tokens):
            await self._note(part)
        return [self._with_scores(sample) for sample in samples]

    async def _note(self, part: Sequence[TrainSample]) -> None:
        scores = await self._score(pad(part))
        for row, sample in enumerate(part):
            response = scores[row, sample.prompt_ids.size : sample.length].copy()
            self._known[sample.name] = sample.tokens, response
            self._waiting.pop(sample.name, None)

    def _is_known(self, sample: TrainSample) -> bool:
        known = self._known.get(sample.name)
        return known is not None and np.array_equal(known[0], sample.tokens)

    def _with_scores(self, sample: TrainSample) -> TrainSample:
        known = self._known.pop(sample.name, None)
        return sample if known is None else dataclasses.replace(sample, reference_logprobs=known[1])


def _unjudged(prompt: int, sibling: int, prompt_ids: np.ndarray, tokens: np.ndarray) -> TrainSample:
    """A sample with what scoring needs: neither log-probabilities nor advantage."""
    nothing = np.zeros(tokens.size, np.float32)
    return TrainSample(
        prompt=prompt, sibling=sibling, prompt_ids=prompt_ids, tokens=tokens, logprobs=nothing,
        stale=nothing.astype(np.bool_), advantage=0.0,
    )  # fmt: skip
