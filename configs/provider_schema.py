"""The job file's ``provider.slurm``: what machines of a cluster are asked for with. All of it is passed on as it is."""

from __future__ import annotations

from configs.section import Section


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
