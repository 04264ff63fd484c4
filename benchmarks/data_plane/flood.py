"""What strangers cost a head whose port they can reach: memory, descriptors, CPU, and the patience of its friends.

    flooders ── garbage, huge frames, thousands of connections, … ──▶ a head's TCP port
    a friend ── ask, every 10 ms ───────────────────────────────────▶ the same one: an answer, before, while and after

Each kind of flood has the head for itself, in turn; its own process keeps a core busy, so some of what the friend waits
is the machine's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
import psutil

from actors.core.errors import AskError
from actors.core.look import Look, Sight
from actors.core.system import ActorSystem
from benchmarks._command import Result, command_line, measured, show
from benchmarks._harm import percentile
from benchmarks._jobs import hardware
from benchmarks._processes import beside, on_uvloop
from benchmarks._samples import MIB
from benchmarks.data_plane._flooders import FLOODS
from benchmarks.data_plane.tokens import said
from configs.limits import DEFAULT_LIMITS
from supervisors.machine.machine import CLUSTER
from transport.address import ActorAddress, new_peer
from transport.endpoints import split_key
from transport.zmq.security import NodeKeys, generate_keys, write_keys
from transport.zmq.transport import ZmqTransport

GROWTH_GOAL_MIB: Final = 128.0
_EVERY_S: Final = 0.01
_LOOK_S: Final = 0.1
_SETTLE_S: Final = 2.0


@dataclass
class Friend:
    """Asks the head again and again, and notes what that took."""

    system: ActorSystem
    address: ActorAddress
    took_ms: list[float] = field(default_factory=list[float])
    failed: int = 0
    began_s: float = 0.0
    """Start of the question that is open, or was last."""
    open: bool = False

    async def ask(self) -> None:
        """Until cancelled."""
        head = self.system.ref(self.address)
        while True:
            self.began_s, self.open = time.perf_counter(), True
            try:
                await head.ask(Look(), Sight)
                self.took_ms.append(self._age_ms())
            except AskError:
                self.failed += 1
            self.open = False
            await asyncio.sleep(_EVERY_S)

    def _age_ms(self) -> float:
        return (time.perf_counter() - self.began_s) * 1000

    def taken(self) -> Result:
        """What was noted since it was asked last, with how long the open question has been open."""
        took_ms, self.took_ms = self.took_ms, []
        if self.open or not took_ms:
            took_ms.append(self._age_ms())
        return {
            "p50_ms": round(percentile(took_ms, 0.5), 2),
            "p99_ms": round(percentile(took_ms, 0.99), 2),
            "max_ms": round(max(took_ms), 2),
            "answers": len(took_ms),
        }


@dataclass
class Watched:
    """What the head's process has of the machine."""

    process: psutil.Process
    resident_mib: float = 0.0
    """Most at any look since ``begin``."""
    fds: int = 0

    def begin(self) -> None:
        self.resident_mib, self.fds = 0.0, 0
        self.process.cpu_percent()

    async def look(self, seconds: float) -> Result:
        """The most of everything over ``seconds``."""
        self.begin()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.resident_mib = max(self.resident_mib, self.process.memory_info().rss / MIB)
            self.fds = max(self.fds, self.process.num_fds())
            await asyncio.sleep(_LOOK_S)
        busy = self.process.cpu_percent() / 100
        return {"resident_mib": round(self.resident_mib, 1), "fds": self.fds, "busy_cores": round(busy, 2)}


@asynccontextmanager
async def friend_of(address: ActorAddress, keys: NodeKeys) -> AsyncIterator[Friend]:
    """One who may ask."""
    links = ZmqTransport(
        new_peer("friend"), listen="tcp://127.0.0.1:*", cluster=CLUSTER, limits=DEFAULT_LIMITS, keys=keys
    )
    system = ActorSystem(links)
    await system.start()
    friend = Friend(system, address)
    asking = asyncio.create_task(friend.ask())
    try:
        yield friend
    finally:
        asking.cancel()
        await system.stop()


