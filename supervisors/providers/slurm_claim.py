"""A claim says which head owns the Slurm jobs of a run: a job held for ever, whose comment its head renews.

    others' claims ─▶ watched for slurm_claim_s ─┬─ one is renewed, or new ─▶ refused: another head is alive
                                                 └─ silent ─▶ ours is submitted, held ─▶ renewed ─▶ … ─▶ cancelled
                      two at the same time: the one submitted first, which both see, stays

Invariants
- Clocks are not compared: a holder is alive if the comment of its claim changes while it is watched.
- A head that has submitted a claim looks for older ones before it touches any other job of the run.
- An outage of Slurm ends no claim: a head that wants to take it could not ask Slurm either.
- A claim that could not be renewed is not taken. If its ``sbatch`` was not answered, it is found by name and comment.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Final

from configs.limits import Limits
from supervisors.providers.slurm_commands import JobRow, Slurm, SlurmError
from supervisors.providers.slurm_script import MachineJob
from supervisors.tree.errors import ProviderError

LOOKS: Final = 10
"""Number of looks at others' claims before they count as left behind."""
RENEWALS: Final = 3
"""Number of renewals within the time after which a silent holder is given up."""
_SCRIPT: Final = """#!/bin/bash
# It is held for ever, and says that a head is alive which owns the other jobs of its run. There is nothing to run.
"""


class SlurmClaim:
    """Gives one process the right to start the run's machines: from ``take``, for as long as ``keep`` runs."""

    def __init__(self, slurm: Slurm, jobs: MachineJob, limits: Limits) -> None:
        self._slurm, self._jobs, self._silent_s = slurm, jobs, limits.slurm_claim_s
        self._id = ""
        self._renewals = 0

    async def take(self) -> None:
        """Take the claim, and with it the run's jobs.

        Raises:
            SlurmError: the cluster refuses, or does not answer.
            ProviderError: another head owns the jobs.
        """
        silent = {row.id: row.comment for row in await self._others()}
        for _ in range(LOOKS if silent else 0):
            await asyncio.sleep(self._silent_s / LOOKS)
            for row in await self._others():
                if silent.get(row.id) != row.comment:
                    raise _refused(row)
        try:
            await self._submit()
            await self._renew()  # if the site forbids writing comments, nothing would show that this head is alive
            older = [row for row in await self._others() if row.id not in silent and int(row.id) < int(self._id)]
            if older:
                raise _refused(older[0])
            if silent:
                await self._slurm.cancel(list(silent))
        except BaseException as error:
            with contextlib.suppress(ProviderError):
                await self.release()
            if isinstance(error, SlurmError):
                raise SlurmError(f"its claim, a job that is held, cannot be had: {error}") from error
            raise

    async def keep(self, lost: Callable[[str], None]) -> None:
        """Renew the claim until cancelled. ``lost`` is told, once, that another head has taken it."""
        while True:
            await asyncio.sleep(self._silent_s / RENEWALS)
            try:
                if own := await self._own():
                    self._id = own[0].id
                    await self._renew()
                    continue
                if not (others := await self._others()):
                    await self._submit()  # somebody cancelled it
                    continue
            except (SlurmError, OSError):  # OSError: no file or process can be had just now
                continue  # nothing to report: those who start machines report it
            self._id = ""
            lost(f"another head owns the machines of this run now: {_holder(others[0])}")
            return

    async def release(self) -> None:
        """Cancel the claim, so that the next head need not wait. Raises SlurmError."""
        self._id = ""
        if own := await self._own():
            await self._slurm.cancel([row.id for row in own], name=self._jobs.mark)

    @property
    def _comment(self) -> str:
        return f"{self._jobs.comment} {socket.gethostname()} {self._renewals}"

    async def _submit(self) -> None:
        name = self._jobs.mark
        options = [*self._jobs.options(name), "--hold", "--output=/dev/null", f"--comment={self._comment}"]
        self._id = await self._slurm.submit(options, _SCRIPT)

    async def _renew(self) -> None:
        self._renewals += 1
        await self._slurm.comment(self._id, self._comment)

    async def _own(self) -> list[JobRow]:
        """Claims of this head: more than one if an ``sbatch`` was not answered."""
        rows = await self._slurm.jobs(f"{self._jobs.comment} ")
        return [row for row in rows if row.name == self._jobs.mark and not row.is_over]

    async def _others(self) -> list[JobRow]:
        """Claims of other heads of this run, oldest first."""
        name, own = self._jobs.mark, self._jobs.comment
        rows = [row for row in await self._slurm.jobs(f"{name} ") if row.name == name and not row.is_over]
        return sorted((row for row in rows if not row.comment.startswith(own)), key=lambda row: int(row.id))


def _refused(claim: JobRow) -> ProviderError:
    return ProviderError(
        f"another head owns the machines of this run: {_holder(claim)}, and is alive; end that one, or start this one "
        "with a run directory of its own"
    )


def _holder(claim: JobRow) -> str:
    words = claim.comment.split()
    return f"the head on {words[2] if len(words) > 2 else 'a machine that is not named'} holds the Slurm job {claim.id}"
