"""The job file's ``provider``: where machines come from. Options of a cluster are passed on to it unchanged."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from configs.kubernetes_schema import KubernetesConfig
from configs.section import PositiveFloat, PositiveInt, Section


class SlurmConfig(Section):
    """How a machine is asked for: each is a job of one node, whose only step is ``headrace node``."""

    partition: str | None = None
    """Partition of the jobs; unset: the cluster's default."""
    account: str | None = None
    """Account that is charged; unset: your default."""
    time_limit: str | None = None
    """Time limit of each job, in quotes, such as ``"4:00:00"`` or ``"2-12"`` (days-hours); unset: the partition's. The
    machine is told to go before it is over, and another job takes its place."""
    exclusive: bool = True
    """Each machine is a whole node. False: it has what ``sbatch`` asks for, beside other jobs."""
    sbatch: list[str] = []
    """Further options of ``sbatch``, such as ``["--gres=gpu:4", "--constraint=h100"]``."""
    environment: str = ""
    """Lines of bash that run first on the machine: ``module load``, ``source venv/bin/activate``, ``export``."""
    command: str = ""
    """How ``headrace`` is called there, such as ``apptainer exec --nv image.sif headrace``; unset: by the head's own
    Python, which must be at the same path."""
    keys: str | None = None
    """Key directory of the machines, as they see it; unset: the head's, on a file system that all share."""


class SpotConfig(Section):
    """Machines that come and go as a trace says."""

    trace: str | None = None
    """A file: Bamboo's CSV, SkyPilot's JSON or our own CSV (``docs/guides/spot.md``)."""
    speed: PositiveFloat = 1.0
    """The trace runs this much faster than it was recorded."""
    notice_s: Annotated[float, Field(ge=0)] = 0.0
    """Before a kill of which the trace gives no notice, in seconds of the run; 0: none."""
    nodes_max: PositiveInt | None = None
    """Machines taken at most, of those that the trace offers; unset: all."""


class ProviderConfig(SpotConfig):
    """Who brings machines up and takes them away while the job runs. Needs ``cluster.place_rollout: elastic``."""

    kind: Literal["none", "local", "functions", "slurm", "kubernetes"] = "none"
    """``none``: nodes join by themselves, or not at all. ``local``: node processes on this machine, as ``trace`` says.
    ``functions``: machines of one worker each that are started as a step's plan wants them, sleep once they have
    nothing more to do, and are given back. Needs ``scheduling.policy: planned``. ``slurm``: jobs of a Slurm cluster.
    ``kubernetes``: pods."""
    slurm: SlurmConfig = SlurmConfig()
    kubernetes: KubernetesConfig | None = None
    """``kubernetes``: what its pods are; needed there."""
    notice_s: Annotated[float, Field(ge=0)] = 0.0
    """Before a kill of which the trace gives no notice, in seconds of the run; 0: none. ``slurm``: how long a machine
    is still there after it is told to go, which is the partition's ``GraceTime``. ``kubernetes``: the grace period of
    its pods."""
    nodes_max: PositiveInt | None = None
    """Machines taken at most, of those that the trace offers; unset: all. ``slurm`` and ``kubernetes`` need it: so many
    are kept."""
    slots: PositiveInt = 1
    """Rollout workers on each of its machines."""
    machines: Literal["local", "slurm"] = "local"
    """``functions``: whose machines they are. ``local``: node processes on this machine. ``slurm``: jobs of a Slurm
    cluster, as the section ``slurm`` says; what they wait in its queue counts as their start."""
    idle_s: Annotated[float, Field(ge=0)] | None = None
    """``functions``: one that has slept for this long is given back, unless it would be started again at once. Unset:
    once its sleep has cost as much as starting another one does, by the start times measured and ``asleep_price``."""
    bill_rounding_s: Annotated[float, Field(ge=0)] = 1.0
    """``functions``: each is billed from its start order to its end, rounded up to a whole number of these."""
    asleep_price: Annotated[float, Field(ge=0, le=1)] = 0.1
    """``functions``: price of an asleep second, as a part of that of one awake. One that sleeps holds host memory and
    no device, which costs about a tenth."""
    prewarm_buffer_s: Annotated[float, Field(ge=0)] = 0.5
    """``functions``: they are started so much earlier than they would just be ready for the next step."""

    @property
    def brings_hosts(self) -> bool:
        """Whether its machines are other hosts, which join at ``cluster.listen``."""
        return self.kind == "kubernetes" or self.asks_slurm

    @property
    def asks_slurm(self) -> bool:
        """Whether its machines are jobs of Slurm."""
        return self.kind == "slurm" or (self.kind == "functions" and self.machines == "slurm")
