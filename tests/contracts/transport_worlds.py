"""The kinds of network under the transport contract, each with a way to make peers and to run a scenario."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import tempfile
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import uvloop

from configs.limits import DEFAULT_LIMITS, Limits
from tests.broken_links import break_link
from tests.free_ports import free_ports
from tests.simulated import run_simulated
from transport.address import PeerId, new_peer
from transport.link_faults import FaultableTransport, LinkRule, Misbehaviour
from transport.memory_transport import MemoryNetwork, MemoryTransport
from transport.sim.network import SimNetwork
from transport.transport import DownReason, Frame, Lane, Transport
from transport.zmq.security import NodeKeys, generate_keys
from transport.zmq.transport import ZmqTransport

KINDS = [
    "memory",
    "sim",
    "faultable-sim-ruled",
    "zmq-tcp",
    "zmq-ipc",
    "zmq-tcp-striped",
    "zmq-tcp-curve",
    "zmq-tcp-uvloop",
    "zmq-ipc-striped-uvloop",
    "faultable-zmq-ipc",
    "faultable-zmq-ipc-ruled",
]
WAIT_S = 5.0


class Recorder:
    """A receiver that keeps everything in order of arrival, and lets a test wait for it."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.delivering = 0
        self._changed = asyncio.Event()

    def on_frames(self, peer: PeerId, lane: Lane, frames: list[Frame]) -> None:
        self._add(("frames", peer, lane, [bytes(frame) for frame in frames]))

    def on_peer_up(self, peer: PeerId) -> None:
        self._add(("up", peer))

    def on_peer_down(self, peer: PeerId, reason: DownReason) -> None:
        self._add(("down", peer, reason))

    def _add(self, event: tuple[Any, ...]) -> None:
        self.events.append(event)
        self._changed.set()

    def frames(self, lane: Lane) -> list[list[bytes]]:
        return [event[3] for event in self.events if event[0] == "frames" and event[2] is lane]

    def ups(self) -> list[PeerId]:
        return [event[1] for event in self.events if event[0] == "up"]

    def downs(self) -> list[tuple[PeerId, DownReason]]:
        return [(event[1], event[2]) for event in self.events if event[0] == "down"]

    async def until(self, condition: Callable[[Recorder], bool], timeout_s: float = WAIT_S) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition(self):
                self._changed.clear()
                await self._changed.wait()


class World:
    """One network of one kind; closes what it made."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.network: MemoryNetwork = SimNetwork(7) if "sim" in kind else MemoryNetwork()
        self._keys: NodeKeys | None = generate_keys() if "curve" in kind else None
        self._directory = tempfile.TemporaryDirectory(prefix="hr-")
        self._transports: list[Transport] = []
        self._ports: dict[str, int] = {}

    def run(self, scenario: Callable[[World], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            try:
                await scenario(self)
            finally:
                for transport in self._transports:
                    await transport.close(timeout_s=0.5)
                self._directory.cleanup()

        if "sim" in self.kind:
            run_simulated(main(), seed=3)
        else:
            factory = uvloop.new_event_loop if "uvloop" in self.kind else asyncio.new_event_loop
            with asyncio.Runner(loop_factory=factory) as runner:
                runner.run(main())

    async def peer(
        self,
        name: str,
        *,
        cluster: str = "contract",
        limits: Limits = DEFAULT_LIMITS,
        fixed: bool = False,
        same_life: PeerId | None = None,
    ) -> tuple[Any, Recorder]:
        """A started transport and its receiver. ``fixed``: it listens where ``endpoint(name)`` says."""
        transport = self._make(same_life or new_peer(name), cluster, limits, fixed)
        if "faultable" in self.kind:
            transport = FaultableTransport(transport, limits=limits)
            if "ruled" in self.kind:  # without a rule it only passes on; this one hits nobody
                transport.add(LinkRule(Misbehaviour.DELAY, peers=frozenset({"nobody"})))
        recorder = Recorder()
        await transport.start(recorder)
        self._transports.append(transport)
        return transport, recorder

    def _make(self, peer: PeerId, cluster: str, limits: Limits, fixed: bool) -> Any:
        if "striped" in self.kind:
            limits = limits.model_copy(update={"bulk_sockets": 3})
        if "zmq" not in self.kind:
            return MemoryTransport(self.network, peer, cluster=cluster, limits=limits)
        listen = "tcp://127.0.0.1:*" if "tcp" in self.kind else f"ipc://{self._directory.name}/{peer.incarnation:x}"
        if fixed:
            listen = self.endpoint(peer.name).partition("?")[0]
        return ZmqTransport(peer, listen=listen, cluster=cluster, limits=limits, keys=self._keys, unguarded=True)

    def endpoint(self, name: str) -> str:
        """Where a peer of this name listens, or would listen."""
        if "zmq" not in self.kind:
            return f"memory://{name}"
        if "ipc" in self.kind:
            return f"ipc://{self._directory.name}/{name}"
        port = self._ports.setdefault(name, free_ports())
        key = "" if self._keys is None else f"?key={self._keys.public_hex}"
        return f"tcp://127.0.0.1:{port}{key}"

    async def pair(self, limits: Limits = DEFAULT_LIMITS) -> tuple[Any, Recorder, Any, Recorder]:
        """Two linked peers; the first has dialed."""
        a, seen_a = await self.peer("a", limits=limits)
        b, seen_b = await self.peer("b", limits=limits)
        await a.connect(b.endpoint, timeout_s=WAIT_S)
        await seen_b.until(lambda r: bool(r.ups()))
        await seen_a.until(lambda r: bool(r.ups()))
        return a, seen_a, b, seen_b

    def break_link(self, one: Any, other: Any) -> None:
        """Break the link between two peers, which both live on."""
        if "zmq" not in self.kind:
            break_link(self.network, one.peer.name, other.peer.name)
        else:
            _hang_up([bound for end in (one, other) for bound in getattr(end, "inner", end)._bound])

    def crash(self, transport: Any) -> None:
        """End the process of a transport, as SIGKILL would."""
        self._transports.remove(transport)
        getattr(transport, "inner", transport).abort()


def _hang_up(listening: list[str]) -> None:
    """End every connection of this process to one of these endpoints, as a router does that has forgotten it."""
    names = [bound.removeprefix("ipc://") if "ipc" in bound else int(bound.rpartition(":")[2]) for bound in listening]
    for descriptor in map(int, os.listdir("/dev/fd")):
        try:
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as end:
                ends = (end.getsockname(), end.getpeername())
                if any((name[1] if isinstance(name, tuple) else name) in names for name in ends):
                    end.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue  # libzmq closes and opens them meanwhile


Scenario = Callable[[World], Awaitable[None]]
__all__ = ["KINDS", "WAIT_S", "Path", "Recorder", "Scenario", "World"]
