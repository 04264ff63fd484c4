"""What a running system says of itself over its control socket: states, processes, stalls, and steps as they happen.

    ControlClient ─┬─ watch ─▶ steps, states, messages, what is waited for
                   └─ jobs, tree, nodes, stalls, every console_ask_s

Invariants
- Only verbs that look are used: keys with the read-only role suffice.
- A socket that does not answer is no error: ``reachable`` and ``why`` say so, and it is tried again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from actors.control.client import ControlClient
from actors.control.errors import ControlError, NotFound
from actors.protocol.jobs import JobState
from configs.limits import Limits
from supervisors.cli.console.page_data import Plain
from transport.zmq.security import NodeKeys


class LiveRun:
    """Follows one job of a head. ``changed`` is called with the name of what is new.

    ``where`` returns the head's endpoint; it is called before each try, since a run that is resumed has another one.
    """

    def __init__(
        self,
        where: Callable[[], str],
        job: str | None,
        keys: NodeKeys | None,
        limits: Limits,
        changed: Callable[[str], None],
    ) -> None:
        self._where = where
        self.job = job
        self.reachable = False
        self.why = "its control socket has not answered yet"
        self.status: Plain = {}
        self.tree: list[Plain] = []
        self.nodes: list[Plain] = []
        self.stalls: list[Plain] | None = None
        self.waiting_for = ""
        self.messages: deque[str] = deque(maxlen=limits.console_queue_updates)
        self.rows: deque[Plain] = deque(maxlen=limits.console_steps)
        """Rows of steps as in ``metrics.jsonl``, requested first and then from the watch."""
        self._keys = keys
        self._limits = limits
        self._changed = changed

    @property
    def over(self) -> bool:
        """Whether the job has ended, as the head that ran it says."""
        return self.status.get("state") in [state for state in JobState if state.over]

    async def run(self) -> None:
        """Follow until cancelled."""
        while True:
            try:
                async with ControlClient(self._where(), limits=self._limits, keys=self._keys) as client:
                    await self._choose(client)
                    async with asyncio.TaskGroup() as group:
                        group.create_task(self._ask_again_and_again(client))
                        group.create_task(self._watch(client))
            except* ControlError as errors:
                self._lost(str(errors.exceptions[0]))
            except* (OSError, ValueError) as errors:
                self._lost(str(errors.exceptions[0]))
            await asyncio.sleep(self._limits.console_ask_s)

    def _lost(self, why: str) -> None:
        self.reachable, self.why, self.stalls, self.tree, self.nodes = False, why, None, [], []
        self._changed("live")

    async def _choose(self, client: ControlClient) -> None:
        """Find out which job is meant, and fetch the rows of its steps."""
        jobs = await client.call("jobs")
        names = [str(row["job"]) for row in jobs]
        if self.job is None and len(names) == 1:
            self.job = names[0]
        if self.job not in names:
            listed = ", ".join(names) or "none yet"
            what = "name one with --job" if self.job is None else f"there is no job {self.job!r}"
            raise NotFound(f"{what}: its jobs are {listed}")
        self.rows.clear()
        self.rows.extend(await client.call("metrics", {"job": self.job, "last": self._limits.console_steps}))
        self._changed("rows")

    async def _ask_again_and_again(self, client: ControlClient) -> None:
        while True:
            jobs = await client.call("jobs")
            self.status = next((row for row in jobs if row["job"] == self.job), {})
            self.tree = await client.call("tree", {"job": self.job})
            self.nodes = await client.call("nodes")
            self.stalls = await client.call("stalls", {"longer_than_s": self._limits.console_stall_s})
            self.reachable, self.why = True, ""
            self._changed("live")
            await asyncio.sleep(self._limits.console_ask_s)

    async def _watch(self, client: ControlClient) -> None:
        async for event in client.watch({"job": self.job}):
            if event.get("kind") == "lagged":
                await self._choose(client)
            self.hear(event)

    def hear(self, event: Plain) -> None:
        """Take in one event of the watch."""
        kind = event.get("kind")
        if kind == "step":
            row = {name: value for name, value in event.items() if name not in ("kind", "job")}
            self.rows.append(row | {"step": int(event["step"]) - 1})  # the event counts the steps that are done
            self._changed("rows")
        if kind == "state":
            self.status = {**self.status, "state": event.get("state")}
        if "waiting_for" in event:
            self.waiting_for = str(event["waiting_for"] or "")
        if event.get("message"):
            self.messages.append(str(event["message"]))
        self._changed("live")
