"""Signals and slowness reach the node's own processes, nobody else's, and a slow one is not taken for a hung one."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

from actors.core.errors import RemoteError
from actors.core.ref import ActorRef
from actors.core.system import ActorSystem
from supervisors.faults.fault_messages import ApplyFault, ClockOrder, FaultApplied, LinkOrder, SignalChild, SlowChild
from supervisors.faults.node_faults import NAME, NodeFaults
from supervisors.faults.process_faults import ProcessFaults
from supervisors.machine.machine import LocalMachine
from supervisors.machine.processes.process import is_stopped_by_signal
from transport.address import PeerId
from transport.link_faults import LinkRule, Misbehaviour
from transport.memory_transport import MemoryNetwork, MemoryTransport
from transport.transport import Lane

BUSY = "while True: pass"
IDLE = "import sys; sys.stdin.read()"


@pytest.fixture
def machine() -> LocalMachine:
    return LocalMachine()


@pytest.fixture
def rules() -> list[tuple[LinkRule, float | None]]:
    return []


@pytest.fixture
async def faults(machine: LocalMachine, rules: list[tuple[LinkRule, float | None]]) -> AsyncIterator[ActorRef]:
    system = ActorSystem(MemoryTransport(MemoryNetwork(), PeerId("node", 1)))
    await system.start()
    own = ProcessFaults(lambda rule, lasts_s: rules.append((rule, lasts_s)))
    yield await system.spawn(NAME, NodeFaults(own, machine.slowed))
    await system.stop()


@pytest.fixture
def child() -> Callable[[str], subprocess.Popen[bytes]]:
    made: list[subprocess.Popen[bytes]] = []

    def start(program: str) -> subprocess.Popen[bytes]:
        made.append(subprocess.Popen([sys.executable, "-S", "-c", program], stdin=subprocess.PIPE))
        return made[-1]

    yield start  # type: ignore[misc]
    for process in made:
        process.kill()
        process.communicate()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_signal_reaches_a_child(faults: ActorRef, child: Callable[[str], subprocess.Popen[bytes]]) -> None:
    process = child(IDLE)
    await faults.ask(SignalChild(pid=process.pid, signal=signal.SIGSTOP), FaultApplied)
    await until(lambda: is_stopped_by_signal(process.pid))
    await faults.ask(SignalChild(pid=process.pid, signal=signal.SIGKILL), FaultApplied)
    await until(lambda: process.poll() is not None)
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("pid", [1, os.getpid(), 2**22 + 1], ids=["init", "itself", "nobody"])
async def test_a_process_that_is_not_the_nodes_is_left_in_peace(faults: ActorRef, pid: int) -> None:
    for order in (SignalChild(pid=pid, signal=signal.SIGKILL), SlowChild(pid=pid, factor=3)):
        with pytest.raises(RemoteError, match="is not one of this node's"):
            await faults.ask(order, FaultApplied)


async def test_a_slowed_process_gets_its_share_and_does_not_look_stopped(
    faults: ActorRef, machine: LocalMachine, child: Callable[[str], subprocess.Popen[bytes]]
) -> None:
    process = child(BUSY)
    watched = psutil.Process(process.pid)
    await until(lambda: watched.cpu_times().user > 0.05)
    await faults.ask(SlowChild(pid=process.pid, factor=10, lasts_s=1.5), FaultApplied)
    with pytest.raises(RemoteError, match="slowed down already"):
        await faults.ask(SlowChild(pid=process.pid, factor=2), FaultApplied)
    before_s, began_s, looks = watched.cpu_times().user, time.monotonic(), []
    while time.monotonic() - began_s < 1.2:
        looks.append((is_stopped_by_signal(process.pid), machine.is_stopped(process.pid)))
        await asyncio.sleep(0.01)
    used = (watched.cpu_times().user - before_s) / (time.monotonic() - began_s)
    assert used < 0.4, f"it ran {used:.0%} of the time, a tenth was allowed"
    assert any(stopped for stopped, _ in looks)
    assert not any(judged for _, judged in looks), "the judge of hung processes must not see it stopped"
    await until(lambda: not machine.slowed)
    assert not is_stopped_by_signal(process.pid)
    process.send_signal(signal.SIGSTOP)
    await until(lambda: machine.is_stopped(process.pid))


async def test_a_slowed_process_that_dies_ends_the_slowness(
    faults: ActorRef, machine: LocalMachine, child: Callable[[str], subprocess.Popen[bytes]]
) -> None:
    process = child(IDLE)
    await faults.ask(SlowChild(pid=process.pid, factor=3), FaultApplied)
    assert machine.slowed
    process.kill()
    process.wait()
    await until(lambda: not machine.slowed)


async def test_orders_on_links_become_rules(faults: ActorRef, rules: list[tuple[LinkRule, float | None]]) -> None:
    order = LinkOrder(kind="delay", peers=("head",), lane="bulk", delay_ms=250, jitter_ms=50, lasts_s=2.0)
    await faults.ask(ApplyFault(order=order), FaultApplied)
    assert rules == [], "the answer leaves before the order takes effect"
    await until(lambda: bool(rules))
    expected = LinkRule(Misbehaviour.DELAY, frozenset({"head"}), Lane.BULK, delay_s=0.25, jitter_s=0.05)
    assert rules == [(expected, 2.0)]
    with pytest.raises(RemoteError, match="nothing else on the wire has a hash"):
        await faults.ask(ApplyFault(order=LinkOrder(kind="corrupt")), FaultApplied)


async def test_a_clock_jumps_and_comes_back_while_the_loops_clock_goes_on(faults: ActorRef) -> None:
    wall, loop = time.time, asyncio.get_running_loop()
    before_s, loop_before_s = wall(), loop.time()
    await faults.ask(ApplyFault(order=ClockOrder(jump_s=-7200.0, lasts_s=0.3)), FaultApplied)
    try:
        await until(lambda: time.time() < before_s - 7000)
        assert 0 < loop.time() - loop_before_s < 5
        await until(lambda: time.time() > before_s - 5)
    finally:
        time.time = wall


async def test_a_process_that_cannot_says_so(machine: LocalMachine) -> None:
    system = ActorSystem(MemoryTransport(MemoryNetwork(), PeerId("node", 1)))
    await system.start()
    faults = await system.spawn(NAME, NodeFaults(ProcessFaults(), machine.slowed))
    for order in (LinkOrder(kind="drop"), ClockOrder(jump_s=1)):
        with pytest.raises(RemoteError, match="not one that can be made to misbehave"):
            await faults.ask(ApplyFault(order=order), FaultApplied)
    await system.stop()


def test_the_sleeper_that_wakes_a_stopped_process_needs_nobody(
    child: Callable[[str], subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    from supervisors.faults.process_faults import signal_later

    process = child(IDLE)
    process.send_signal(signal.SIGSTOP)
    signal_later([process.pid], signal.SIGCONT, 0.2)
    deadline_s = time.monotonic() + 10
    while not is_stopped_by_signal(process.pid):
        assert time.monotonic() < deadline_s
    while is_stopped_by_signal(process.pid):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
