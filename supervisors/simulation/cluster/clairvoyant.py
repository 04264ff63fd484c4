"""How early any policy could have been done, with true lengths and the trace known beforehand: a bound, not a schedule.

docs/papers/combined.md derives it. Nothing here knows a policy; what is given is the work and the machines.

    decode steps ≥ tokens / places, ≥ context tokens / KV cache   ─▶ TokenCosts ─▶ Demand.work_s, at the very least
    trained by t ≤ what the engines can have finished by t        ─▶ end ≥ t + training that is left then, for every t
    step v needs version v - k                                    ─▶ end(v) ≥ end(v - 1 - k) + its longest sample alone
    after end(a): training of a + 1 …, generation of a + 1 + k …  ─▶ machines' time from end(a) on, for every a

Invariants
- Every relaxation lets a schedule do more than it could: preemption for nothing, samples in parts, engines always full.
- An engine second of a reserved machine is either generated in or trained in; the optimizer holds as few as can train.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from actors.scheduler.policies.generation_time import Instance
from supervisors.providers.traces import Trace
from supervisors.simulation.cluster.costs import DecodePace

_INSTANTS = 64
"""At which the middle condition is looked at; each of them alone gives a bound."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Engines that there may be."""

    instance: Instance
    size: float = 1.0
    """Of one, in units of ``Supply``: engines, or devices where they may make engines of several kinds."""


@dataclass(frozen=True, slots=True)
class TokenCosts:
    """What a sample takes at least, by its length from 0 on; of one job, since its samples share decode steps."""

    work_s: np.ndarray
    """Of engines or devices, as ``Supply`` counts, with its prefill, float64[longest + 1]."""
    alone_s: np.ndarray
    """Without company, float64[longest + 1]."""


@dataclass(frozen=True, slots=True)
class Demand:
    """One step's work, by group: what the trainer takes as a whole."""

    work_s: np.ndarray
    """Of engines or devices together, as ``Supply`` counts, float64[groups]."""
    alone_s: np.ndarray
    """Of the longest sample, decoded without company, float64[groups]."""
    train_s: np.ndarray
    """On all devices that train, float64[groups]."""
    early: float = 0.0
    """The part of it that a sample's end alone allows; the rest waits for its group."""
    each: Demand | None = None
    """The same by sample; needed where ``early`` is not 0."""


@dataclass(frozen=True, slots=True)
class Supply:
    """The machines."""

    local: float
    """Engines (or devices) on the machines that train."""
    others_s: Callable[[float, float], float]
    """(begin, end) → engine seconds that the others can give between them."""
    step_s: float
    """Of the optimizer, after a step's last sample."""
    step_engines: float
    """That cannot generate meanwhile: as many of ``local`` as must train at least."""
    staleness: int
    """k: step v may be generated with version v - k."""
    switch_s: float = 0.0
    """With k = 0, of the training machines in a step: to generation and back."""


def token_costs(kinds: Sequence[Kind], prompt_tokens: int, lengths: np.ndarray) -> TokenCosts:
    """For all samples of a job, int[n] ``lengths``: each token by the kind of engine that is best for it.

    Which share of what a decode step costs is counted (see ``_token_s``) has to be the same for all samples that may be
    in one step, so it is chosen here and not for each step of the job.
    """
    tokens = np.asarray(lengths, np.int64)
    contexts = prompt_tokens + np.arange(int(tokens.max())) + 0.5  # of a sample's first, second, … decode step
    making = len(tokens) - np.searchsorted(np.sort(tokens), np.arange(len(contexts)), side="right")  # that get so far
    work_s = np.min([kind.size * _token_s(kind.instance, contexts, making) for kind in kinds], axis=0)
    alone_s = np.min([_alone_s(kind.instance, contexts) for kind in kinds], axis=0)
    prefills_s = [kind.instance.prefill_token_s * prompt_tokens for kind in kinds]
    prefill_work_s = min(kind.size * s for kind, s in zip(kinds, prefills_s, strict=True))
    return TokenCosts(
        np.concatenate([[0.0], np.cumsum(work_s)]) + prefill_work_s,
        np.concatenate([[0.0], np.cumsum(alone_s)]) + min(prefills_s),
    )


