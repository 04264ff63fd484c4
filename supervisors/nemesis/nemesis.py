"""The nemesis of a run: commits faults on its real processes, and records each in events.jsonl.

    each strike ─▶ fault_injected | fault_failed (why) ─▶ after its time ─▶ fault_healed

Invariants
- Every strike is recorded when it is done, as injected or as failed. So records are in the order in which strikes were
  done: a strike that waits for its victim's answer may be recorded after one that began later. A fault on the head is
  announced before it takes effect.
- Only processes of this run are hit: the sender of a signal first checks that the process is its child.
- A finished run leaves no fault behind. Faults on links, clocks, speed and nodes end even without nemesis and head.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any, Final

from configs import fault_plan as fp
from supervisors.nemesis.fault_acts import Hit, commit
from supervisors.nemesis.fault_targets import HEAD
from supervisors.nemesis.live_cluster import LiveCluster, Serving
from supervisors.tree.errors import FaultNotPossible
from transport.errors import HeadraceError

if TYPE_CHECKING:
    from supervisors.jobs.job_run import JobRun

_BY_THEMSELVES: Final = "by the timer of the process that injected it"


class Nemesis:
    """Injects the faults of one run."""

    def __init__(self, head: Serving, run: JobRun) -> None:
        self._cluster = LiveCluster(head, run)
        self.record = self._cluster.record

    async def strike(self, fault: fp.FaultBase, rng: random.Random, number: int = 0) -> list[str]:
        """Commit ``fault`` once, now; returns what was hit, for people.

        Raises:
            FaultNotPossible: it cannot be done to this run; the text says why. It is recorded as failed.
        """
        cluster, target = self._cluster, fault.target
        fields: dict[str, Any] = {"fault": number, "kind": fault.kind, "target": str(target)}
        heal_after_s: float | None = getattr(fault, "heal_after_s", None)
        if heal_after_s is not None:
            fields["heal_after_s"] = heal_after_s
        try:
            if target.job not in (None, cluster.job):
                raise FaultNotPossible(f"this run is of job {cluster.job!r}, not {target.job!r}")
            if HEAD in (target.role, target.name, target.node):
                cluster.record("fault_announced", **fields)  # afterwards nobody may be there to do so
                await cluster.flush()
            hit = await commit(cluster, fault, rng)
        except (HeadraceError, TimeoutError) as error:
            cluster.record("fault_failed", **fields, why=str(error))
            if isinstance(error, FaultNotPossible):
                raise
            raise FaultNotPossible(f"{fault.kind} on {target}: {error}") from error
        cluster.record("fault_injected", **fields, hit=", ".join(hit.names))
        if heal_after_s is not None:
            cluster.later(self._heal(fault, number, hit, heal_after_s), f"heal fault {number}")
        return hit.names

    async def _heal(self, fault: fp.FaultBase, number: int, hit: Hit, after_s: float) -> None:
        await asyncio.sleep(after_s)
        how = [await heal() for heal in hit.heals] or [_BY_THEMSELVES]
        names = ", ".join(hit.names)
        self._cluster.record("fault_healed", fault=number, kind=fault.kind, hit=names, how=", ".join(how))

    def stop(self) -> None:
        """Heal nothing more: the run is over."""
        self._cluster.stop()
