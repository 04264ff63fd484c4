"""What the processes of a run hold of the machine, again and again: resident memory, file descriptors, threads.

    /proc of all processes below some pids ──▶ Sample, every few seconds ──▶ Life, one for each pid ──▶ Growth

Invariants
- A process is known by its pid; its name is what the run calls it, or its parent's with ``/child``.
- Growth of memory compares the median of a life's last quarter with that of its first one, after the warm-up. Of what
  is counted, the least of the last quarter with the most of the first: connections come and go, leaks stay.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import psutil

MIB: Final = 1 << 20
_COURSE: Final = 12


@dataclass(frozen=True, slots=True)
class Sample:
    """One process at one time."""

    at_s: float
    resident_bytes: int
    own_bytes: int
    """The part of them that no other process and no file backs."""
    fds: int
    threads: int


@dataclass(slots=True)
class Life:
    """What was seen of one pid."""

    name: str
    pid: int
    samples: list[Sample] = field(default_factory=list[Sample])

    def after(self, at_s: float) -> Sequence[Sample]:
        return [sample for sample in self.samples if sample.at_s >= at_s]


class Sampler:
    """Looks at ``roots`` and all that they have started."""

    def __init__(self, roots: Mapping[str, int]) -> None:
        self._roots = roots
        self.lives: dict[int, Life] = {}

    def look(self, at_s: float, names: Mapping[int, str]) -> None:
        """One sample of each process. ``names``: what the run calls some of them, by pid."""
        for name, pid in self._roots.items():
            try:
                root = psutil.Process(pid)
                family = [root, *root.children(recursive=True)]
            except psutil.NoSuchProcess:
                continue
            known = {pid: name} | dict(names)
            for process in family:
                self._take(process, at_s, known)

    def _take(self, process: psutil.Process, at_s: float, known: dict[int, str]) -> None:
        try:
            with process.oneshot():
                memory, parent = process.memory_info(), process.ppid()
                sample = Sample(at_s, memory.rss, memory.rss - memory.shared, process.num_fds(), process.num_threads())
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return
        name = known.setdefault(process.pid, f"{known.get(parent, 'unknown')}/child")
        life = self.lives.setdefault(process.pid, Life(name, process.pid))
        if "/child" in life.name:
            life.name = name  # the run has told of it since
        life.samples.append(sample)


@dataclass(frozen=True, slots=True)
class Growth:
    """How much one life of a process has grown."""

    name: str
    seconds: float
    resident_mib: tuple[float, float]
    """At its beginning and at its end."""
    own_mib: tuple[float, float]
    fds: tuple[int, int]
    """Most at its beginning, least at its end."""
    threads: tuple[int, int]
    """The same."""
    course_mib: tuple[float, ...] = ()
    """Resident memory at a dozen times from the warm-up on: what settles looks another than what leaks."""

    @property
    def drift(self) -> float:
        """Growth of resident memory: 0.05 is 5 % more at the end."""
        first, last = self.resident_mib
        return last / first - 1.0


def growth(life: Life, since_s: float, least_s: float) -> Growth | None:
    """The growth of a life, from ``since_s`` on; None if it was seen for less than ``least_s``."""
    samples = life.after(since_s)
    if len(samples) < 4 or samples[-1].at_s - samples[0].at_s < least_s:
        return None
    quarter = len(samples) // 4
    first, last = samples[:quarter], samples[-quarter:]

    def typical(name: str) -> tuple[float, float]:
        begin, end = (statistics.median(getattr(sample, name) for sample in part) for part in (first, last))
        return round(begin / MIB, 1), round(end / MIB, 1)

    def kept(name: str) -> tuple[int, int]:
        return max(getattr(sample, name) for sample in first), min(getattr(sample, name) for sample in last)

    seconds = samples[-1].at_s - samples[0].at_s
    course = tuple(round(each.resident_bytes / MIB, 1) for each in samples[:: max(1, len(samples) // _COURSE)])
    return Growth(
        life.name, seconds, typical("resident_bytes"), typical("own_bytes"), kept("fds"), kept("threads"), course
    )
