"""With k = 0 engines cannot be full all the time: not at a step's begin, and not at its end.

    begin   only this step's samples are there, and contexts are hardly more than prompts  ─▶ a head of each length
    end     a group that is not complete has its training still to come, so there are few  ─▶ a tail

Invariants
- More in flight never pays less, so the most that there can be stands for what there is.
- Engines of the trainer count as full except in the head, whatever the tail leaves them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from benchmarks.papers.cluster.clairvoyant.least_work import Demand, Flight, summed
from benchmarks.papers.cluster.clairvoyant.supply import Supply, first_instant_s
from benchmarks.papers.cluster.clairvoyant.within_step import most_trained_s

_HEADS = 8
"""Number of heads that are tried, about; each gives a bound."""
_HEAD_SLICES, _TAIL_SLICES = 1024, 64
"""Slices of a head and of a tail; in each the most in flight counts."""


@dataclass(frozen=True, slots=True)
class _Head:
    """A head begins with a step's release; engines run empty in it."""

    lasts_s: float
    paid_s: float
    """Engine seconds paid by all engines together, if the trainer's generate as soon as they can."""
    trained_s: float
    """Seconds of training that can be done meanwhile, at most."""


def end_s(one: Demand, supply: Supply, release_s: float, at_least_s: float) -> float:
    """The instant before which the step's work cannot be done, the optimizer included; with k = 0."""
    flight = one.flight
    if flight is None:
        return at_least_s
    all_s, work_s = float(one.train_s.sum()), float(one.work_s.sum())
    samples = flight.group * len(one.work_s)
    # a prefill pays for all of an engine's time, whatever is in flight
    work_s -= samples * flight.sharing.instance.prefill_token_s * flight.sharing.prompt_tokens
    lasts_s = at_least_s - release_s
    heads = _heads(one, flight, supply, release_s, lasts_s)
    tail = _Tail(one, flight, supply.since_release_s(release_s, release_s, at_least_s) / lasts_s)

    def enough(end_s: float) -> bool:
        drained_s = end_s - supply.step_s
        begins_s, unpaid_s = tail.unpaid_s(supply, release_s, drained_s)
        for head in heads:
            head_s = release_s + head.lasts_s
            others_s = supply.since_release_s(release_s, head_s, drained_s) - float(unpaid_s[begins_s >= head_s].sum())
            switches_s = 2 * supply.switch_s - min(supply.switch_s, head.lasts_s)
            local_s = drained_s - head_s - (all_s - head.trained_s) - switches_s
            if head.paid_s + others_s + supply.local * max(0.0, local_s) < work_s:
                return False
        return True

    return first_instant_s(enough, release_s, lasts_s, f"the {work_s:.0f} engine seconds of generation")


def _heads(one: Demand, flight: Flight, supply: Supply, release_s: float, longest_s: float) -> list[_Head]:
    """Heads of several lengths, up to where contexts may fill all engines. The first has none."""
    sharing, samples = flight.sharing, float(flight.group * len(one.work_s))
    begun_s = max(supply.switch_s, supply.pull_s)
    context_tokens, paid_s, width_s = samples * (sharing.prompt_tokens + 0.5), 0.0, longest_s / _HEAD_SLICES
    heads = [_Head(0.0, 0.0, 0.0)]
    for i in range(_HEAD_SLICES):
        begin, end = i * width_s, (i + 1) * width_s
        others = supply.since_release_s(release_s, release_s + begin, release_s + end) / width_s
        local = supply.local * max(0.0, end - max(begin, supply.switch_s)) / width_s
        context_tokens += width_s * sharing.most_tokens_s(local + others, samples)
        rate = float(sharing.paid_s(local + others, samples, context_tokens))
        paid_s += width_s * rate
        heads.append(_Head(end, paid_s, 0.0))
        if begin >= begun_s and 0 < (local + others) * (1 - 1e-9) <= rate:
            break
    chosen = heads[:: max(1, len(heads) // _HEADS)]
    return [replace(head, trained_s=most_trained_s(one, supply, release_s, head.lasts_s)) for head in chosen]


class _Tail:
    """A tail is what others' engines leave unpaid before a step's end, as incomplete groups have training to come."""

    def __init__(self, one: Demand, flight: Flight, others: float) -> None:
        late_s = (1 - one.early) * one.train_s
        by_time, by_context = np.argsort(late_s), np.argsort(late_s / flight.context_tokens)
        self._sharing = flight.sharing
        self._late_s = summed(late_s[by_time])
        self._samples = flight.group * np.arange(len(late_s) + 1.0)
        self._late_by_context_s = summed(late_s[by_context])
        self._context_tokens = summed(flight.context_tokens[by_context])
        grid_s = np.linspace(0.0, float(late_s.sum()), 8 * _TAIL_SLICES + 1)
        empty = self._paid_s(others, grid_s) < others * (1 - 1e-9)
        full_s = grid_s[min(int(np.flatnonzero(empty).max(initial=-1)) + 1, len(grid_s) - 1)]
        self._edges_s = np.linspace(0.0, float(full_s), _TAIL_SLICES + 1)
        """Edges of the slices, in seconds before the optimizer."""

    def _paid_s(self, engines: float | np.ndarray, left_s: np.ndarray) -> np.ndarray:
        """So long before the optimizer, in a second: groups that are not complete have no more training than that."""
        samples = np.interp(left_s, self._late_s, self._samples)
        return self._sharing.paid_s(engines, samples, np.interp(left_s, self._late_by_context_s, self._context_tokens))

    def unpaid_s(self, supply: Supply, release_s: float, end_s: float) -> tuple[np.ndarray, np.ndarray]:
        """Slices that end with the optimizer's begin at ``end_s``: when each begins, and what is unpaid in it."""
        near_s, far_s = self._edges_s[:-1], self._edges_s[1:]
        given = [supply.since_release_s(release_s, end_s - b, end_s - a) for a, b in zip(near_s, far_s, strict=True)]
        engines = np.array(given) / np.where(far_s > near_s, far_s - near_s, 1.0)
        return end_s - far_s, (engines - self._paid_s(engines, far_s)) * (far_s - near_s)
