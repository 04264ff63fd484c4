"""Which workers get the samples that are expected to be long, and how many of them do nothing else.

StreamRL (arXiv 2504.15930), skewness-aware dispatching, Algorithm 2. Small batches decode fast and large ones
efficiently, so the longest ``alpha`` of the samples may do better on dedicated workers with small batches, while the
others share the rest. The paper chooses the number of dedicated workers by a formula that looks at lengths alone and
never says zero (``benchmarks/papers/cluster/closed_form.py``). Here continuous batching is replayed over the workers'
own latency tables, and the number whose slower group ends first is taken. Zero is allowed, and taken in a tie. Of each
candidate the workers that may end last are replayed; of the winner and of zero, all. Large pools are searched on every
k-th worker and sample. With ``past``, batches that are over are replayed instead: dealt by what was expected then, with
the lengths that came out. So a ranker is trusted as far as it has been right; one that knows nothing gets nobody
dedicated.

Samples are dealt longest first, each to the worker that has the least to do by its own pace, and each worker begins
with the longest (``longest_first``). So workers of different devices need no other code. What a worker still has of the
step before counts as work that it does first.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from actors.policies.assigning.generation_time import Instance, finish_times_s
from actors.policies.lengths.length_predictor import longest_first

ALPHA = 0.2
"""Part of the samples that counts as long; the paper's value."""
_CANDIDATES = 24
"""How many numbers of dedicated workers are tried, evenly spread if there are more workers."""
_SEARCHED = 32
"""Number of workers that are replayed; larger pools are thinned out to so many."""
_ROUGH_CANDIDATES = 16
"""How many numbers of dedicated workers are tried in a thinned pool, which tells nothing finer."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Says which worker generates which samples."""

    dedicated: int
    """Number of workers, the first of ``workers``, that get long samples only."""
    workers: list[int]
    """Positions of the workers, those with the fastest small batch first."""
    samples: list[np.ndarray]
    """Positions of the samples of each of ``workers``, int64, in the order in which they begin."""


@dataclass(frozen=True, slots=True)
class Past:
    """Holds the expected and the actual lengths of a batch that is over."""

    estimates: np.ndarray
    """Lengths that were expected when the batch was dealt, float64[n]."""
    lengths: np.ndarray
    """Lengths that came out, of the same samples."""


def decide(
    estimates: np.ndarray,
    instances: Sequence[Instance],
    *,
    prompt_tokens: int,
    alpha: float = ALPHA,
    dedicated: int | None = None,
    past: Sequence[Past] | None = None,
) -> Dispatch:
    """Share samples of these expected lengths among ``dedicated`` workers and the others; unset: as the replay says.

    ``estimates`` are tokens. ``past``: None trusts them; an empty one dedicates no worker, since nothing confirms them
    yet.
    """
    order = longest_first(estimates)
    ranked = sorted(range(len(instances)), key=lambda i: (instances[i].pace.step_s(1, prompt_tokens), i))
    pool = [instances[i] for i in ranked]
    long = math.ceil(alpha * len(order))
    if len(pool) < 2 or not long:
        dedicated = 0
    elif dedicated is None:
        dedicated = _replayed([Past(estimates, estimates)] if past is None else past, pool, alpha, prompt_tokens)
    owners = _owners(estimates[order], pool, dedicated, long)
    return Dispatch(dedicated, ranked, _by_owner(order, owners, len(pool)))


