"""Who has the next slice of a training service: one burst of one job, chosen among the jobs that ask.

    SliceView, now ──▶ the holder goes on ──▶ its burst has not ended, or it was idle for less than ``gap_s``
                  └──▶ fifo         the one that has waited longest
                  └──▶ round_robin  the next after the last holder, in the order of names
                  └──▶ hrrs         guard ▸ priority ▸ share ▸ response ratio, with hysteresis

``hrrs`` is the highest response ratio with switch cost (PlexRL names it, the formula is ours). In words:

- **Ratio** = (wait + estimate + switch) / (estimate + switch): short slices overtake long ones until those have waited
  for long enough, and jobs whose state is resident come before others, since their switch costs nothing.
- **Hysteresis**: a job that is not resident needs a ratio larger by this part than the best of the resident ones.
- **Share**: a job that is ahead of its share by more than ``LAG_SLICES`` slices of its own stands back for jobs of its
  priority that have used less of theirs. So jobs that always ask get the service in proportion to their shares.
- **Priority**: higher ones go first; shares and ratios decide among equals.
- **Guard**: suppose that the choice runs first and the rest after it, oldest first. If a job would then begin later
  than ``starvation_s`` after it asked, the oldest runs instead. With right estimates no job waits longer than the
  guard, or than one slice of each other job if that is longer; wrong estimates add their error.

A slice is never interrupted. Pure: no clock, no I/O, the same view gives the same choice. Times are seconds on any one
clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final, Literal

LAG_SLICES: Final = 2.0
"""Slices of its own by which a job may be ahead of its share before it stands back."""
_LEAST_S: Final = 1e-3
"""Least length that a slice counts with, so that a ratio stays finite."""
_INSTANT_S: Final = 1e-6
"""Time to the end of a gap that counts as none, so that rounding causes no look that changes nothing."""

PolicyName = Literal["hrrs", "fifo", "round_robin"]


@dataclass(frozen=True, slots=True)
class SliceRules:
    """Holds the rules that do not change while a service runs."""

    policy: PolicyName
    starvation_s: float
    """Longest wait that ``hrrs`` allows if it can; it should be at least a few slices of all jobs together."""
    gap_s: float
    """Time for which a holder that has nothing to do keeps its slice."""
    hysteresis: float = 0.2
    """Part by which the ratio of a job that is not resident has to be larger than that of one that is."""


@dataclass(frozen=True, slots=True)
class Asking:
    """Describes a job that has a waiting call, and may run."""

    job: str
    since_s: float
    """Time at which the job's oldest waiting call came."""
    estimate_s: float
    """Seconds for which its slice is expected to compute."""
    switch_s: float = 0.0
    """Seconds to make its state resident; 0 if it is."""
    priority: int = 0
    """Priority; a higher one goes first."""
    share: float = 1.0
    """Weight of the job among those of its priority, above 0."""
    used_s: float = 0.0
    """Seconds of slices that are charged to the job (``fair_share``)."""

    @property
    def slice_s(self) -> float:
        """Seconds for which the job would have the service."""
        return max(self.estimate_s + self.switch_s, _LEAST_S)

    def ratio(self, now_s: float) -> float:
        """The job's response ratio."""
        return (max(0.0, now_s - self.since_s) + self.slice_s) / self.slice_s


@dataclass(frozen=True, slots=True)
class SliceView:
    """Describes a service between two calls."""

    asking: Sequence[Asking]
    """Jobs with a waiting call, each once, in any order; the holder among them if it has one."""
    holder: str | None = None
    """Job whose burst has not ended."""
    holder_idle_since_s: float | None = None
    """Time since when the holder has nothing to do; None: it computes, or no job holds a slice."""
    resident: Collection[str] = frozenset()
    """Jobs whose state is in the device's memory."""
    last: str | None = None
    """Job that had the last slice."""


@dataclass(frozen=True, slots=True)
class SliceChoice:
    """Says which job has the service now."""

    run: str | None
    """Job whose slice begins or goes on; None: no job asks."""
    prefetch: str | None = None
    """Job that would be next, if its state is not resident."""
    look_again_s: float | None = None
    """Seconds after which to decide again even if nothing has happened; None: there is no need to."""


SlicePolicy = Callable[[SliceView, float], SliceChoice]
"""Function ``decide(view, now_s)``."""
_Pick = Callable[[Sequence[Asking], SliceView, float], Asking]
"""Rule that says which of the jobs that ask is next; there is at least one."""


def slice_policy(rules: SliceRules) -> SlicePolicy:
    """The policy that ``rules`` name."""
    pick: _Pick = {"hrrs": _hrrs(rules), "fifo": _fifo, "round_robin": _round_robin}[rules.policy]

    def decide(view: SliceView, now_s: float) -> SliceChoice:
        others = [one for one in view.asking if one.job != view.holder]
        held_s = _held_s(view, rules, now_s)
        if held_s is None:
            first = pick(view.asking, view, now_s) if view.asking else None
            rest = [one for one in view.asking if one is not first]
            begins_s, run = now_s + (first.slice_s if first else 0.0), first.job if first else None
        else:
            rest, begins_s, run = others, now_s, view.holder
        upcoming = pick(rest, view, begins_s).job if rest else None
        return SliceChoice(run, None if upcoming in view.resident else upcoming, held_s or None)

    return decide


def _held_s(view: SliceView, rules: SliceRules, now_s: float) -> float | None:
    """Seconds for which an idle holder still keeps its slice, 0 if it is not idle; None: no job holds one any more."""
    if view.holder is None:
        return None
    if view.holder_idle_since_s is None or any(one.job == view.holder for one in view.asking):
        return 0.0
    left_s = view.holder_idle_since_s + rules.gap_s - now_s
    return left_s if left_s > _INSTANT_S else None


# ------------------------------------------------------------ who is next


def _age(one: Asking) -> tuple[float, str]:
    return one.since_s, one.job


def _fifo(asking: Sequence[Asking], view: SliceView, now_s: float) -> Asking:
    return min(asking, key=_age)


def _round_robin(asking: Sequence[Asking], view: SliceView, now_s: float) -> Asking:
    last = view.holder or view.last or ""
    return min(asking, key=lambda one: (one.job <= last, one.job))


def _hrrs(rules: SliceRules) -> _Pick:
    def pick(asking: Sequence[Asking], view: SliceView, now_s: float) -> Asking:
        top = max(one.priority for one in asking)
        best = _best(_within_share([one for one in asking if one.priority == top]), view, now_s)
        oldest_first = sorted(asking, key=_age)
        return best if _all_in_time(best, oldest_first, now_s) else oldest_first[0]

    def _best(equals: Sequence[Asking], view: SliceView, now_s: float) -> Asking:
        def rank(one: Asking) -> tuple[float, bool, float, str]:
            resident = one.job in view.resident
            favour = 1.0 + rules.hysteresis if resident else 1.0
            return -one.ratio(now_s) * favour, not resident, *_age(one)

        return min(equals, key=rank)

    def _all_in_time(first: Asking, oldest_first: Sequence[Asking], now_s: float) -> bool:
        """Whether all others still begin in time if ``first`` runs now, and they after it."""
        begins_s = now_s + first.slice_s
        for one in oldest_first:
            if one is not first:
                if begins_s > one.since_s + rules.starvation_s:
                    return False
                begins_s += one.slice_s
        return True

    return pick


def _within_share(equals: Sequence[Asking]) -> list[Asking]:
    """Those that have not used more than their share allows; at least one."""
    least = min(one.used_s / one.share for one in equals)
    return [one for one in equals if one.used_s - least * one.share <= LAG_SLICES * one.slice_s]
