"""Builds a machine's Slurm job: options of ``sbatch``, and the script whose only step is ``headrace node``.

    bash ─▶ the environment's lines ─▶ exec srun ─▶ headrace node

Slurm signals steps, not the script, when a job is to be preempted or its time is nearly over. So the node is a step;
``exec`` leaves no shell beside it. A preempted job is never requeued: it would come back under its old name.
"""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from configs.schema import JobConfig


@dataclass(frozen=True)
class MachineJob:
    """Holds what the jobs of all machines of a run have in common.

    Args:
        join: the head's endpoint, as the machines reach it.
        mark: label that identifies the jobs as this run's.
        leave_s: seconds before the end of a time limit at which they are told to leave.
        life: random name of this process, which identifies the jobs as this head's.
    """

    job: JobConfig
    join: str
    mark: str
    logs: Path
    keys: Path | None
    leave_s: float
    life: str

    @property
    def comment(self) -> str:
        """Comment that says whose a job is: mark of the run and name of this head."""
        return f"{self.mark} {self.life}"

    def options(self, node: str) -> list[str]:
        """Options of ``sbatch``; they win over variables like SBATCH_PARTITION, and later ones over earlier ones."""
        slurm = self.job.provider.slurm
        log = str(self.logs / f"{node}.log").replace("%", "%%")  # Slurm fills in what follows a %
        found = [f"--output={log}"]
        for option, value in (("partition", slurm.partition), ("account", slurm.account), ("time", slurm.time_limit)):
            found += [f"--{option}={value}"] if value else []
        found += ["--exclusive"] if slurm.exclusive else []
        found += [word for line in slurm.sbatch for word in shlex.split(line)]
        found += [f"--job-name={node}", f"--comment={self.comment}", "--nodes=1", "--ntasks=1", "--no-requeue"]
        return [*found, f"--signal=TERM@{math.ceil(self.leave_s)}"]

    def script(self, node: str, kind: str) -> str:
        slurm, provider = self.job.provider.slurm, self.job.provider
        command = slurm.command or shlex.join([sys.executable, "-P", "-m", "main"])
        words = ["node", "--join", self.join, "--name", node, "--kind", kind, "--slots", str(provider.slots)]
        words += ["--notice", f"{provider.notice_s:g}"] if provider.notice_s else []
        keys = slurm.keys or (str(self.keys.resolve()) if self.keys is not None else "")
        words += ["--keys", keys] if keys else []
        return script(slurm.environment, f"{command} {shlex.join(words)}")


def head_script(job: JobConfig, command: str, file: Path, run_dir: Path, keys: Path | None) -> str:
    """An sbatch file that starts the head: it begins the run, or resumes it if it has begun."""
    slurm = job.provider.slurm
    secret = shlex.quote(str(keys.resolve())) if keys is not None else "head-keys"
    limit = f"#SBATCH --time={slurm.time_limit}" if slurm.time_limit else "##SBATCH --time=1-0"
    account = f"#SBATCH --account={slurm.account}" if slurm.account else "##SBATCH --account=ACCOUNT"
    comments = [
        f"# The head of {job.name}: trainer, scheduler, scorers. It asks for its other machines itself.",
        f"# Once: headrace keys {secret}. Then: sbatch FILE, and again after its time limit: the run goes on.",
        f"#SBATCH --job-name=headrace-{job.name}",
        "#SBATCH --nodes=1 --ntasks=1 --exclusive",
        "# A partition whose jobs are not preempted, and what the trainer needs; without the first # they count:",
        "##SBATCH --partition=PARTITION",
        "##SBATCH --gres=gpu:1",
        account,
        limit,
        "#SBATCH --output=%x-%j.log --open-mode=append --requeue",
        "# It takes a checkpoint before its time is over.",
        "#SBATCH --signal=TERM@300",
    ]
    directory, name = shlex.quote(str(run_dir)), shlex.quote(str(file))
    begin = [
        f"if [ -e {directory}/job.yaml ]; then",
        f"  set -- --resume {directory}",
        "else",
        f"  set -- {name} --dir {directory}",
        "fi",
    ]
    environment = "\n".join(filter(None, [slurm.environment.strip(), *begin]))
    return script(environment, f'{command} run "$@" --keys {secret}', comments)


def script(environment: str, command: str, comments: Sequence[str] = ()) -> str:
    """A batch script of one step. The step has all cores of its job: ``srun`` would bind one task to one core."""
    lines = ["#!/bin/bash", *comments, *([environment.strip()] if environment.strip() else [])]
    return "\n".join([*lines, f"exec srun --nodes=1 --ntasks=1 --cpu-bind=none {command}", ""])
