"""Log-probabilities of the reference model, which a KL term needs of every sample, whatever its advantage.

Always true
- A sample is scored once, and of the tokens it is trained with: scores of others are not used.
- With none known beforehand, samples are scored in the micro-batches that they are trained in: what repeats bit for
  bit without ``score_some`` still does.
- It holds one step's: tokens that came early, and 4 bytes for each token that is scored and not trained yet.

    EarlySamples ──offer──▶ waiting ──score_some──▶ known ─┐      while the trainer would wait (StreamRL 1.3)
    a window's samples ─────────────── the others scored ──┴─ scored ──▶ the window's samples, with their scores
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from actors.protocol.groups import EarlySamples
from actors.trainer.backend import MicroBatch
from actors.trainer.batching import TrainSample, pad, portions
from actors.trainer.errors import BadGrant

Key = tuple[int, int, int]
"""Prompt and sibling."""


class ReferenceScores:
    """Scores samples. ``score``: MicroBatch → float32[B, T], the reference model's log-probabilities of its tokens."""

    def __init__(self, score: Callable[[MicroBatch], Awaitable[np.ndarray]], *, budget_tokens: int) -> None:
        self._score = score
        self._budget_tokens = budget_tokens
        self._step = -1
        self._waiting: dict[Key, TrainSample] = {}
        self._known: dict[Key, tuple[np.ndarray, np.ndarray]] = {}
        """Tokens int32[t] and their scores float32[t]."""
        self.scored_early_tokens = 0
        """Tokens scored early in this step, prompts included."""

    def begin(self, step: int) -> None:
        """Forget all of the steps before; nothing of others is taken from now on."""
        self._step = step
        self._waiting.clear()
        self._known.clear()
        self.scored_early_tokens = 0

    def offer(self, message: EarlySamples) -> bool:
        """Take samples that may be scored before they are trained; whether there were any that are new.

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
        """Something was offered and has no scores yet."""
        return bool(self._waiting)

    async def score_some(self) -> None:
        """Score one micro-batch of what was offered, the longest first."""
        part = portions(self._waiting.values(), budget_tokens=self._budget_tokens)[0]
        await self._note(part)
        self.scored_early_tokens += sum(sample.length for sample in part)

    async def scored(self, samples: Sequence[TrainSample]) -> list[TrainSample]:
        """The same samples with their scores, which are forgotten here; those without a response as they are."""
        missing = [sample for sample in samples if sample.tokens.size and not self._is_known(sample)]
        for part in portions(missing, budget_tokens=self._budget_tokens):
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
    """A sample as far as it can be scored: who generated it and what it is worth play no part in that."""
    nothing = np.zeros(tokens.size, np.float32)
    return TrainSample(
        prompt=prompt, sibling=sibling, prompt_ids=prompt_ids, tokens=tokens, logprobs=nothing,
        stale=nothing.astype(np.bool_), advantage=0.0,
    )  # fmt: skip
