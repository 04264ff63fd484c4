"""How a job uses a training service, learned from its steps, and how much jobs would delay each other on one.

    a step's measures ─▶ observed ─▶ JobProfile ─┐
    profiles of the jobs that are there ─────────┴▶ predict ─▶ phase of the newcomer, slowdown of everyone

A job's step takes ``period_s`` if it waits for no other job; of these the service computes ``busy_s`` in one burst.

The prediction, in words: a burst that comes while another job computes waits for the rest of that burst. Where both
jobs are regular and their periods agree, that rest follows from their phases, and the newcomer's is chosen so that the
worst slowdown is least. Where periods differ or vary, phases drift, and what remains is the mean over all phases: half
of the other's burst for the part of the time in which it computes. ``_coherence`` goes from one case to the other. The
bursts of others that wait themselves are added (mean value analysis, to the second order), and loading the state.
On equal jobs with random rollouts it agrees with the event simulation (docs/papers/plexrl.md).

Pure: no clock; times are seconds on any one clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

NEWEST_COUNTS: Final = 0.3
"""Weight of the newest step in a mean."""
_BURSTS_SEEN: Final = 20
"""Number of bursts of which the 90th percentile is taken."""
_DRIFT_STEPS: Final = 10
"""Number of steps over which two jobs have to stay in phase for that to count."""


def step_alone_s(seconds: float, *, waited_s: float, switch_s: float, busy_s: float) -> float:
    """Time that a step of ``seconds`` would have taken with nobody else on the service; at least what was computed."""
    return max(busy_s, seconds - waited_s - switch_s)


def slowdown(seconds: float, alone_s: float) -> float:
    """Factor by which sharing has made something longer; 1 where nothing is known."""
    return max(1.0, seconds / alone_s) if alone_s > 0 else 1.0


@dataclass(frozen=True, slots=True)
class StepUse:
    """Holds what one step used of the service."""

    period_s: float
    """Time of the step, less its waits for other jobs and for its state."""
    busy_s: float
    """Time for which the service computed for the step."""
    switch_s: float = 0.0
    """Time in which the job's state was loaded."""
    burst_at_s: float = 0.0
    """Time at which the step's burst began."""


@dataclass(frozen=True, slots=True)
class JobProfile:
    """Holds means over a job's steps, the newest counting most."""

    steps: int = 0
    period_s: float = 0.0
    busy_s: float = 0.0
    busy_p90_s: float = 0.0
    """90th percentile of its recent bursts, used where an estimate must not be too short."""
    jitter_s: float = 0.0
    """Standard deviation of the period."""
    switch_s: float = 0.0
    """Time to load the job's state; 0: it never was loaded."""
    burst_at_s: float = 0.0
    """Time at which its last burst began."""
    recent_busy_s: tuple[float, ...] = ()
    """Seconds of its recent bursts, the newest last."""

    @property
    def duty(self) -> float:
        """Part of the time for which the service computes for the job; 0 before its first step."""
        return min(1.0, self.busy_s / self.period_s) if self.period_s > 0 else 0.0


UNKNOWN: Final = JobProfile()
"""Profile of a job that has run no step."""


def observed(profile: JobProfile, use: StepUse) -> JobProfile:
    """The profile after one more step."""
    recent = (*profile.recent_busy_s, use.busy_s)[-_BURSTS_SEEN:]
    newest = NEWEST_COUNTS if profile.steps else 1.0
    off_s = use.period_s - profile.period_s
    variance = (1.0 - newest) * (profile.jitter_s**2 + newest * off_s**2)
    return replace(
        profile,
        steps=profile.steps + 1,
        period_s=profile.period_s + newest * off_s,
        busy_s=profile.busy_s + newest * (use.busy_s - profile.busy_s),
        busy_p90_s=sorted(recent)[math.ceil(0.9 * len(recent)) - 1],
        jitter_s=math.sqrt(variance),
        switch_s=_loaded(profile.switch_s, use.switch_s),
        burst_at_s=use.burst_at_s,
        recent_busy_s=recent,
    )


