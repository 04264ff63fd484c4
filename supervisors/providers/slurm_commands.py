"""Calls Slurm's command line: sbatch, squeue, scancel and scontrol, each call with a deadline.

Invariants
- What a command writes to stderr becomes the text of ``SlurmError``; the caller decides what that means. A command that
  failed says nothing of the jobs: they may exist or not.
- A head may itself be a Slurm job. So the commands do not inherit its variables that describe that job or its devices,
  set defaults of ``squeue`` and ``scancel``, or would make ``sbatch`` wait, or submit an array or to another cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from supervisors.machine.processes.process_log import last_lines
from supervisors.tree.errors import ProviderError

_NOT_HANDED_ON: Final = re.compile(
    r"(SLURM|SQUEUE|SCANCEL)_(?!CONF$)|SBATCH_(ARRAY_INX|CLUSTERS|WAIT)$|(CUDA|ROCR|HIP)_VISIBLE_DEVICES$"
)
_ROW: Final = "%i|%T|%N|%r|%j|%k"
_OVER: Final = frozenset(
    {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
     "SPECIAL_EXIT", "TIMEOUT"}
)  # fmt: skip
COMPLETING: Final = "COMPLETING"
"""State of a job that is over but for its node's clean-up, which may last for ever."""
_NO_REASON: Final = frozenset({"None", "", "(null)"})


class SlurmError(ProviderError):
    """A command of Slurm failed, with this text. Its jobs may exist or not."""


@dataclass(frozen=True, slots=True)
class JobRow:
    """What ``squeue`` says of a job. It lists jobs that are over for some minutes more."""

    id: str
    state: str
    nodes: str
    reason: str
    name: str
    comment: str

    @property
    def is_over(self) -> bool:
        return self.state in _OVER

    @property
    def is_running(self) -> bool:
        return self.state == "RUNNING"

    @property
    def why_not(self) -> str:
        """Why the job waits; empty: Slurm gives no reason."""
        return "" if self.reason in _NO_REASON else self.reason


class Slurm:
    """Runs Slurm's commands, each call as a process of its own; several may run at the same time."""

    def __init__(self, answer_s: float, log_lines: int) -> None:
        self._answer_s, self._log_lines = answer_s, log_lines

    async def check(self, options: Sequence[str], script: str) -> None:
        """Ask whether the cluster would take such a job.

        Raises:
            SlurmError: the cluster would not, or does not answer.
        """
        await self._ask("sbatch", "--test-only", *options, stdin=script)

    async def submit(self, options: Sequence[str], script: str) -> str:
        """Submit a job, and return its id. Raises SlurmError."""
        said = await self._ask("sbatch", "--parsable", *options, stdin=script)
        return said.strip().splitlines()[-1].split(";")[0]

    async def jobs(self, comment_begins: str) -> list[JobRow]:
        """This user's jobs whose comment begins so, with those that ended recently. Raises SlurmError."""
        rows = list[JobRow]()
        for line in (await self._ask("squeue", "--me", "-h", "-t", "all", "-o", _ROW)).splitlines():
            fields = line.split("|", 5)
            if len(fields) == 6 and fields[5].startswith(comment_begins):
                rows.append(JobRow(*fields))
        return rows

    async def details(self, job: str) -> Mapping[str, str]:
        """All that the cluster knows of a job. Raises SlurmError."""
        said = await self._ask("scontrol", "show", "job", "-o", job)
        return dict(field.split("=", 1) for field in said.split() if "=" in field)

    async def log_lines(self, file: Path) -> Sequence[str]:
        """The end of a job's log; none where it lies on another machine. Raises OSError and TimeoutError."""
        async with asyncio.timeout(self._answer_s):  # a file system that hangs blocks only a thread
            return await asyncio.to_thread(last_lines, file, self._log_lines)

    async def signal(self, job: str, name: str) -> None:
        """Send the signal to all steps of a running job. Raises SlurmError."""
        await self._ask("scancel", "-s", name, job)

    async def comment(self, job: str, text: str) -> None:
        """Replace the comment of a job. Raises SlurmError."""
        await self._ask("scontrol", "update", f"JobId={job}", f"Comment={text}")

    async def cancel(self, jobs: Sequence[str], *, name: str | None = None) -> None:
        """Cancel these jobs; with ``name``, only those that are called so. Raises SlurmError."""
        await self._ask("scancel", *([f"--name={name}"] if name is not None else []), *jobs)

    async def _ask(self, command: str, *arguments: str, stdin: str = "") -> str:
        environment = {name: value for name, value in os.environ.items() if not _NOT_HANDED_ON.match(name)}
        pipe = asyncio.subprocess.PIPE
        with tempfile.TemporaryFile() as script:  # a pipe that the command closes unread would raise an error here
            script.write(stdin.encode())
            script.seek(0)
            try:
                process = await asyncio.create_subprocess_exec(
                    command, *arguments, stdin=script, stdout=pipe, stderr=pipe, env=environment
                )
            except OSError as error:
                raise SlurmError(
                    f"{command} cannot be run ({error.strerror}): the head needs Slurm's commands on its PATH"
                ) from error
        try:
            async with asyncio.timeout(self._answer_s):
                said, wrong = await process.communicate()
        except TimeoutError:
            raise SlurmError(f"{command} has not answered within {self._answer_s:g} s") from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError, TimeoutError):
                    process.kill()
                    async with asyncio.timeout(self._answer_s):  # it may hang in the kernel
                        await process.wait()
        if process.returncode:
            words = "; ".join(line.strip() for line in wrong.decode("utf-8", "replace").splitlines() if line.strip())
            raise SlurmError(words or f"{command} ended with code {process.returncode}")
        return said.decode("utf-8", "replace")


def seconds(text: str) -> float:
    """Seconds of a time as ``scontrol`` writes it, ``days-hh:mm:ss`` or ``hh:mm:ss``; infinite if it is none."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", text)
    if match is None:
        return math.inf
    days, *rest = (int(part or 0) for part in match.groups())
    return days * 86400 + rest[0] * 3600 + rest[1] * 60 + rest[2]
