"""Sockets that the machine process holds for role processes at which others connect (``actors/gateway/listening.py``).

Invariants
- Each life of a process gets the same sockets, until its owner stops it or asks for another address.
- A process whose address cannot be had is started without one: it says itself what is wrong.
"""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from pathlib import Path

from actors.gateway.listening import Listeners, open_listeners
from actors.roles import AnyArgs, RoleArgs
from configs.episode_schema import GatewayConfig
from supervisors.machine.processes.process import Launch


@dataclass(frozen=True)
class Listening:
    """Says where a process listens: the name of the process, and what its address depends on."""

    process: str
    gateway: GatewayConfig
    run_dir: Path


def listening_of(process: str, args: AnyArgs) -> Listening | None:
    """Where a process of this role listens for others than the system's own processes; None: nowhere."""
    if not isinstance(args, RoleArgs) or args.role != "gateway":
        return None
    return Listening(process, args.job_config.gateway, Path(args.run_dir))


class HeldSockets:
    """Holds the sockets of this machine's processes."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[Listening, Listeners]] = {}

    def given(self, spec: Launch, at: Listening) -> Launch:
        """``spec`` with the sockets of the process, which are opened at its first life."""
        if (known := self._held.get(at.process)) is not None and known[0] != at:
            self.let_go(at.process)
        if at.process not in self._held:
            with contextlib.suppress(OSError):
                self._held[at.process] = at, open_listeners(at.gateway, at.run_dir)
        if at.process not in self._held:
            return spec
        inherited, named = self._held[at.process][1].for_child(at.run_dir)
        return dataclasses.replace(spec, inherited=inherited, env={**spec.env, **named})

    def let_go(self, process: str) -> None:
        if (known := self._held.pop(process, None)) is not None:
            known[1].close()
