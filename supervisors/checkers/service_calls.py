"""Checks of what training services computed: each call once, for the life that asked for it, burst by burst.

    calls as they arrived ─────────────────┐
    calls as backends computed them, when ─┴─▶ ServiceRecord ─▶ check_services ─▶ violations

Times are seconds on any one clock; a *process* is one life of a service's process, a *life* is one of a job's bundle.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from configs.services import QueueConfig
from supervisors.checkers.history import Violation

CALLS, LIVES, BURSTS, TURNS = "service_calls", "bundle_lives", "bursts", "turns"
START: Final = "start"
"""Name of the call that makes a bundle, among the calls of its life."""
_ENDS_BURST: Final = ("export_segment", "export_checkpoint")
_INSTANT_S: Final = 1e-6

SERVICE_PROMISES: Final[dict[str, str]] = {
    CALLS: "a training service computes each call once, in the order in which its trainer made them",
    LIVES: "no bundle computes once another life of it has begun, and none before the last one has ended",
    BURSTS: "one call computes at a time, and no other job's within a burst",
    TURNS: "nobody is passed by who asked later once it has waited for the guard, nor waits while nothing is computed",
}


@dataclass(kw_only=True, slots=True, eq=False)
class Computed:
    """One call that a backend has begun to compute."""

    process: str
    job: str
    life: str
    what: str
    """Kind of the call, then after a blank what tells it apart from others of its kind; or START."""
    asked_s: float
    """Time from which the call waited for its slice."""
    began_s: float
    ended_s: float | None = None
    """Time at which the call was done; None: its process died first."""

    @property
    def ends_burst(self) -> bool:
        return self.what.partition(" ")[0] in _ENDS_BURST

    @property
    def until_s(self) -> float:
        return self.began_s if self.ended_s is None else self.ended_s


@dataclass(kw_only=True)
class ServiceRecord:
    """Holds what was seen of all training services of a head."""

    queues: dict[str, QueueConfig] = field(default_factory=dict[str, QueueConfig])
    """Process → the rules of its queue."""
    asked: dict[str, dict[int, list[str]]] = field(default_factory=dict[str, dict[int, list[str]]])
    """Life → number of a call → what was asked for; two entries if it was repeated for something else."""
    computed: list[Computed] = field(default_factory=list[Computed])
    """Calls in the order in which they began."""
    over_s: dict[str, float] = field(default_factory=dict[str, float])
    """Life → time at which its service considered it over."""
    disturbed: set[str] = field(default_factory=set[str])
    """Processes that were halted or slow, where a wait while nothing is computed is no violation."""
    moving_s: float = 0.0
    """Longest time that moving trained state may take."""


def check_services(record: ServiceRecord) -> Iterator[Violation]:
    """Hold what was seen against every promise."""
    yield from _each_once(record)
    yield from _lives(record)
    by_process: defaultdict[str, list[Computed]] = defaultdict(list)
    for call in record.computed:
        by_process[call.process].append(call)
    for process, calls in by_process.items():
        yield from _one_at_a_time(calls)
        yield from _whole_bursts(calls, record.queues[process].gap_s, record)
        yield from _nobody_is_passed(calls, record.queues[process])
        if process not in record.disturbed:
            yield from _nobody_waits_for_nothing(calls, record.queues[process].gap_s + record.moving_s)


def _each_once(record: ServiceRecord) -> Iterator[Violation]:
    """The calls computed for a life are a prefix of those that it asked for."""
    by_life: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for call in record.computed:
        if call.what != START:
            by_life[call.job, call.life].append(call.what)
    for (job, life), computed in by_life.items():
        numbered = record.asked.get(life, {})
        for number, whats in sorted(numbered.items()):
            if len(whats) > 1:
                yield _wrong(CALLS, f"call {number} of {job} was made twice, for {whats[0]} and for {whats[1]}")
        asked = [numbered[number][0] for number in sorted(numbered)]
        for place, what in enumerate(computed):
            wanted = asked[place] if place < len(asked) else "nothing"
            if what != wanted:
                kind = "twice" if what in computed[:place] else "though it was not asked for"
                yield _wrong(CALLS, f"{job} had {what} computed {kind}, where {wanted} was asked for")
                break


def _lives(record: ServiceRecord) -> Iterator[Violation]:
    newest: dict[str, Computed] = {}
    before: defaultdict[str, set[str]] = defaultdict(set)
    for call in record.computed:
        last = newest.get(call.job)
        if call.life in before[call.job]:
            yield _wrong(LIVES, f"{call.job} had {call.what} computed by a bundle whose next life had begun")
        if last is not None and last.life != call.life:
            before[call.job].add(last.life)
            still = last.ended_s is None or last.ended_s > call.began_s + _INSTANT_S
            if still and last.process == call.process:
                yield _wrong(LIVES, f"a bundle of {call.job} began while {last.what} of the one before it computed")
        newest[call.job] = call


def _one_at_a_time(calls: Sequence[Computed]) -> Iterator[Violation]:
    for one, other in pairwise(calls):
        if one.ended_s is None or one.ended_s > other.began_s + _INSTANT_S:
            yield _wrong(BURSTS, f"{other.what} of {other.job} was computed beside {one.what} of {one.job}")


def _ends_by_what_follows(call: Computed, number: int, record: ServiceRecord) -> bool:
    """Whether ``call``, the ``number``-th of its life, ended its burst, by the call that was asked for next.

    It did if it is a step that is not published, since its version already was, or made a bundle that loads no
    checkpoint. The next call is looked up among those asked for, since it may never be computed.
    """
    follows = record.asked.get(call.life, {}).get(number + 1, [""])[0]
    if call.what == START:
        return not follows.startswith("load")
    return call.what.startswith("step") and follows.startswith(("score", "accumulate"))


def _whole_bursts(calls: Sequence[Computed], gap_s: float, record: ServiceRecord) -> Iterator[Violation]:
    numbers: Counter[str] = Counter()
    for one, other in pairwise(calls):
        numbers[one.life] += one.what != START
        idle_s = other.began_s - one.until_s
        is_over = record.over_s.get(one.life, float("inf")) <= other.began_s + _INSTANT_S
        is_over = is_over or _ends_by_what_follows(one, numbers[one.life], record)
        if other.job != one.job and not one.ends_burst and not is_over and idle_s < gap_s - _INSTANT_S:
            what = f"{other.what} of {other.job} came into a burst of {one.job}, {idle_s:.3g} s after {one.what}"
            yield _wrong(BURSTS, what)


def _nobody_is_passed(calls: Sequence[Computed], queue: QueueConfig) -> Iterator[Violation]:
    """A job that was overdue when a burst ended is not passed by one that asked later."""
    guard_s = {"hrrs": queue.starvation_s, "fifo": 0.0}.get(queue.policy)
    if guard_s is None:
        return
    for place in range(1, len(calls)):
        last, first = calls[place - 1], calls[place]
        if first.job == last.job and not last.ends_burst:
            continue  # the burst goes on, or this job had the choice for itself
        for other in calls[place + 1 :]:
            if (
                other.job != first.job
                and other.what != START
                and other.asked_s + guard_s < last.until_s - _INSTANT_S
                and other.asked_s < first.asked_s - _INSTANT_S
            ):
                waited_s = last.until_s - other.asked_s
                yield _wrong(TURNS, f"{other.job} had waited {waited_s:.3g} s when {first.job}, which came later, went")
                return


def _nobody_waits_for_nothing(calls: Sequence[Computed], allowed_s: float) -> Iterator[Violation]:
    for one, other in pairwise(calls):
        waited_s = other.began_s - max(one.until_s, other.asked_s)
        if other.what != START and waited_s > allowed_s + _INSTANT_S:
            yield _wrong(TURNS, f"{other.what} of {other.job} waited {waited_s:.3g} s while nothing was computed")


def _wrong(checker: str, what: str) -> Violation:
    return Violation(checker=checker, what=what)
