"""A peer in another process that is killed, stopped or busy: what its watcher hears, and how soon."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Self

import pytest

from configs.limits import DEFAULT_LIMITS
from transport.address import PeerId, new_peer
from transport.transport import DownReason, Frame, Lane, SendOutcome
from transport.zmq.socket import SocketEvent
from transport.zmq.transport import ZmqTransport

ROOT = Path(__file__).resolve().parents[3]
CHILD = """
import asyncio, sys, time
from configs.limits import DEFAULT_LIMITS
from transport.address import new_peer
from transport.transport import Lane
from transport.zmq.transport import ZmqTransport

class Echo:
    def on_frames(self, peer, lane, frames):
        if bytes(frames[0]) == b"hold":
            until = time.monotonic() + 2.5
            while time.monotonic() < until:
                sum(range(10**6))  # holds the GIL, and the loop meanwhile
            transport.send(peer, lane, [b"held"])
        else:
            transport.send(peer, lane, frames)
    def on_peer_up(self, peer): pass
    def on_peer_down(self, peer, reason): print("down", reason.value, flush=True)

async def main():
    global transport
    transport = ZmqTransport(new_peer("child"), listen=sys.argv[1], unguarded=True, cluster="t", limits=DEFAULT_LIMITS)
    await transport.start(Echo())
    print(transport.endpoint, flush=True)
    if len(sys.argv) > 2:
        await transport.connect(sys.argv[2], timeout_s=10)
    await asyncio.sleep(60)

asyncio.run(main())
"""


class Watcher:
    def __init__(self) -> None:
        self.up: asyncio.Future[PeerId] = asyncio.get_running_loop().create_future()
        self.down: asyncio.Future[tuple[DownReason, float]] = asyncio.get_running_loop().create_future()
        self.frames: asyncio.Queue[list[bytes]] = asyncio.Queue(1000)

    def on_frames(self, peer: PeerId, lane: Lane, frames: list[Frame]) -> None:
        self.frames.put_nowait([bytes(frame) for frame in frames])

    def on_peer_up(self, peer: PeerId) -> None:
        self.up.set_result(peer)

    def on_peer_down(self, peer: PeerId, reason: DownReason) -> None:
        self.down.set_result((reason, asyncio.get_running_loop().time()))


class Scene:
    """This process and a child that are linked, one of them having dialed."""

    def __init__(self, listen: str, child_dials: bool) -> None:
        self._listen = listen
        self._child_dials = child_dials

    async def __aenter__(self) -> Self:
        self.watcher = Watcher()
        self.transport = ZmqTransport(
            new_peer("here"), listen=self._listen, unguarded=True, cluster="t", limits=DEFAULT_LIMITS
        )
        await self.transport.start(self.watcher)
        dial = [self.transport.endpoint] if self._child_dials else []
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, self._listen, *dial], stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        assert self.process.stdout is not None
        self._endpoint = (await asyncio.to_thread(self.process.stdout.readline)).strip()
        if not self._child_dials:
            await self.transport.connect(self._endpoint, timeout_s=10)
        self.child = await asyncio.wait_for(asyncio.shield(self.watcher.up), 10)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        await self.transport.close(timeout_s=0.2)
        if self._listen == "ipc://*":  # who is killed cannot remove its directory
            shutil.rmtree(Path(self._endpoint.removeprefix("ipc://")).parent)

    async def down_after(self, number: signal.Signals) -> tuple[DownReason, float]:
        """Send the child a signal; how the watcher took it, and after how many seconds."""
        started = asyncio.get_running_loop().time()
        os.kill(self.process.pid, number)
        reason, at = await asyncio.wait_for(asyncio.shield(self.watcher.down), 10)
        return reason, at - started


@pytest.fixture(params=[("tcp", True), ("tcp", False), ("ipc", True), ("ipc", False)], ids=str)
async def scene(request: pytest.FixtureRequest) -> AsyncIterator[Scene]:
    kind, child_dials = request.param
    async with Scene("tcp://127.0.0.1:*" if kind == "tcp" else "ipc://*", child_dials) as scene:
        yield scene


async def test_a_killed_process_is_unreachable_within_a_third_of_a_second(scene: Scene) -> None:
    reason, after_s = await scene.down_after(signal.SIGKILL)
    assert reason is DownReason.UNREACHABLE
    assert after_s < 0.3, after_s
    assert scene.transport.send(scene.child, Lane.MESSAGE, [b"x"]) is SendOutcome.NO_LINK


async def test_a_stopped_process_is_unreachable_within_two_seconds(scene: Scene) -> None:
    reason, after_s = await scene.down_after(signal.SIGSTOP)
    assert reason is DownReason.UNREACHABLE
    assert 0.4 < after_s < 2.0, after_s
    # it wakes up, and learns that it has been given up
    os.kill(scene.process.pid, signal.SIGCONT)
    assert scene.process.stdout is not None
    line = await asyncio.wait_for(asyncio.to_thread(scene.process.stdout.readline), 10)
    assert line.split() == ["down", "unreachable"]


async def test_a_process_that_holds_its_loop_and_its_gil_for_seconds_stays_linked(scene: Scene) -> None:
    scene.transport.send(scene.child, Lane.MESSAGE, [b"hold"])
    for _ in range(300):
        scene.transport.send(scene.child, Lane.MESSAGE, [b"waiting"])
    assert (await asyncio.wait_for(scene.watcher.frames.get(), 60)) == [b"held"]
    assert not scene.watcher.down.done()
    for _ in range(300):
        assert await asyncio.wait_for(scene.watcher.frames.get(), 10) == [b"waiting"]


class Nobody:
    def on_frames(self, peer: PeerId, lane: Lane, frames: list[Frame]) -> None: ...
    def on_peer_up(self, peer: PeerId) -> None: ...
    def on_peer_down(self, peer: PeerId, reason: DownReason) -> None: ...


async def test_many_that_hang_up_together_are_looked_for_together_and_also_after_the_last_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transport = ZmqTransport(
        new_peer("here"), listen="tcp://127.0.0.1:*", unguarded=True, cluster="t", limits=DEFAULT_LIMITS
    )
    looks: list[float] = []
    try:
        await transport.start(Nobody())
        monkeypatch.setattr(transport._probes, "_ask", lambda _lane: looks.append(loop.time()))
        loop, last = asyncio.get_running_loop(), 0.0
        for _ in range(1000):
            transport._on_listener_event(Lane.MESSAGE, SocketEvent.DISCONNECTED)
            last = loop.time()
        await asyncio.sleep(0.4)
        assert len(looks) <= 20, "of a thousand links each"
        assert sum(at >= last for at in looks) >= 5
        assert max(looks) >= last + 0.25, "libzmq needs a while until it knows"
    finally:
        transport.abort()
