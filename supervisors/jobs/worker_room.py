"""How many rollout workers the machines of a head take: each is a process with a model of its own.

Beyond one for each core they take turns, and people are warned; beyond ``limits.workers_per_core`` none is started.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from configs.checks.checks import cores_here, has_gpu
from configs.schema import JobConfig
from supervisors.machine.membership.nodes import Node


class Room(NamedTuple):
    """Says how much room the machines of a head have for rollout workers."""

    cores: int
    """Cores of the head's own machine."""
    slots: int
    """Slots of the other nodes."""

    @classmethod
    def of(cls, nodes: Sequence[Node]) -> Room:
        return cls(cores_here(), sum(node.slots for node in nodes if not node.local))

    def most(self, job: JobConfig) -> int:
        """The largest number of workers that are started."""
        return job.limits.workers_per_core * self.cores + self.slots

    def refusal(self, job: JobConfig, workers: int) -> str:
        """Why so many workers are not started; empty if they are."""
        workers -= len(job.rollout.servers)  # these compute nothing
        if workers <= self.most(job):
            return ""
        return (
            f"workers: {workers} is more than the {self.most(job)} that there is room for: limits.workers_per_core "
            f"{job.limits.workers_per_core} x {self.cores} cores here, and {self.slots} slots of other nodes"
        )

    def warning(self, job: JobConfig, workers: int) -> str:
        """A warning for people about so many workers; empty if they have a core each, or need none."""
        workers -= len(job.rollout.servers)  # these compute nothing
        on_cpu = job.rollout.engine == "torch" and (job.rollout.device == "cpu" or not has_gpu())
        if not on_cpu or workers <= self.cores + self.slots:
            return ""
        return (
            f"{workers} rollout workers share {self.cores} cores"
            f"{f' and {self.slots} slots of other nodes' if self.slots else ''}: they take turns, and the trainer "
            f"waits for the slowest; {max(1, self.cores + self.slots - 1)} leave it a core"
        )
