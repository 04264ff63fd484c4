"""How long will the responses to a prompt be? One protocol, three kinds (StreamRL, arXiv 2504.15930, section 1.5).

    history    the same prompt in earlier epochs           LengthHistory
    siblings   what its own group has come to so far       LengthOfSiblings
    learned    a small model, fine-tuned beside the run    LearnedLengths, actors/ranker

Beside them: ``LengthHints`` for prompts that nobody has answered yet, the order of hand-outs (``longest_first``), and
how good a ranking was (``recall_of_longest``).

Only the order counts: samples are handed out in descending expected length, so a predictor that is wrong by a constant
factor is as good as a right one.

Invariants
- A predictor is a fold over what it was told: no clock, no I/O, no randomness; equal news give equal answers.
- It answers at once, with NaN for a prompt of which it knows nothing: nobody waits for a prediction, and such a prompt
  is sorted as the median.
- Predictions change the order of hand-outs and nothing else. A sample's tokens are a function of (seed, prompt,
  sibling, position), so no prediction can change them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import xxhash


@dataclass(frozen=True, slots=True)
class PromptsView:
    """Holds p prompts of one batch, and the lengths that their g samples each have reached."""

    keys: np.ndarray  # uint64[p]: equal prompts have equal keys, in every epoch
    lengths: np.ndarray  # int32[p, g] response tokens so far
    finished: np.ndarray  # bool[p, g]


class LengthPredictor(Protocol):
    """Predicts lengths, as the module's docstring says. ``test_length_predictor_contract.py`` is its contract."""

    probes: int
    """Siblings of each prompt that are handed out before all others, because the predictor learns from their lengths; 0
    for one that learns elsewhere."""

    def expected(self, view: PromptsView) -> np.ndarray:
        """float64[p] expected response tokens; NaN where it knows nothing."""
        ...

    def observe(self, view: PromptsView) -> None:
        """Learn from these prompts, all samples of which have come to an end."""
        ...


def prompt_keys(prompt_ids: Sequence[np.ndarray]) -> np.ndarray:
    """uint64[p] that name prompts by their tokens: a job file has no other name for a prompt than its text."""
    digests = (xxhash.xxh3_64_intdigest(np.ascontiguousarray(ids, "<i4").tobytes()) for ids in prompt_ids)
    return np.fromiter(digests, np.uint64, len(prompt_ids))


