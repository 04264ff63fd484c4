"""The scheduler's side of length ranking: what the predictor learns from, and how right it was.

    batch issued ──▶ keys of its prompts ──▶ (learned) ScorePrompts ──▶ ranker
    dispatch     ──▶ ``expected`` of what is queued ──▶ longest first
    handed out   ──▶ what was expected then is noted
    committed    ──▶ predictor and ranker observe; the notes against the lengths are the step's recall, and the past
                     from which ``long_lanes`` decides how many workers to dedicate

Invariants
- All of it may be lost: a restarted head learns again from what the journal still holds, and uses medians otherwise.
- Recall measures the predictions with which samples were first handed out, since later ones have ordered nothing.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from actors.ledger.batch import SampleState, StepBatch
from actors.ledger.ledger import Ledger
from actors.policies.assigning.dispatch_long import Past
from actors.policies.lengths.length_predictor import (
    ALPHA,
    LearnedLengths,
    LengthHistory,
    LengthOfSiblings,
    LengthPredictor,
    PromptsView,
    mean_lengths,
    prompt_keys,
    recall_of_longest,
)
from actors.protocol.evaluations import is_evaluation
from actors.protocol.lengths import LengthScores, ObserveLengths, ScorePrompts
from configs.limits import Limits

FRACTIONS = {"length_recall_20": 0.20, "length_recall_10": 0.10, "length_recall_5": 0.05}
"""Metric → fraction of the samples that counts as the longest (StreamRL Table 4)."""


def make_predictor(kind: str, limits: Limits, *, newest_epoch_only: bool = False) -> LengthPredictor | None:
    """The predictor that ``rollout.length_ranking`` names; None for ``none``.

    ``newest_epoch_only``: the history holds only the newest training epoch. A plan needs lengths that are up to date
    more than an order of prompts that is steady.
    """
    match kind:
        case "none":
            return None
        case "history":
            return LengthHistory(limits.length_prompts, alpha=1.0 if newest_epoch_only else ALPHA)
        case "siblings":
            return LengthOfSiblings()
        case "learned":
            return LearnedLengths(limits.length_prompts)
        case _:
            raise ValueError(f"rollout.length_ranking: {kind!r}, expected none, history, siblings or learned")


REMEMBERED = 3
"""Steps whose predicted and actual lengths are kept, since a single step tells too little."""


class LengthRanking:
    """The ranking orders one job's prompts by length. Without a predictor its answers are empty; it keeps nothing."""

    def __init__(self, job: str, predictor: LengthPredictor | None) -> None:
        self._job = job
        self._predictor = predictor
        self._keys: dict[int, np.ndarray] = {}
        self._noted: dict[int, np.ndarray] = {}
        self.past: deque[Past] = deque(maxlen=REMEMBERED)
        """Predicted and actual lengths of the newest committed steps."""

    @property
    def active(self) -> bool:
        """Whether there is a predictor."""
        return self._predictor is not None

    @property
    def probes(self) -> int:
        return self._predictor.probes if self._predictor is not None else 0

    def restore(self, ledger: Ledger) -> None:
        """Learn from steps that a former life of the head has committed, as far as the journal still holds them."""
        for step in sorted(ledger.batches):
            if ledger.batches[step].committed:
                self.committed(ledger.batches[step])

    # ------------------------------------------------------------ what is expected

    def expected(self, batch: StepBatch, indices: np.ndarray) -> np.ndarray:
        """float64[n] tokens expected of a sample of each of the prompts ``indices``; NaN where nothing is known."""
        if self._predictor is None or is_evaluation(batch.step):  # nothing is learned from those
            return np.full(len(indices), np.nan)
        return self._predictor.expected(self._view(batch, indices))

    def left(self, batch: StepBatch, rows: np.ndarray) -> np.ndarray:
        """int64[n] tokens that samples which have begun probably still need.

        A sample that is longer than predicted, or has no prediction, is taken to need as many tokens again as it has,
        as in a heavy-tailed distribution.
        """
        has = batch.length[rows].astype(np.float64)
        left = np.nan_to_num(self.expected(batch, rows // batch.group_size)) - has
        most = np.maximum(1.0, batch.sampling.max_tokens - has)
        return np.clip(np.where(left > 0, left, has), 1.0, most).astype(np.int64)

    def note(self, batch: StepBatch, rows: np.ndarray) -> None:
        """``rows`` are being handed out: keep the predictions for those that have not been handed out before."""
        if self._predictor is not None and not is_evaluation(batch.step):
            noted = self._noted.setdefault(batch.step, np.full(len(batch), np.nan))
            fresh = rows[batch.attempts[rows] == 0]
            noted[fresh] = self.expected(batch, fresh // batch.group_size)

    def _view(self, batch: StepBatch, indices: np.ndarray) -> PromptsView:
        shape = (-1, batch.group_size)
        states = batch.state.reshape(shape)[indices]  # select first, since few of very many prompts are asked about
        finished = (states >= SampleState.FINISHED) & (states != SampleState.DROPPED)
        keys = self._keys.get(batch.step)
        if keys is None:
            keys = prompt_keys(batch.prompt_ids)
            if not batch.committed:  # nothing is kept of a step that is over
                self._keys[batch.step] = keys
        return PromptsView(keys[indices], batch.length.reshape(shape)[indices], finished)

    # ------------------------------------------------------------ what came of it

    def committed(self, batch: StepBatch) -> dict[str, float]:
        """Learn from a committed batch, and forget its notes; returns the step's metrics."""
        if self._predictor is None:
            return {}
        self._predictor.observe(self._whole(batch))
        self._keys.pop(batch.step, None)
        return self._recall(batch, self._noted.pop(batch.step, None))

    def _whole(self, batch: StepBatch) -> PromptsView:
        return self._view(batch, np.arange(len(batch.prompts)))

    def _recall(self, batch: StepBatch, noted: np.ndarray | None) -> dict[str, float]:
        used = batch.state == SampleState.COMMITTED
        if noted is None or not used.any():
            return {}
        predicted, actual = noted[used], batch.length[used].astype(np.float64)
        known = ~np.isnan(predicted)
        median = float(np.median(predicted[known])) if known.any() else 0.0
        filled = np.where(known, predicted, median)
        if known.any():
            self.past.append(Past(filled, actual))
        recall = {name: recall_of_longest(filled, actual, part) for name, part in FRACTIONS.items()}
        return recall | {"length_known_fraction": float(known.mean())}

    # ------------------------------------------------------------ the ranker

    def scored(self, news: LengthScores) -> None:
        """Pass scores from the ranker to a learned predictor; others ignore them."""
        if isinstance(self._predictor, LearnedLengths):
            self._predictor.learn(news.keys, news.scores)

    def question(self, batch: StepBatch) -> ScorePrompts | None:
        """The question to the ranker when ``batch`` is issued; None if no learned predictor is used."""
        if not isinstance(self._predictor, LearnedLengths):
            return None
        keys, lengths, ids = self._prompts(batch)
        return ScorePrompts(job=self._job, step=batch.step, keys=keys, prompt_lengths=lengths, prompt_ids=ids)

    def lesson(self, batch: StepBatch) -> ObserveLengths | None:
        """The message from which the ranker learns about a committed batch; None if no learned predictor is used."""
        if not isinstance(self._predictor, LearnedLengths):
            return None
        means = mean_lengths(self._whole(batch))
        keys, lengths, ids = self._prompts(batch, ~np.isnan(means))
        return ObserveLengths(
            job=self._job, step=batch.step, keys=keys, prompt_lengths=lengths, prompt_ids=ids,
            response_tokens=means[~np.isnan(means)],
        )  # fmt: skip

    def _prompts(self, batch: StepBatch, which: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(keys uint64[p], lengths int32[p], ids int32[sum]) of the prompts of ``batch``, or of those in the mask."""
        indices = np.arange(len(batch.prompts)) if which is None else np.flatnonzero(which)
        chosen = [batch.prompt_ids[i] for i in indices.tolist()]
        lengths = np.array([len(ids) for ids in chosen], np.int32)
        return self._view(batch, indices).keys, lengths, np.concatenate([np.empty(0, np.int32), *chosen])
