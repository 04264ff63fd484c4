"""Accounts for the use of one training service and what it has saved, as far as this life of the head has seen it.

    held_s     time for which the service served at least one job: its cost
    alone_s    time for which each job would have kept a trainer of its own: its time on the service, less its waits
               there for other jobs and for its state
    saving = 1 - held_s / alone_s        bubble = 1 - computed time / held_s

A job counts from the beginning of its first step until it leaves; before that its processes are being started.

slowdown = time of a job's steps / their time with the service to themselves

Pure: times are seconds on any one clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from actors.policies.sharing.job_profile import slowdown, step_alone_s


@dataclass
class JobUse:
    """Sums up one job's use of the service."""

    since_s: float | None = None
    """Time at which the job's first step began; None: before that."""
    steps: int = 0
    waited_s: float = 0.0
    """Seconds for which the job's calls waited for other jobs."""
    switch_s: float = 0.0
    """Seconds in which the job's state was brought to the device that computes with it."""
    compute_s: float = 0.0
    steps_s: float = 0.0
    """Seconds that the job's steps took; with the service to themselves, they would have taken ``steps_alone_s``."""
    steps_alone_s: float = 0.0

    @property
    def slowdown(self) -> float | None:
        """Factor by which sharing has made the job's steps longer. None before the first step."""
        return slowdown(self.steps_s, self.steps_alone_s) if self.steps else None

    def alone_s(self, now_s: float) -> float:
        """Seconds for which the job would have kept a trainer of its own."""
        return 0.0 if self.since_s is None else max(0.0, now_s - self.since_s - self.waited_s - self.switch_s)


@dataclass
class ServiceUse:
    """Sums up all jobs' use of one service."""

    jobs: dict[str, JobUse] = field(default_factory=dict[str, JobUse])
    """Jobs that have a place there now."""
    served: list[str] = field(default_factory=list[str])
    """Jobs that have had a step there, in order."""
    _past_held_s: float = 0.0
    _past_alone_s: float = 0.0
    _past_compute_s: float = 0.0
    _past_steps: int = 0
    _held_since_s: float | None = None

    def joined(self, job: str) -> None:
        self.jobs[job] = JobUse()

    def left(self, job: str, now_s: float) -> None:
        """Remove the job; its use stays in the sums. Unknown jobs have left already."""
        use = self.jobs.pop(job, None)
        if use is None:
            return
        self._past_alone_s += use.alone_s(now_s)
        self._past_compute_s += use.compute_s
        self._past_steps += use.steps
        if self._held_since_s is not None and all(other.since_s is None for other in self.jobs.values()):
            self._past_held_s += now_s - self._held_since_s
            self._held_since_s = None

    def step(
        self, job: str, now_s: float, seconds: float, *, waited_s: float, switch_s: float, compute_s: float
    ) -> None:
        """A step of ``job``, which took ``seconds``, was committed."""
        if (use := self.jobs.get(job)) is None:
            return
        if use.since_s is None:
            use.since_s = now_s - seconds
            self.served.append(job)
        if self._held_since_s is None:
            self._held_since_s = use.since_s
        use.steps += 1
        use.waited_s += waited_s
        use.switch_s += switch_s
        use.compute_s += compute_s
        use.steps_s += seconds
        use.steps_alone_s += step_alone_s(seconds, waited_s=waited_s, switch_s=switch_s, busy_s=compute_s)

    @property
    def steps(self) -> int:
        return self._past_steps + sum(use.steps for use in self.jobs.values())

    @property
    def compute_s(self) -> float:
        return self._past_compute_s + sum(use.compute_s for use in self.jobs.values())

    def held_s(self, now_s: float) -> float:
        return self._past_held_s + (now_s - self._held_since_s if self._held_since_s is not None else 0.0)

    def alone_s(self, now_s: float) -> float:
        return self._past_alone_s + sum(use.alone_s(now_s) for use in self.jobs.values())

    def saving(self, now_s: float) -> float | None:
        """Fraction of the trainers' time that was saved; below 0: more was spent. None before the first step."""
        alone_s = self.alone_s(now_s)
        return 1.0 - self.held_s(now_s) / alone_s if self.steps and alone_s > 0 else None

    def bubble(self, now_s: float) -> float | None:
        """Fraction of the held time in which the service computed nothing. None before the first step."""
        held_s = self.held_s(now_s)
        return max(0.0, 1.0 - self.compute_s / held_s) if self.steps and held_s > 0 else None

    def slowdown(self) -> float | None:
        """The largest slowdown of the jobs that are there now. None before their first steps."""
        return max((use.slowdown for use in self.jobs.values() if use.slowdown is not None), default=None)

    def sentence(self, service: str, now_s: float) -> str:
        """Sentence for people, at the end: what the service has done and saved. Empty before the first step."""
        saving = self.saving(now_s)
        if saving is None:
            return ""
        held_s, alone_s = self.held_s(now_s), self.alone_s(now_s)
        return (
            f"service {service}: {self.steps} steps of {', '.join(self.served)} in {held_s:.1f} s of one trainer; "
            f"alone, theirs would have been kept for {alone_s:.1f} s ({saving:.0%} saved)"
        )