def _replayed(past: Sequence[Past], pool: Sequence[Instance], alpha: float, prompt_tokens: int) -> int:
    """The number of dedicated workers with which the replay of all these batches ends first."""
    stride = math.ceil(len(pool) / _SEARCHED)
    workers = pool[::stride]
    ranked = [(one, longest_first(one.estimates)[stride // 2 :: stride]) for one in past]

    def ends_s(count: int, *, all_of_them: bool) -> float:
        total_s = 0.0
        for one, few in ranked:
            owners = _owners(one.estimates[few], workers, count, math.ceil(alpha * len(few)))
            lengths = one.lengths[few]
            who = range(len(workers)) if all_of_them else _likely_last(owners, lengths, workers)
            total_s += max(_end_s(workers[i], lengths[owners == i], prompt_tokens) for i in who)
        return total_s

    candidates = _candidates(len(workers), _CANDIDATES if stride == 1 else _ROUGH_CANDIDATES)
    best = min(candidates, key=lambda count: ends_s(count, all_of_them=False))
    if not best or ends_s(best, all_of_them=True) >= ends_s(0, all_of_them=True):
        return 0
    return min(round(best * len(pool) / len(workers)), len(pool) - 1)


def _candidates(workers: int, tried: int) -> list[int]:
    most = workers - 1
    return sorted({round(i * most / min(tried, most)) for i in range(min(tried, most) + 1)})


def _owners(tokens: np.ndarray, pool: Sequence[Instance], dedicated: int, long: int) -> np.ndarray:
    """int64[n] worker of each sample; ``tokens``: expected, longest first, the first ``long`` for dedicated ones."""
    if not dedicated:
        return _deal(tokens, pool)
    rest = _deal(tokens[long:], pool[dedicated:])
    return np.concatenate([_deal(tokens[:long], pool[:dedicated]), dedicated + rest])


def _deal(tokens: np.ndarray, pool: Sequence[Instance]) -> np.ndarray:
    """int64[n] worker of each sample: dealt longest first, each to the worker that has the least to do."""
    share = max(1, math.ceil(len(tokens) / len(pool)))
    mean = float(tokens.mean()) if len(tokens) else 0.0
    token_s = [_token_s(instance, share, mean / 2) for instance in pool]
    load = [(token_s[i] * sum(instance.held_tokens), i) for i, instance in enumerate(pool)]
    heapq.heapify(load)
    replace = heapq.heapreplace
    owners = [0] * len(tokens)
    for sample, needs in enumerate(tokens.tolist()):
        busy_s, i = load[0]
        owners[sample] = i
        replace(load, (busy_s + token_s[i] * needs, i))
    return np.array(owners, np.int64)


def _by_owner(order: np.ndarray, owners: np.ndarray, workers: int) -> list[np.ndarray]:
    """The samples of each worker, in the order of ``order``."""
    ends = np.cumsum(np.bincount(owners, minlength=workers)).tolist()
    dealt = order[np.argsort(owners, kind="stable")]
    return [dealt[start:end] for start, end in itertools.pairwise([0, *ends])]


def _token_s(instance: Instance, share: int, context_tokens: float) -> float:
    """Seconds a token of the worker takes, with as many samples beside it as it can run of its share."""
    fit = instance.kv_tokens / max(1, instance.reserve_tokens)
    batch = max(1.0, min(share, instance.places, fit))
    return instance.pace.step_s(batch, context_tokens) / batch


def _likely_last(owners: np.ndarray, lengths: np.ndarray, pool: Sequence[Instance]) -> set[int]:
    """The workers with the most tokens, with the most samples, and with the longest sample."""
    held = [instance.held_tokens for instance in pool]
    tokens = np.bincount(owners, lengths, len(pool)) + [sum(left) for left in held]
    longest = np.array([max(left, default=0) for left in held], np.float64)
    np.maximum.at(longest, owners, lengths)
    most = np.bincount(owners, minlength=len(pool)) + [len(left) for left in held]
    return {int(np.argmax(tokens)), int(np.argmax(longest)), int(np.argmax(most))}


def _end_s(instance: Instance, tokens: np.ndarray, prompt_tokens: int) -> float:
    work = [*instance.held_tokens, *np.rint(tokens).astype(int).tolist()]
    return float(finish_times_s(instance, [prompt_tokens] * len(work), work).max(initial=0.0))
