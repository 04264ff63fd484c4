"""Which rollout workers serve which job: slots of elastic nodes, divided by what each job still has to generate.

The gap ratio of RLix: a job's target is its part of all remaining work, weighted by its share; its gap is the target
less what it holds. In words:

- **At least one**: a job with demand has a worker before anybody has two, as far as there are workers that suit. If
  there are fewer than such jobs, those with most work have them.
- **Idle workers** go at once, to the job that holds least of its target. So do those of a job that generates nothing,
  unless it will generate again before ``stay_s`` is over.
- **Moves** between jobs with demand are as few as bring both within one worker of their targets. They begin only where
  the two are ``margin`` of all workers apart in sum, and one and a half workers at least: remaining work changes from
  second to second, and a worker that moves loads weights. No pair of jobs ever swaps workers.
- **A stay**: a worker that came less than ``stay_s`` ago stays, unless a job with demand has no worker, or its own job
  needs none.
- Of a donor's workers the one goes first that is ``warm`` for the other job (same architecture and engine), then the
  one that runs least, since what it runs has to be moved or ended.

Pure: no clock, no I/O, the same view gives the same moves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf

_LEAST_WORKERS = 1.5
"""Number of workers by which two jobs have to be off in sum, however few there are: below, a move gains nothing."""


@dataclass(frozen=True, slots=True)
class LendingRules:
    """Holds the rules that do not change while a fleet runs."""

    stay_s: float
    """Least time for which a worker serves a job."""
    margin: float = 0.1
    """Part of all workers by which two jobs have to be off in sum before one gives to the other."""


@dataclass(frozen=True, slots=True)
class LentWorker:
    """Describes a worker that may be lent."""

    name: str
    job: str | None
    """Job that the worker serves, or goes to; None: no job."""
    since_s: float = 0.0
    """Time at which the worker came to that job."""
    running: int = 0
    """Samples that the worker runs."""
    suits: Collection[str] | None = None
    """Jobs that the worker can serve; None: any."""
    warm: Collection[str] = frozenset()
    """Jobs that the worker could serve without a restart."""


@dataclass(frozen=True, slots=True)
class Borrower:
    """Describes a job that generates, now or later."""

    name: str
    remaining: float
    """Work that the job still has to generate in this step, in any one unit, such as tokens; 0: it needs no worker."""
    resumes_in_s: float = inf
    """Seconds until a job that needs no worker is expected to generate again."""
    share: float = 1.0
    """Weight of the job's work."""
    workers_max: int | None = None
    """Number of workers that the job can use; None: any number."""


@dataclass(frozen=True, slots=True)
class LendingView:
    """Holds all workers that may be lent, and all jobs."""

    workers: Sequence[LentWorker]
    jobs: Sequence[Borrower]


@dataclass(frozen=True, slots=True)
class Lend:
    """Sends a worker to a job."""

    worker: str
    job: str


def decide(rules: LendingRules, view: LendingView, now_s: float) -> list[Lend]:
    """Moves to make now, each worker once at most."""
    soon = {job.name for job in view.jobs if not job.remaining and job.resumes_in_s < rules.stay_s}
    kept = [worker for worker in view.workers if worker.job in soon]
    target = targets(view.jobs, len(view.workers) - len(kept)) | dict.fromkeys(soon, 0.0)
    return list(_Division(rules, now_s, target, soon, view.workers).moves())


def targets(jobs: Sequence[Borrower], workers: int) -> dict[str, float]:
    """How many of the ``workers`` each job should have: 1 at least with demand, 0 without; most work comes first."""
    asking = sorted((job for job in jobs if job.remaining > 0), key=lambda job: (-job.remaining * job.share, job.name))
    found = {job.name: 1.0 for job in asking} | {job.name: 0.0 for job in jobs if job.remaining <= 0}
    sharing, left = asking[:workers], float(workers)
    while sharing:
        work = sum(job.remaining * job.share for job in sharing)
        parts = {job.name: left * job.remaining * job.share / work for job in sharing}
        low = {name: 1.0 for name, part in parts.items() if part < 1}
        high = {job.name: _most(job) for job in sharing if parts[job.name] > _most(job)}
        # one bound at a time, the one that is missed by more, as for CSS flexboxes: fixing it may satisfy the other
        fixed = high if sum(parts[name] for name in high) - sum(high.values()) >= _short(low, parts) else low
        if not low and not high:
            return found | parts
        found |= fixed
        left -= sum(fixed.values())
        sharing = [job for job in sharing if job.name not in fixed]
    return found


def _most(job: Borrower) -> float:
    return inf if job.workers_max is None else float(max(1, job.workers_max))


def _short(low: dict[str, float], parts: dict[str, float]) -> float:
    return sum(low[name] - parts[name] for name in low) if low else -inf


@dataclass(slots=True)
class _Division:
    """Makes one move after another, each from what the ones before have left."""

    rules: LendingRules
    now_s: float
    target: dict[str, float]
    soon: set[str]
    """Jobs that generate nothing, and will again soon."""
    workers: Sequence[LentWorker]
    held: dict[str, int] = field(init=False)
    of: dict[str | None, list[LentWorker]] = field(init=False)
    """Workers of each job that have not moved yet; those of None serve nobody."""
    apart: set[tuple[str | None, str]] = field(default_factory=set[tuple[str | None, str]])
    """Pairs that were far enough apart for a first move, and go on until they are even."""

    def moves(self) -> Iterator[Lend]:
        self.of = {None: [], **{name: [] for name in self.target}}
        for worker in self.workers:
            self.of[worker.job if worker.job in self.target else None].append(worker)
        self.held = {name: len(self.of[name]) for name in self.target}
        while move := self._next():
            donor, worker, job = move
            self.of[donor].remove(worker)
            if donor is not None:
                self.held[donor] -= 1
            self.held[job] += 1
            self.apart.add((donor, job))
            yield Lend(worker.name, job)

    def _next(self) -> tuple[str | None, LentWorker, str] | None:
        needy = [name for name, target in self.target.items() if target > self.held[name]]
        for job in sorted(needy, key=lambda name: self.held[name] / self.target[name]):
            for donor in sorted(self.of, key=self._stinginess):
                able = [worker for worker in self.of[donor] if self._may_go(donor, worker, job)]
                if able:
                    return donor, min(able, key=lambda one: (job not in one.warm, one.running, one.name)), job
        return None

    def _stinginess(self, donor: str | None) -> tuple[bool, bool, float, str]:
        if donor is None:
            return False, False, 0.0, ""
        return True, self.target[donor] > 0, self.target[donor] - self.held[donor], donor

    def _may_go(self, donor: str | None, worker: LentWorker, job: str) -> bool:
        if donor == job or not (worker.suits is None or job in worker.suits):
            return False
        if donor is None or not (self.target[donor] or donor in self.soon):
            return True
        if not self.held[job]:
            return self.held[donor] > 1 or donor in self.soon
        surplus, gap = self.held[donor] - self.target[donor], self.target[job] - self.held[job]
        if donor in self.soon or surplus <= 0 or self.now_s - worker.since_s < self.rules.stay_s:
            return False
        trigger = max(_LEAST_WORKERS, self.rules.margin * len(self.workers))
        return surplus + gap >= (1.0 if (donor, job) in self.apart else trigger)
