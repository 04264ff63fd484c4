"""The nemesis of a run: commits faults on its real processes, and records each in events.jsonl.

    Fault ─▶ roster of what runs now ─▶ victims ─▶ ┬ signals          NodeFaults beside the victim's node agent
                                                   ├ links, clock     the victim itself, and who is at the other end
                                                   ├ weight chunks    the segment in shared memory, or its streams
                                                   └ the journal      this process
    each strike ─▶ fault_injected | fault_failed (why) ─▶ after its time ─▶ fault_healed

Invariants
- Every strike is recorded once it is done, as injected or as failed: one that waits for its victim's answer may be
  overtaken by a later one. A fault on the head is announced before it takes effect.
- Only processes of this run are hit: a process id is checked against its parent by who sends the signal.
- What heals does so by itself, also when the nemesis or the head are gone; a finished run leaves nothing behind.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

from configs import fault_plan as fp
from supervisors.faults.chunk_faults import mend_all
from supervisors.machine.machine import JOURNAL, LocalMachine
from supervisors.nemesis.fault_acts import ACTS
from supervisors.nemesis.fault_hand import Cluster, Hand
from supervisors.nemesis.fault_targets import HEAD
from supervisors.tree.errors import FaultNotPossible
from transport.errors import HeadraceError

if TYPE_CHECKING:
    from supervisors.jobs.job_run import JobRun

_HEAL_THEMSELVES: Final = (fp.Slow, fp.Partition, fp.LinkFault, fp.Clock)
"""By the clock of whoever commits them."""


class Nemesis:
    """Of one run."""

    def __init__(self, cluster: Cluster, run: JobRun) -> None:
        self._hand = Hand(cluster, run)
        mend_all(run.run_dir)  # what a nemesis before us could not, because its head was killed

    async def strike(self, fault: fp.FaultBase, rng: random.Random, number: int = 0) -> list[str]:
        """Commit ``fault`` once, now; returns what was hit, for people.

        Raises:
            FaultNotPossible: it cannot be done to this run; the text says why. It is recorded as failed.
        """
        fields: dict[str, float | int | str] = {"fault": number, "kind": fault.kind, "target": str(fault.target)}
        heal_after_s = getattr(fault, "heal_after_s", None)
        if heal_after_s is not None:
            fields["heal_after_s"] = heal_after_s
        try:
            if fault.target.job not in (None, self._hand.run.job.name):
                raise FaultNotPossible(f"this run is of job {self._hand.run.job.name!r}, not {fault.target.job!r}")
            if HEAD in (fault.target.role, fault.target.name, fault.target.node):
                self._hand.record("fault_announced", **fields)  # afterwards nobody may be there to do so
                await self._hand.flush()
            hit = await ACTS[type(fault)](self._hand, fault, rng)
        except (HeadraceError, TimeoutError) as error:
            self._hand.record("fault_failed", **fields, why=str(error))
            if isinstance(error, FaultNotPossible):
                raise
            raise FaultNotPossible(f"{fault.kind} on {fault.target}: {error}") from error
        self._hand.record("fault_injected", **fields, hit=", ".join(hit))
        if heal_after_s is not None and isinstance(fault, _HEAL_THEMSELVES):
            hand, how = self._hand, "by the clock of those who committed it"
            hand.heal_after(heal_after_s, lambda: how, fault=number, kind=fault.kind, hit=", ".join(hit))
        return hit

    def stop(self) -> None:
        """Nothing more is healed by us: the run is over."""
        self._hand.stop()
        machine = self._hand.cluster.machine
        if isinstance(machine, LocalMachine):
            machine.full_disks.discard(self._hand.run.run_dir / JOURNAL)

    def record(self, name: str, **fields: float | str) -> None:
        """Into events.jsonl and the log."""
        self._hand.record(name, **fields)