async def flooded(kind: str, keys: NodeKeys, scratch: Path, seconds: float) -> Result:
    """One kind of flood at a head of its own."""
    directory = scratch / kind
    directory.mkdir()
    write_keys(keys, directory / "keys")
    with contextlib.ExitStack() as exits:
        head = exits.enter_context(beside("data_plane._flooded", directory, directory / "keys"))
        address = msgspec.json.decode(await said(head), type=ActorAddress)
        watched = Watched(psutil.Process(head.pid))
        async with friend_of(address, keys) as friend:
            return await _phases(kind, watched, friend, seconds)


async def _phases(kind: str, watched: Watched, friend: Friend, seconds: float) -> Result:
    """Before the flood, while it lasts, and after it."""
    await asyncio.sleep(_SETTLE_S)
    friend.taken()
    before = await watched.look(seconds / 3) | friend.taken()
    where, key = split_key(friend.address.endpoint)
    host, _, port = where.removeprefix("tcp://").rpartition(":")
    with beside("data_plane._flooders", kind, host, port, key or "none") as flooder:
        await said(flooder)
        while_it_lasts = await watched.look(seconds) | friend.taken()
        count = await _ended(flooder)
    await asyncio.sleep(_SETTLE_S)
    friend.taken()
    after = await watched.look(seconds / 3) | friend.taken()
    return {
        "came": count,
        "growth_mib": round(while_it_lasts["resident_mib"] - before["resident_mib"], 1),
        "failed": friend.failed,
        "before": before,
        "while": while_it_lasts,
        "after": after,
    }


async def _ended(flooder: subprocess.Popen[str]) -> int:
    """How many connections or messages there were."""
    assert flooder.stdin is not None
    flooder.stdin.close()
    return int(await said(flooder))


async def _measure(options: argparse.Namespace, scratch: Path) -> Result:
    floods: Result = {}
    for kind in options.only.split(","):
        print(f"{kind} …", file=sys.stderr)
        floods[kind] = await flooded(kind, generate_keys(), scratch, options.seconds)
    return {
        "growth_mib_max": max(flood["growth_mib"] for flood in floods.values()),
        "p99_ms_max": max(flood["while"]["p99_ms"] for flood in floods.values()),
        "failed": sum(flood["failed"] for flood in floods.values()),
        "floods": floods,
    }


def missed(result: Result) -> list[str]:
    """Goals that were not met, in sentences."""
    found = [
        f"{kind}: {flood['growth_mib']} MiB more, the goal is {GROWTH_GOAL_MIB:g}"
        for kind, flood in result["floods"].items()
        if flood["growth_mib"] > GROWTH_GOAL_MIB
    ]
    return found + ([f"{result['failed']} questions of the friend were not answered"] if result["failed"] else [])


def measure(options: argparse.Namespace, scratch: Path) -> Result:
    """All of it in ``scratch``."""
    result = {"hardware": hardware(), **on_uvloop(_measure(options, scratch))}
    return result | {"missed": missed(result)}


def main(args: list[str]) -> int:
    """Measure and print; with ``--check`` hold the figures against their goals."""
    parser = command_line("flood", __doc__)
    parser.add_argument("--seconds", type=float, default=12.0, help="of each flood; a third of it before and after")
    parser.add_argument("--only", default=",".join(FLOODS), help="kinds of floods, with commas")
    parser.add_argument("--check", action="store_true", help="exit 1 if a goal is missed")
    options = parser.parse_args(args)
    unknown = [kind for kind in options.only.split(",") if kind not in FLOODS]
    if unknown:
        parser.error(f"--only: there is no {unknown[0]!r}; expected some of {', '.join(FLOODS)}")
    result = measured(measure, options)
    show(result, options)
    return 1 if options.check and result["missed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