def demand(costs: TokenCosts, lengths: np.ndarray, train_s: np.ndarray, group: int, early: float = 0.0) -> Demand:
    """Of the samples of a step in order of their groups, ``group`` each."""
    return Demand(
        work_s=costs.work_s[lengths].reshape(-1, group).sum(axis=1),
        alone_s=costs.alone_s[lengths].reshape(-1, group).max(axis=1),
        train_s=np.asarray(train_s, np.float64).reshape(-1, group).sum(axis=1),
        early=early,
        each=demand(costs, lengths, train_s, 1) if early else None,
    )


def _own_s(pace: DecodePace, contexts: np.ndarray) -> np.ndarray:
    return pace.sequence_s + pace.context_token_s * contexts


def _alone_s(instance: Instance, contexts: np.ndarray) -> np.ndarray:
    pace = instance.pace
    assert isinstance(pace, DecodePace)
    return _own_s(pace, contexts) + pace.fixed_s + max(pace.weights_s, pace.compute_s)


def _token_s(instance: Instance, contexts: np.ndarray, making: np.ndarray) -> np.ndarray:
    """A token's own part of a decode step and of what a step costs whatever is in it, by its context.

    That is shared by places or by cache, whichever runs out first for these samples; and where products take longer
    than reading the weights, they take its place. ``making``: samples that make a token at each of ``contexts``.
    """
    pace = instance.pace
    assert isinstance(pace, DecodePace)
    per_step = np.full(len(contexts), 1 / instance.places), contexts / instance.kv_tokens
    reading = [(pace.fixed_s + pace.weights_s) * part for part in per_step]
    computing = [pace.fixed_s * part + pace.compute_s for part in per_step]
    return _own_s(pace, contexts) + max((*reading, *computing), key=lambda shared: float(shared @ making))


def of_trace(trace: Trace, until_serving_s: float) -> Callable[[float, float], float]:
    """``Supply.others_s`` of machines that come and go, one engine each, which serve so long after they came."""
    came: dict[str, float] = {}
    spans: list[tuple[float, float]] = []
    for event in trace.events:
        if event.what == "up":
            came[event.node] = event.at_s + until_serving_s
        elif event.what == "kill":
            spans.append((came.pop(event.node), event.at_s))
    spans += [(from_s, float("inf")) for from_s in came.values()]
    return lambda begin_s, end_s: sum(max(0.0, min(end_s, b) - max(begin_s, a)) for a, b in spans)


def earliest_ends_s(demands: Sequence[Demand], supply: Supply) -> list[float]:
    """For each step, an instant before which no schedule has trained it; the first begins at 0."""
    ends: list[float] = []
    for v, one in enumerate(demands):
        released_s = ends[v - 1 - supply.staleness] if v > supply.staleness else 0.0
        train_s = float(one.train_s.sum())
        end_s = max(
            (ends[-1] if ends else 0.0) + train_s + supply.step_s,
            released_s + float((one.alone_s + (1 - one.early) * one.train_s).max()) + supply.step_s,
            released_s + _one_step_s(one, supply, released_s) + supply.step_s,
        )
        for after in range(-1, v):
            end_s = _since_s(demands[: v + 1], supply, after, ends, end_s)
        ends.append(end_s)
    return ends


def _since_s(demands: Sequence[Demand], supply: Supply, after: int, ends: Sequence[float], at_least_s: float) -> float:
    """The first end of the last of these steps, as far as the machines' time since the end of ``after`` goes.

    All training of later steps lies after that end, and all generation of those that wait for its version. With
    ``after`` = -1 that is everything since the begin.
    """
    later = demands[after + 1 :]
    waiting = demands[after + 1 + supply.staleness :] if after >= 0 else later
    training_s = _engines_train_s(later, supply)
    work_s = sum(float(one.work_s.sum()) for one in waiting)
    return _all_work_done_s(work_s, training_s, supply, ends[after] if after >= 0 else 0.0, at_least_s)


