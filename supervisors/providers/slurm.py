"""The provider ``slurm``: each machine is a job of a Slurm cluster, whose only step is a ``headrace node``.

    start  ─▶ sbatch ─▶ pending ─▶ running: it joins the head ─▶ over ─▶ taken │ failed, with what the cluster says
    notice ─▶ pending: scancel; running: SIGTERM to its step ─▶ it leaves cleanly        kill ─▶ SIGKILL
    the cluster itself: preemption, or a time limit that is near ─▶ SIGTERM to the step ─▶ the same

One task does everything: it submits new jobs, passes orders on, and polls ``squeue``; an order wakes it.

Invariants
- A job is over when ``squeue`` says so, or no longer lists it. A command that fails proves nothing: neither an end nor
  a start. Whether an ``sbatch`` that failed has left a job is seen at the next look, by the job's name.
- A failed job is reported with the end of its log, if the head's machine can read that.
- A job that is completing gets no orders; if its node does not end it within ``cluster_end_s``, it counts as over.
- Jobs carry the run's mark and this head's name in their comment. Those of former lives are cancelled once, when the
  claim (``slurm_claim.py``) has just been taken; afterwards a head touches only its own jobs, since one that was
  stopped for long does not know that another holds the claim now. Its own jobs that belong to no machine are cancelled.
- ``close`` ends all of this head's jobs, even one whose ``sbatch`` seemed to fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from configs.limits import Limits
from supervisors.providers.base import BookedProvider, end_of_log, log
from supervisors.providers.provider import How
from supervisors.providers.slurm_claim import SlurmClaim
from supervisors.providers.slurm_commands import COMPLETING, JobRow, Slurm, SlurmError, seconds
from supervisors.providers.slurm_script import MachineJob
from supervisors.tree.errors import ProviderError

_TAKEN: Final = {
    "PREEMPTED": "was preempted",
    "TIMEOUT": "has reached its time limit",
    "NODE_FAIL": "has lost its node",
}


@dataclass
class _Machine:
    kind: str
    id: str = ""
    state: str = "NEW"
    refused: str = ""
    """Error text of the failed ``sbatch``; empty: it did not fail."""
    order: str = ""
    """Order not yet carried out: ``go`` or ``away``; the latter stands until the job is over."""
    completing_s: float = 0.0
    """Loop time at which the job was first seen completing."""
    told: set[str] = field(default_factory=set[str])


class SlurmProvider(BookedProvider):
    """Provides machines that are jobs of Slurm. Create it on the running loop, ``open`` it, and ``close`` it."""

    def __init__(self, jobs: MachineJob, limits: Limits, slurm: Slurm | None = None) -> None:
        super().__init__()
        self._jobs, self._limits = jobs, limits
        self._slurm = slurm or Slurm(limits.cluster_answer_s, limits.machine_log_lines)
        self._close_window_s = limits.stop_timeout_s
        self._machines: dict[str, _Machine] = {}
        self._trouble = ""
        self._woken = asyncio.Event()
        self._claim = SlurmClaim(self._slurm, jobs, limits)
        self._lives: list[asyncio.Task[None]] = []
        """Tasks that run from ``open`` to ``close``."""
        self._refused = ""
        """Reason for which nothing can be started; empty while machines can."""

    async def open(self) -> None:
        """Ask whether the cluster would start such machines, take the claim, and cancel what a former life has left.

        Raises:
            ProviderError: the cluster would not, in its own words, or another head has this run's machines.
        """
        try:
            await self._slurm.check(self._jobs.options("headrace-check"), self._jobs.script("headrace-check", "spot"))
            await self._claim.take()
        except SlurmError as error:
            raise ProviderError(f"Slurm would not start the machines of provider.slurm: {error}") from error
        self._lives = [asyncio.create_task(self._claim.keep(self._lost), name="claim of the jobs")]
        try:
            if left := [row for row in await self._living() if not row.comment.startswith(self._jobs.comment)]:
                log.warning("jobs of a former life are cancelled", jobs=[row.id for row in left])
                await self._cancel(left)
        except BaseException:
            await self.close()
            raise
        self._lives.append(asyncio.create_task(self._run(), name="slurm jobs"))

    async def close(self) -> None:
        await super().close()
        if self._lives:
            for task in self._lives:
                task.cancel()
            self._lives = []
            await self._sweep()

    # ------------------------------------------------------------ orders

    def _begin(self, node: str, kind: str) -> None:
        if self._refused:
            raise ProviderError(f"{node} cannot be started: {self._refused}")
        self._machines[node] = _Machine(kind)
        self._woken.set()

    def _tell_to_go(self, node: str) -> None:
        self._machines[node].order = "go"
        self._woken.set()

    def _take_away(self, node: str) -> None:
        if (machine := self._machines.get(node)) is not None:
            machine.order = "away"
            self._woken.set()

    # ------------------------------------------------------------ the task

    async def _run(self) -> None:
        while True:
            with self._noting():
                await self._submit()
            await self._pass_on()
            with self._noting():
                await self._look()
            self._woken.clear()
            busy = any(machine.order or machine.refused for machine in self._machines.values())
            try:
                async with asyncio.timeout(self._limits.cluster_look_s / (4 if busy or self._closed else 1)):
                    await self._woken.wait()
            except TimeoutError:
                pass

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        """Log what fails within this context; the next turn tries it again."""
        try:
            yield
        except SlurmError as error:  # an order for a job that is just over, or an unreachable controller
            if (trouble := str(error)) != self._trouble:
                log.warning("slurm does not answer as it should", said=trouble)
                self._trouble = trouble
        except Exception as error:  # noqa: BLE001 (the other jobs still have to be looked after)
            log.exception("looking after slurm's jobs failed")
            self.on_news("slurm", f"looking after its jobs failed: {error!r}")

    async def _submit(self) -> None:
        """Submit new jobs. If ``sbatch`` fails, the next look decides: the job may exist all the same."""
        for node, machine in list(self._machines.items()):
            if machine.state != "NEW":
                continue
            if machine.order or self._refused:
                self._over(node, "failed", self._refused)
                continue
            machine.state = "ASKED"
            try:
                machine.id = await self._slurm.submit(self._jobs.options(node), self._jobs.script(node, machine.kind))
            except SlurmError as error:
                machine.refused = str(error)

    async def _pass_on(self) -> None:
        for machine in list(self._machines.values()):
            if not machine.order or not machine.id or machine.state == COMPLETING:
                continue
            with self._noting():  # an order that fails does not hold up the others
                if machine.state == "RUNNING":
                    await self._slurm.signal(machine.id, "TERM" if machine.order == "go" else "KILL")
                else:
                    await self._slurm.cancel([machine.id])
                if machine.order == "go":
                    machine.order = ""

    async def _look(self) -> None:
        rows = {row.id: row for row in await self._slurm.jobs(self._jobs.comment) if row.name != self._jobs.mark}
        names = {row.name: row for row in rows.values() if not row.is_over}
        for node, machine in list(self._machines.items()):
            if machine.state == "NEW":
                continue
            if not machine.id:
                await self._settle(node, machine, names.get(node))
            elif (row := rows.get(machine.id)) is None or row.name != node:  # Slurm may reuse ids after a crash
                self._over(node, "failed", f"the job {machine.id} is known no more by the mark in its comment")
                with self._noting():  # it may still exist, if a plugin of the site changed the comment
                    await self._slurm.cancel([machine.id], name=node)
            elif row.is_over:
                await self._judge(node, row)
            else:
                self._follow(node, machine, row)
        ours = {machine.id for machine in self._machines.values()}
        if strays := [row.id for row in names.values() if row.id not in ours and row.state != COMPLETING]:
            log.warning("jobs that are nobody's are cancelled", jobs=strays)
            await self._slurm.cancel(strays)

    async def _settle(self, node: str, machine: _Machine, row: JobRow | None) -> None:
        """Decide on a machine whose ``sbatch`` failed, now that ``row`` shows whether the job exists."""
        if row is None:
            self._over(node, "failed", machine.refused)
        else:
            machine.id, machine.refused = row.id, ""
            self._follow(node, machine, row)

    def _follow(self, node: str, machine: _Machine, row: JobRow) -> None:
        now_s = asyncio.get_running_loop().time()
        if row.state == COMPLETING and machine.state != COMPLETING:
            machine.completing_s = now_s
        machine.state = row.state
        if row.is_running:
            self._up(node)
        if row.state == COMPLETING and now_s - machine.completing_s > self._limits.cluster_end_s:
            self._over(node, "taken", f"the job {row.id} is over, but its node {row.nodes} does not say so")
            return
        news = f"the job {row.id} runs on {row.nodes}" if row.is_running else ""
        if row.state == "PENDING" and row.why_not:
            news = f"the job {row.id} waits: {row.why_not}"
        if news and news not in machine.told:
            machine.told.add(news)
            self.on_news(node, news)

    async def _judge(self, node: str, row: JobRow) -> None:
        try:
            details = await self._slurm.details(row.id)
        except SlurmError:  # it is over all the same
            details = {}
        how, words = judged(row, details, self._jobs.leave_s + self._limits.cluster_early_s)
        if how == "failed" and (file := details.get("StdOut")):
            try:
                words += end_of_log(f"its log {file}", await self._slurm.log_lines(Path(file)), self._limits)
            except (OSError, TimeoutError) as error:
                words += f"; its log {file} cannot be read: {type(error).__name__}"
        self._over(node, how, words)

    def _over(self, node: str, how: How, words: str) -> None:
        del self._machines[node]
        self._ended(node, how, words)

    # ------------------------------------------------------------ the end

    async def _sweep(self) -> None:
        """Cancel the remaining jobs, then the claim; report what cannot be cancelled."""
        for work in (self._cancel_own, self._claim.release):
            try:
                await work()
            except ProviderError as error:
                which = f"those whose comment begins with {self._jobs.mark} (squeue --me -o '%i %j %k')"
                self.on_news("slurm", f"{error}; jobs of the run may be left: {which}")

    async def _cancel_own(self) -> None:
        if left := [row for row in await self._living() if row.comment.startswith(self._jobs.comment)]:
            await self._cancel(left)

    async def _living(self) -> list[JobRow]:
        """Jobs of the run that are not over, started by any head, without the claims. Raises SlurmError."""
        mark = self._jobs.mark
        return [row for row in await self._slurm.jobs(f"{mark} ") if not row.is_over and row.name != mark]

    def _lost(self, why: str) -> None:
        """Another head owns the run's machines: nothing is started any more."""
        self._refused = why
        self.on_news("slurm", why)

    async def _cancel(self, rows: list[JobRow]) -> None:
        """Cancel these jobs, and wait until all are over."""
        if living := [row.id for row in rows if row.state != COMPLETING]:
            await self._slurm.cancel(living)
        loop, ids = asyncio.get_running_loop(), {row.id for row in rows}
        deadline_s = loop.time() + self._limits.cluster_end_s
        while left := [row for row in await self._living() if row.id in ids]:
            if loop.time() > deadline_s:
                log.warning("cancelled jobs do not end", jobs=[row.id for row in left])
                left = [row for row in left if row.state != COMPLETING]  # nobody can hasten what a node still has to do
                if not left:
                    return
                raise ProviderError(f"the cancelled Slurm jobs {', '.join(row.id for row in left)} do not end")
            await asyncio.sleep(self._limits.cluster_look_s / 4)


def judged(row: JobRow, details: Mapping[str, str], leave_s: float) -> tuple[How, str]:
    """How a job that is over has ended, ``taken`` or ``failed``, and a sentence that says so.

    A node that obeys ends with code 0, whoever has told it to leave; Slurm 22.05 calls such a job COMPLETED even if it
    was preempted.
    """
    job = f"the job {row.id}"
    if row.state in _TAKEN:
        return "taken", f"{job} {_TAKEN[row.state]}" + (f" on {row.nodes}" if row.nodes else "")
    if details.get("PreemptTime", "None") not in ("None", "Unknown", ""):
        return "taken", f"{job} was preempted on {row.nodes}"
    limit_s, ran_s = seconds(details.get("TimeLimit", "")), seconds(details.get("RunTime", ""))
    if row.state == "COMPLETED" and limit_s - leave_s <= ran_s < math.inf:
        return "taken", f"{job} has left before its time limit of {details['TimeLimit']}"
    parts = [row.state, row.why_not if row.why_not != row.state else ""]
    parts += [
        f"exit code {details['ExitCode']}" if "ExitCode" in details else "",
        f"on {row.nodes}" if row.nodes else "",
    ]
    return "failed", f"{job} is over: {', '.join(filter(None, parts))}"