def mean_lengths(view: PromptsView) -> np.ndarray:
    """float64[p] mean length of each prompt's finished samples; NaN where none has finished."""
    count = view.finished.sum(axis=1)
    total = (view.lengths * view.finished).sum(axis=1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def longest_first(estimates: np.ndarray) -> np.ndarray:
    """Positions in descending order of ``estimates``, equal ones as they came; NaN, not known, goes last.

    StreamRL's skewness-aware scheduling: each place that becomes free goes to the longest that is left. That is
    Graham's longest-processing-time rule for P||Cmax: at most 4/3 of the best makespan with exact lengths, and the tail
    begins first however rough they are.
    """
    return np.argsort(-np.asarray(estimates, np.float64), kind="stable")


# ------------------------------------------------------------ three kinds


ALPHA = 0.5
"""Weight of the newest epoch, unless another one is given: a group's mean is itself a mean over siblings, and the
policy moves."""


class LengthHistory:
    """Predicts lengths by memory: a prompt will be answered about as long as in earlier epochs.

    ema ← ema + alpha · (mean length of its group − ema): one number a prompt; alpha 1: the last epoch alone. Nothing is
    known in the first epoch. Later it lags one epoch behind the policy, which does not show in the order where all
    prompts drift alike. Beyond ``prompts_max`` prompts the one that was seen longest ago is forgotten.
    """

    probes = 0

    def __init__(self, prompts_max: int, *, alpha: float = ALPHA) -> None:
        self._prompts_max = prompts_max
        self._alpha = alpha
        self._ema: dict[int, float] = {}

    def expected(self, view: PromptsView) -> np.ndarray:
        nothing = float("nan")
        return np.array([self._ema.get(key, nothing) for key in view.keys.tolist()], np.float64)

    def observe(self, view: PromptsView) -> None:
        for key, length in zip(view.keys.tolist(), mean_lengths(view).tolist(), strict=True):
            if length == length:  # noqa: PLR0124  not NaN: some sibling has finished
                before = self._ema.pop(key, length)
                self._ema[key] = before + self._alpha * (length - before)
                if len(self._ema) > self._prompts_max:
                    del self._ema[next(iter(self._ema))]


class LengthOfSiblings:
    """Predicts lengths by siblings: a sample will be about as long as the rest of its group.

    expected = (tokens of the finished + tokens so far of the running) / number finished: the maximum-likelihood mean of
    a group whose running members are only known to be longer than they are now. While none has finished, what the
    longest has reached is a lower bound and not yet an estimate: the prompt stays unknown until that bound exceeds what
    the others are expected to reach.

    To learn anything while there is still something to order, one sample of each group goes first (``probes``): the
    queue is then a sweep of probes, followed by the rest of the groups, longest first. That costs one more prefill of
    the prompt where the rest of the group goes to another worker.
    """

    probes = 1

    def expected(self, view: PromptsView) -> np.ndarray:
        finished = view.finished.sum(axis=1)
        tokens = view.lengths.sum(axis=1)
        known = finished > 0
        expected = np.where(known, tokens / np.maximum(finished, 1), np.nan)
        reached = view.lengths.max(axis=1, initial=0)
        others = float(np.median(expected[known])) if known.any() else np.inf
        return np.where(~known & (reached > others), reached, expected)

    def observe(self, view: PromptsView) -> None:
        """Learn nothing: no length outlives its group."""


class LearnedLengths:
    """Predicts lengths by a model: the scores of the ranker, which is a process of its own.

    The scheduler asks the ranker when a batch is issued, one step ahead of its use, and goes on; until a score comes
    the prompt is unknown. A later score of a prompt replaces the earlier one: the ranker has been refreshed since. The
    newest ``prompts_max`` are kept.
    """

    probes = 0

    def __init__(self, prompts_max: int) -> None:
        self._prompts_max = prompts_max
        self._scores: dict[int, float] = {}

    def learn(self, keys: np.ndarray, scores: np.ndarray) -> None:
        """``scores``: float[p], the ranker's expected tokens of prompts ``keys``, uint64[p]."""
        for key, score in zip(keys.tolist(), scores.tolist(), strict=True):
            self._scores.pop(key, None)
            self._scores[key] = score
            if len(self._scores) > self._prompts_max:
                del self._scores[next(iter(self._scores))]

    def expected(self, view: PromptsView) -> np.ndarray:
        nothing = float("nan")
        return np.array([self._scores.get(key, nothing) for key in view.keys.tolist()], np.float64)

    def observe(self, view: PromptsView) -> None:
        """The ranker learns from what is observed; here only its scores count."""


# ------------------------------------------------------------ prompts without answers, and how good a ranking is


class LengthHints:
    """Predicts lengths for prompts that nobody has answered yet, by the data set's answers or else the prompts' length.

    hint: tokens of the reference answer, else of the prompt        expected = mean + slope · (hint − mean hint)

    A hint is no length: mean and slope are fitted to the prompts that have been answered so far. Before the first
    answer the hints stand for themselves, which gives their order. A slope is never negative: hints that say nothing of
    lengths come to the mean, and with equal expectations all parts of a plan are equal.
    """

    def __init__(self) -> None:
        self._sums = np.zeros(5)
        """Sums of 1, hint, length, hint² and hint · length over all answers."""

    def expected(self, hints: np.ndarray) -> np.ndarray:
        """float64[p] tokens of a response to prompts with these hints."""
        count, hint, length, squares, products = self._sums.tolist()
        if not count:
            return hints.astype(np.float64)
        spread = squares - hint * hint / count
        slope = max(0.0, (products - hint * length / count) / spread) if spread > 0 else 0.0
        return np.maximum(1.0, length / count + slope * (hints - hint / count))

    def observe(self, hints: np.ndarray, lengths: np.ndarray) -> None:
        """Learn the mean ``lengths`` of responses to prompts with these hints, float64[p]; NaN: none has ended."""
        known = np.isfinite(lengths)
        h, n = hints[known].astype(np.float64), lengths[known]
        self._sums += [len(h), h.sum(), n.sum(), (h * h).sum(), (h * n).sum()]


def recall_of_longest(predicted: np.ndarray, actual: np.ndarray, fraction: float) -> float:
    """Recall of the longest ``fraction`` of ``actual``: how many of them were predicted to be among the longest.

    float[n] each, n ≥ 1; at least one sample counts as longest. StreamRL Table 4 reports it for 20, 10 and 5 %. A
    ranking by chance has a recall of ``fraction``. Ties are settled by chance, and what is returned is the mean over
    that chance: samples whose predictions are all equal come out at ``fraction``.
    """
    k = max(1, round(fraction * len(actual)))
    return float((_membership(predicted, k) * _membership(actual, k)).sum() / k)


def _membership(values: np.ndarray, k: int) -> np.ndarray:
    """float64[n] chance of each to be among the ``k`` largest, if equal ones are drawn from by lot."""
    border = np.partition(values, len(values) - k)[len(values) - k]
    above, level = values > border, values == border
    share = (k - int(above.sum())) / int(level.sum())
    return above + share * level
