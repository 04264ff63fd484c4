"""Adopts whole rank groups: a head that was started again looks once for all processes of a group, on every node.

    the first of its group to ask ─▶ each process, wherever it runs ─┬─ all are there ─▶ each child gets its own
    the others ─▶ wait for that                                      └─ else ─▶ those that are there are stopped

Invariant
- Of a group all processes are adopted or none: those of one that is not whole, or is given up meanwhile, are stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from supervisors.jobs.adoption import adopt
from supervisors.tree.children import Running
from supervisors.tree.restart_budget import ExitCause

if TYPE_CHECKING:
    from actors.core.context import Context
    from supervisors.machine.membership.nodes import Nodes


class GroupAdoption:
    """Finds the processes that a former life of the head has started.

    Args:
        process_of: the name of an actor's process at its node agent.
        stop_timeout_s: limit for stopping a process that is not adopted.
    """

    def __init__(self, nodes: Nodes, process_of: Callable[[str], str], stop_timeout_s: float) -> None:
        self._nodes, self._process_of, self._stop_timeout_s = nodes, process_of, stop_timeout_s
        self._found: dict[str, asyncio.Task[dict[str, Running]]] = {}
        """Leader → processes of its group that were found running: all or none, less those that children were given."""
        self._given_up: set[str] = set()
        """Leaders whose groups were given up before it was known which of their processes run."""

    async def find(
        self, context: Context, name: str, leader: str, replicas: Sequence[Sequence[str]], *, lent: bool = False
    ) -> Running | None:
        """``name`` as it runs already, with all of its group; None: it does not, or was asked for before.

        Args:
            replicas: the names of the group, those on one machine together.
            lent: as ``adopt`` has it.
        """
        if leader not in self._found:
            looking = self._look_for(context, leader, replicas, lent=lent)
            self._found[leader] = asyncio.create_task(looking, name=f"look for what runs of {leader}")
        try:
            found = await asyncio.shield(self._found[leader])
        except asyncio.CancelledError:
            self._given_up.add(leader)
            looking = self._found[leader]
            if looking.done() and (running := looking.result().pop(name, None)) is not None:
                await _stopped(running, 0.0)
            raise
        return found.pop(name, None)

    async def _look_for(
        self, context: Context, leader: str, replicas: Sequence[Sequence[str]], *, lent: bool
    ) -> dict[str, Running]:
        found: dict[str, Running] = {}
        count = sum(map(len, replicas))
        for replica in replicas:
            group = [self._process_of(one) for one in replica] if count > 1 else []
            for name in replica:
                running = await adopt(context, self._nodes, self._process_of(name), name, group=group, lent=lent)
                if running is not None:
                    found[name] = running
        if len(found) == count and leader not in self._given_up:
            return found
        if found:
            context.log.warning("a rank group is not whole, or not wanted", group=leader, runs=sorted(found))
        async with asyncio.TaskGroup() as stops:
            for running in found.values():
                stops.create_task(_stopped(running, self._stop_timeout_s))
        return {}


async def _stopped(running: Running, deadline_s: float) -> None:
    await running.stop(deadline_s, ExitCause.STOPPED)
