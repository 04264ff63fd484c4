"""The provider ``local``: each "machine" is a ``headrace node`` process on this host. For tests and rehearsals.

start ─▶ exec ─▶ the node joins the head        notice ─▶ SIGTERM ─▶ window ─▶ SIGKILL        kill ─▶ SIGKILL

Role processes are the node process's children and die with it (``actors/host/parent_death.py``): a killed node
leaves nothing behind, like a machine that was switched off.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from configs.limits import Limits
from supervisors.machine.machine import LOCAL, Machine
from supervisors.machine.processes.process import Child, Launch, ProcessExit
from supervisors.providers.base import BookedProvider, log
from supervisors.tree.errors import ProviderError


class LocalProvider(BookedProvider):
    """Provides node processes on this machine. Create it on the running loop.

    Args:
        join: the head's endpoint.
        slots: rollout workers that each node takes.
        logs: directory for the nodes' output, one file each.
        keys: key directory of the nodes, for a head beyond loopback.
        windows: node → seconds that it stays up after its notice, as a cloud's machines know them; a node without
            an entry stays no longer than it takes to stop.
    """

    def __init__(
        self,
        *,
        join: str,
        slots: int,
        logs: Path,
        limits: Limits,
        keys: Path | None = None,
        windows: Mapping[str, float] | None = None,
        machine: Machine = LOCAL,
    ) -> None:
        super().__init__()
        self._join = join
        self._slots = slots
        self._logs = logs
        self._keys = keys
        self._windows = windows or {}
        self._machine = machine
        self._close_window_s = limits.stop_timeout_s
        self._children: dict[str, Child] = {}

    def _begin(self, node: str, kind: str) -> None:
        command = node_command(self._join, node, kind, self._slots, self._keys, self._windows.get(node, 0.0))
        try:
            child = self._machine.launch(Launch(command, self._logs / f"{node}.log"))
        except OSError as error:
            raise ProviderError(f"the process of {node} could not be started: {error}") from error
        self._children[node] = child
        child.exited.add_done_callback(lambda exited: self._exited(node, exited))

    def _exited(self, node: str, exited: asyncio.Future[ProcessExit]) -> None:
        del self._children[node]
        if not exited.cancelled():
            log.info("a node process has ended", node=node, how=str(exited.result()))
        self._ended(node)

    def _tell_to_go(self, node: str) -> None:
        self._children[node].send_signal(signal.SIGTERM)

    def _take_away(self, node: str) -> None:
        child = self._children.get(node)
        if child is not None:
            child.kill()


def node_command(join: str, node: str, kind: str, slots: int, keys: Path | None, notice_s: float = 0.0) -> list[str]:
    command = [sys.executable, "-P", "-m", "main", "node", "--join", join, "--name", node, "--kind", kind]
    command += ["--slots", str(slots)]
    command += ["--notice", f"{notice_s:g}"] if notice_s else []
    return [*command, "--keys", str(keys)] if keys is not None else command