def _engines_train_s(demands: Sequence[Demand], supply: Supply) -> float:
    """For how long all of ``local`` together cannot generate; the optimizer counts for the engines that it holds."""
    step_s = supply.step_s * supply.step_engines / supply.local if supply.local else 0.0
    return sum(float(one.train_s.sum()) + step_s for one in demands)


def least_cost(demands: Sequence[Demand], supply: Supply, reserved_s: float, other_s: float) -> float:
    """What the steps cost at least, in the unit of the two prices a second: all reserved machines, one other engine.

    An end later by a second costs ``reserved_s`` and saves ``local`` engine seconds of others, so the earliest end is
    also the cheapest while reserved machines cost more than that; else everything may be generated on them.
    """
    assert reserved_s >= other_s * supply.local, "else waiting is cheaper than renting, and the bound another one"
    end_s = earliest_ends_s(demands, supply)[-1]
    training_s = _engines_train_s(demands, supply)
    work_s = sum(float(one.work_s.sum()) for one in demands)
    return reserved_s * end_s + other_s * max(0.0, work_s - supply.local * (end_s - training_s))


def _all_work_done_s(work_s: float, training_s: float, supply: Supply, begin_s: float, at_least_s: float) -> float:
    """The first instant by which machines can have given so many seconds to generation and to training since then."""

    def enough(end_s: float) -> bool:
        return supply.local * max(0.0, end_s - begin_s - training_s) + supply.others_s(begin_s, end_s) >= work_s

    if enough(at_least_s):
        return at_least_s
    high = begin_s + max(1.0, training_s)
    for _ in range(60):
        if enough(high):
            break
        high = begin_s + 2 * (high - begin_s)
    else:
        raise ValueError(f"no machine ever gives the {work_s:.0f} engine seconds of generation")
    low = begin_s
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return low


def _one_step_s(one: Demand, supply: Supply, begin_s: float) -> float:
    """The largest, over instants t since its samples may begin, of t and the training that is left at t at best."""
    all_s = float(one.train_s.sum())
    engines = supply.local or supply.others_s(begin_s, begin_s + 1.0)
    horizon_s = 2 * (all_s + supply.switch_s) + float(one.work_s.sum()) / max(engines, 1.0)
    best_s = 0.0
    for t in np.geomspace(horizon_s / 1000, horizon_s, _INSTANTS):
        trainable_s = _trainable_s(one, float(t))
        given_s = supply.others_s(begin_s, begin_s + float(t))
        low, high = 0.0, min(float(t), trainable_s(float("inf")))
        for _ in range(40):  # the most that can be trained by t
            x = (low + high) / 2
            engine_s = supply.local * max(0.0, float(t) - x - supply.switch_s) + given_s
            low, high = (x, high) if x <= trainable_s(engine_s) else (low, x)
        best_s = max(best_s, float(t) + all_s - high if high < all_s * (1 - 1e-9) else 0.0)
    return best_s


def _trainable_s(one: Demand, t: float) -> Callable[[float], float]:
    """Engine seconds → the most training that what they finish by ``t`` allows, in fractions of groups and samples.

    With an early part, samples and groups get the same engine seconds twice, which is more than they have.
    """
    there = one.alone_s <= t
    work, train = one.work_s[there], one.train_s[there]
    rank = np.argsort(-train / work, kind="stable")
    done_work = np.concatenate([[0.0], np.cumsum(work[rank])])
    done_train = np.concatenate([[0.0], np.cumsum(train[rank])])
    of_samples = _trainable_s(one.each, t) if one.each is not None else None

    def most_s(engine_s: float) -> float:
        grouped_s = (1 - one.early) * float(np.interp(engine_s, done_work, done_train))
        return grouped_s + (one.early * of_samples(engine_s) if of_samples is not None else 0.0)

    return most_s
