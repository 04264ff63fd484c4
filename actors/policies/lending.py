"""Which rollout workers serve which job: slots of elastic nodes, divided by what each job still has to generate.

The gap ratio of RLix: a job's target is its part of all remaining work, weighted by its share; its gap is the target less
what it holds. In words:

- **At least one**: a job with demand has a worker before anybody has two, as far as there are workers that suit. If there
  are fewer than such jobs, those with most work have them.
- **Idle workers** go at once, each to the job with the largest gap for its target; a job that has nothing to generate
  keeps none that another job could use.
- **Moves** between jobs with demand are as few as bring both within one worker of their targets. They begin only where
  the two are ``margin`` of all workers apart in sum, and one and a half workers at least: remaining work changes
  from second to second, a worker that moves loads weights. No pair of jobs ever swaps workers.
- **A stay**: a worker that came less than ``stay_s`` ago stays, unless somebody with demand has none, or its job needs
  none.
- Of a donor's workers the one goes first that is ``warm`` for the other job (same architecture and engine), then the one
  that runs least, since what it runs has to be moved or ended.

Pure: no clock, no I/O, the same view gives the same moves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

_LEAST_WORKERS = 1.5
"""Workers by which two jobs have to be off in sum, however few there are: below, a move gains nothing."""


@dataclass(frozen=True, slots=True)
class LendingRules:
    """These do not change while a fleet runs."""

    stay_s: float
    """Time for which a worker serves a job at least."""
    margin: float = 0.1
    """Part of all workers by which two jobs have to be off in sum before one gives to the other."""


@dataclass(frozen=True, slots=True)
class LentWorker:
    """It is a worker that may be lent."""

    name: str
    job: str | None
    """Job that it serves, or goes to; None: nobody."""
    since_s: float = 0.0
    """Time at which it came to that job."""
    running: int = 0
    """Samples that it runs."""
    suits: Collection[str] | None = None
    """Jobs that it can serve; None: any."""
    warm: Collection[str] = frozenset()
    """Jobs that it could serve without a restart."""


@dataclass(frozen=True, slots=True)
class Borrower:
    """It is a job that generates."""

    name: str
    remaining: float
    """Work that it still has to generate in this step, in any one unit, such as tokens; 0: it needs nobody."""
    share: float = 1.0
    """Weight of its work."""
    workers_max: int | None = None
    """Workers that it can use; None: any number."""


@dataclass(frozen=True, slots=True)
class LendingView:
    """It shows all workers that may be lent, and all jobs."""

    workers: Sequence[LentWorker]
    jobs: Sequence[Borrower]


@dataclass(frozen=True, slots=True)
class Lend:
    """It sends a worker to a job."""

    worker: str
    job: str


def decide(rules: LendingRules, view: LendingView, now_s: float) -> list[Lend]:
    """Moves to make now, each worker once at most."""
    return list(_Division(rules, now_s, targets(view), {one.name: one for one in view.workers}).moves())


def targets(view: LendingView) -> dict[str, float]:
    """How many workers each job should have: 1 at least with demand, as far as they go, and 0 without."""
    asking = sorted(
        (job for job in view.jobs if job.remaining > 0), key=lambda job: (-job.remaining * job.share, job.name)
    )
    workers = len(view.workers)
    found = dict.fromkeys((job.name for job in view.jobs), 0.0) | {job.name: 1.0 for job in asking[:workers]}
    open_jobs, left = asking[:workers], float(workers)
    while open_jobs:  # those whose part lies below or above what they may have get that, and the others share the rest
        work = sum(job.remaining * job.share for job in open_jobs)
        parts = {job.name: left * job.remaining * job.share / work for job in open_jobs}
        low = [job for job in open_jobs if parts[job.name] < 1]
        fixed = low or [job for job in open_jobs if job.workers_max is not None and parts[job.name] > job.workers_max]
        if not fixed:
            return found | parts
        for job in fixed:
            found[job.name] = 1.0 if low else float(max(1, job.workers_max or 1))
            left -= found[job.name]
        open_jobs = [job for job in open_jobs if job not in fixed]
    return found


@dataclass(slots=True)
class _Division:
    """It makes one move after another, each from what the ones before have left."""

    rules: LendingRules
    now_s: float
    target: dict[str, float]
    workers: dict[str, LentWorker]
    held: dict[str, int] = field(init=False)

    def moves(self) -> Iterator[Lend]:
        self.held = dict.fromkeys(self.target, 0)
        for worker in self.workers.values():
            if worker.job in self.held:
                self.held[worker.job] += 1
        everybody = len(self.workers)
        trigger = max(_LEAST_WORKERS, self.rules.margin * everybody)
        moved = set[str]()
        settling = set[tuple[str, str]]()
        while move := self._next(moved, trigger, settling):
            worker, job = move
            donor = worker.job
            if donor in self.held:
                self.held[donor] -= 1
                settling.add((donor, job))
            self.held[job] += 1
            self.workers[worker.name] = replace(worker, job=job, since_s=self.now_s)
            moved.add(worker.name)
            yield Lend(worker.name, job)

    def _next(self, moved: set[str], trigger: float, settling: set[tuple[str, str]]) -> tuple[LentWorker, str] | None:
        """``settling``: pairs that were far enough apart for a first move, and go on until they are even."""
        needy = sorted(
            (name for name, target in self.target.items() if target > self.held[name]),
            key=lambda name: (self.held[name] > 0, self.held[name] / self.target[name], name),
        )
        for name in needy:
            spare = [one for one in self.workers.values() if one.name not in moved and _suits(one, name)]
            spare = [one for one in spare if self._may_go(one, name, trigger, settling)]
            if spare:
                return min(spare, key=lambda one: self._order(one, name)), name
        return None

    def _may_go(self, worker: LentWorker, to: str, trigger: float, settling: set[tuple[str, str]]) -> bool:
        donor = worker.job
        if donor == to:
            return False
        if donor not in self.held or not self.target[donor]:
            return True
        if self.held[donor] <= 1:
            return False
        surplus, gap = self.held[donor] - self.target[donor], self.target[to] - self.held[to]
        if not self.held[to]:
            return True
        stays = self.now_s - worker.since_s < self.rules.stay_s
        return not stays and surplus > 0 and surplus + gap >= (1.0 if (donor, to) in settling else trigger)

    def _order(self, worker: LentWorker, to: str) -> tuple[bool, float, bool, int, str]:
        """Who goes first: one that serves nobody, then one of the donor that has most beyond its target."""
        donor = worker.job if worker.job in self.held else None
        surplus = self.held[donor] - self.target[donor] if donor else 0.0
        return donor is not None, -surplus, to not in worker.warm, worker.running, worker.name


def _suits(worker: LentWorker, job: str) -> bool:
    return worker.suits is None or job in worker.suits