def _loaded(before_s: float, now_s: float) -> float:
    """Mean time to load the state, without steps that found it in place."""
    if not now_s or not before_s:
        return now_s or before_s
    return before_s + NEWEST_COUNTS * (now_s - before_s)


# ------------------------------------------------------------ jobs together


@dataclass(frozen=True, slots=True)
class Together:
    """Predicts how jobs that share a service slow each other down."""

    burst_at_s: float
    """Time at which the newcomer's bursts should begin, on the clock of the profiles, up to whole periods."""
    slowdowns: tuple[float, ...]
    """Time of a step divided by that of the job alone, for each job that is there and, last, the newcomer."""

    @property
    def worst(self) -> float:
        return max(self.slowdowns)


def predict(there: Sequence[JobProfile], newcomer: JobProfile, *, switches: bool = True) -> Together:
    """What is expected if ``newcomer`` joins the jobs ``there``, with the phase that suits all best.

    ``switches``: whether their states have no room together, so that each burst begins with loading one.
    """
    jobs = [*there, newcomer]
    among = [[0.0 if i == j else _rest_s(one, other) for j, other in enumerate(there)] for i, one in enumerate(there)]
    coherent = [(_coherence(newcomer, one), _coherence(one, newcomer)) for one in there]
    phases_s = {newcomer.burst_at_s}
    if any(of_one > 0 or of_other > 0 for of_one, of_other in coherent):
        phases_s = {one.burst_at_s + one.busy_p90_s for one in there}
        phases_s |= {one.burst_at_s - newcomer.busy_p90_s for one in there}
    best: Together | None = None
    for phase_s in sorted(phases_s):
        at = replace(newcomer, burst_at_s=phase_s)
        ours = [_rest_s(at, one, of_ours) for one, (of_ours, _) in zip(there, coherent, strict=True)]
        theirs = [_rest_s(one, at, of_theirs) for one, (_, of_theirs) in zip(there, coherent, strict=True)]
        rest_s = [[*row, mine] for row, mine in zip(among, theirs, strict=True)]
        together = Together(phase_s, _slowdowns(jobs, [*rest_s, [*ours, 0.0]], switches=switches))
        if best is None or together.worst < best.worst:
            best = together
    assert best is not None
    return best


def _slowdowns(jobs: Sequence[JobProfile], rest_s: Sequence[Sequence[float]], *, switches: bool) -> tuple[float, ...]:
    """Slowdown of each, from what its bursts wait for the bursts of others that they find under way."""
    waiting = [sum(row) for row in rest_s]
    found = list[float]()
    for i, one in enumerate(jobs):
        waits_s = waiting[i] + (one.switch_s if switches and len(jobs) > 1 else 0.0)
        for j, other in enumerate(jobs):
            if i != j and other.period_s:
                waits_s += (waiting[j] - rest_s[j][i]) / other.period_s * other.busy_s
        found.append(1.0 + waits_s / one.period_s if one.period_s else 1.0)
    return tuple(found)


def _rest_s(one: JobProfile, other: JobProfile, coherent: float | None = None) -> float:
    """Seconds that a burst of ``one`` waits for the one that ``other`` is in the middle of, on average."""
    if not other.period_s:
        return 0.0
    coherent = _coherence(one, other) if coherent is None else coherent
    by_chance_s = other.duty * other.busy_s / 2
    if not coherent:
        return by_chance_s
    since_s = (one.burst_at_s - other.burst_at_s) % other.period_s
    return coherent * max(0.0, other.busy_p90_s - since_s) + (1 - coherent) * by_chance_s


def _coherence(one: JobProfile, other: JobProfile) -> float:
    """From 0 to 1: how much of the present phases of two jobs is left after some steps, by how far phases spread."""
    if not one.period_s or not other.period_s:
        return 0.0
    drift_s = _DRIFT_STEPS * (one.period_s - other.period_s)
    variance = drift_s**2 + _DRIFT_STEPS * (one.jitter_s**2 + other.jitter_s**2)
    left = math.exp(-2 * math.pi**2 * variance / other.period_s**2)
    return left if left > 0.01 else 0.0
