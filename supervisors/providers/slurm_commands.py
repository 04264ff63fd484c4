"""Slurm as its command line: sbatch, squeue, scancel and scontrol, each call with a deadline.

Invariants
- What a command says on stderr is its own words, and becomes the text of ``SlurmError``; whoever calls decides what
  that means. A command that failed says nothing of the jobs: they may be there or not.
- A head may itself be a Slurm job: variables of its own job, its devices among them, defaults of ``squeue`` and
  ``scancel``, and what would make more of a job than one that we see, are not handed on to the commands.
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

from supervisors.machine.process_log import last_lines
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
"""State of a job that is over but for what its node has to do; it may last for ever."""
_NO_REASON: Final = frozenset({"None", "", "(null)"})


class SlurmError(ProviderError):
    """A command of Slurm's failed; the text is what it said. The jobs may be there or not."""


@dataclass(frozen=True, slots=True)
class JobRow:
    """A row is what ``squeue`` knows of a job. Jobs that are over stay in it for some minutes."""

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
        """Why it waits; empty: nobody knows."""
        return "" if self.reason in _NO_REASON else self.reason


class Slurm:
    """Each call is a process of its own; several may run at the same time."""

    def __init__(self, answer_s: float, log_lines: int) -> None:
        self._answer_s, self._log_lines = answer_s, log_lines

    async def check(self, options: Sequence[str], script: str) -> None:
        """Whether the cluster would take such a job.

        Raises:
            SlurmError: it would not, or does not answer.
        """
        await self._ask("sbatch", "--test-only", *options, stdin=script)

    async def submit(self, options: Sequence[str], script: str) -> str:
        """The id of a new job. Raises SlurmError."""
        said = await self._ask("sbatch", "--parsable", *options, stdin=script)
        return said.strip().splitlines()[-1].split(";")[0]

    async def jobs(self, comment_begins: str) -> list[JobRow]:
        """All jobs of this user whose comment begins so, with those that were over lately. Raises SlurmError."""
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
        async with asyncio.timeout(self._answer_s):  # a file system that hangs keeps a thread, and nobody else
            return await asyncio.to_thread(last_lines, file, self._log_lines)

    async def signal(self, job: str, name: str) -> None:
        """Send the signal to all steps of a running job. Raises SlurmError."""
        await self._ask("scancel", "-s", name, job)

    async def comment(self, job: str, text: str) -> None:
        """Write the comment of a job anew. Raises SlurmError."""
        await self._ask("scontrol", "update", f"JobId={job}", f"Comment={text}")

    async def cancel(self, jobs: Sequence[str], *, name: str | None = None) -> None:
        """``name``: only if they are called so. Raises SlurmError."""
        await self._ask("scancel", *([f"--name={name}"] if name is not None else []), *jobs)

    async def _ask(self, command: str, *arguments: str, stdin: str = "") -> str:
        environment = {name: value for name, value in os.environ.items() if not _NOT_HANDED_ON.match(name)}
        pipe = asyncio.subprocess.PIPE
        with tempfile.TemporaryFile() as script:  # a pipe that a command closes unread is an error of ours
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
    """A time as ``scontrol`` writes it, ``days-hh:mm:ss`` or ``hh:mm:ss``; infinite where it is none."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", text)
    if match is None:
        return math.inf
    days, *rest = (int(part or 0) for part in match.groups())
    return days * 86400 + rest[0] * 3600 + rest[1] * 60 + rest[2]
