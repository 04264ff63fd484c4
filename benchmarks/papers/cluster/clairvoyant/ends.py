"""How early any policy could have been done, with true lengths and the trace known beforehand: a bound, not a schedule.

docs/papers/combined.md derives it. Nothing here knows a policy; what is given is the work and the machines.

    decode steps ≥ tokens / places, ≥ context tokens / KV cache   ─▶ Demand.work_s, at the very least    (least_work.py)
    trained by t ≤ what the engines can have finished by t        ─▶ end ≥ t + training that is left    (within_step.py)
    with k = 0 engines run empty at a step's begin and its end    ─▶ they give less than all their time (in_flight.py)
    step v needs version v - k                                    ─▶ end(v) ≥ end(v - 1 - k) + its longest sample alone
    after end(a): training of a + 1 …, generation of a + 1 + k …  ─▶ machines' time from end(a) on, for every a

Invariants
- Every relaxation lets a schedule do more than it could: preemption for nothing, samples in parts, engines full.
- An engine second of a reserved machine is either generated in or trained in; the optimizer holds as few as can train.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.papers.cluster.clairvoyant import in_flight, within_step
from benchmarks.papers.cluster.clairvoyant.least_work import Demand
from benchmarks.papers.cluster.clairvoyant.supply import Supply, first_instant_s


def earliest_ends_s(demands: Sequence[Demand], supply: Supply) -> list[float]:
    """For each step, an instant before which no schedule has trained it; the first begins at 0."""
    ends: list[float] = []
    for v, one in enumerate(demands):
        released_s = ends[v - 1 - supply.staleness] if v > supply.staleness else 0.0
        train_s = float(one.train_s.sum())
        longest_s = float((one.alone_s + (1 - one.early) * one.train_s).max())
        end_s = max(
            (ends[-1] if ends else 0.0) + train_s + supply.step_s,
            released_s + supply.first_s + longest_s + supply.step_s,
            released_s + within_step.lasts_s(one, supply, released_s) + supply.step_s,
        )
        for after in range(-1, v):
            end_s = _since_s(demands[: v + 1], supply, after, ends, end_s)
        ends.append(in_flight.end_s(one, supply, released_s, end_s) if supply.on_policy else end_s)
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
    begin_s = ends[after] if after >= 0 else 0.0

    def enough(end_s: float) -> bool:
        return supply.local * max(0.0, end_s - begin_s - training_s) + supply.others_s(begin_s, end_s) >= work_s

    wanted = f"the {work_s:.0f} engine seconds of generation"
    return first_instant_s(enough, begin_s, at_least_s - begin_s, wanted)


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
