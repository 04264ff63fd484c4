"""Real processes under a node agent and a supervisor: killed, stopped, crashed, busy, stubborn."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

import psutil
import pytest

from actors.core.actor import Actor, handles
from actors.core.context import Context
from actors.core.system import ActorSystem
from actors.roles import RoleArgs
from actors.weights.segments import held_path, segment_path
from configs.limits import Limits
from supervisors.machine.devices import NO_DEVICES, Devices
from supervisors.machine.machine import LocalMachine
from supervisors.machine.node_agent import NodeAgent, NodeOptions
from supervisors.tree.children import ChildSpec, Running, start_process
from supervisors.tree.errors import SupervisorGaveUp
from supervisors.tree.messages import (
    ListProcesses,
    ProcessExited,
    ProcessList,
    SpawnProcess,
    SpawnReply,
    StopProcess,
    StopReply,
)
from supervisors.tree.restart_budget import ExitCause, RestartPolicy
from supervisors.tree.strategies import Strategy
from supervisors.tree.supervisor import SupervisionEvent, Supervisor
from tests.smallest_job import smallest_job
from transport.address import ActorAddress, PeerId
from transport.zmq.security import generate_keys, load_keys, write_keys
from transport.zmq.transport import ZmqTransport

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import probe_child

LIMITS = Limits(backoff_first_s=0.01, restart_max=3, orphan_grace_s=0.5, stop_timeout_s=5.0)
NOWHERE = ActorAddress("nobody", PeerId("nowhere", 1))
JOB = smallest_job().model_dump_json()


def role_args(name: str, run_dir: Path, role: str = "probe") -> RoleArgs:
    return RoleArgs(
        role=role, name=name, node="", job=JOB, model_path="", run_dir=str(run_dir), scheduler=NOWHERE, metrics=NOWHERE
    )


def process_child(
    args: RoleArgs, agent: ActorAddress, *, restart: RestartPolicy = RestartPolicy.PERMANENT, **options
) -> ChildSpec:
    async def start(context: Context) -> Running:
        return await start_process(context, agent, args, job="j", **options)

    return ChildSpec(args.name, start, args.role, restart)


class Head:
    """This process as the head: transport, system, node agent."""

    def __init__(self, run_dir: Path, limits: Limits = LIMITS, devices: Devices = NO_DEVICES) -> None:
        self.run_dir, self.limits = run_dir, limits
        self.machine = LocalMachine(devices)
        self.events: list[SupervisionEvent] = []
        self._arrival = asyncio.Event()

    async def __aenter__(self) -> Self:
        transport = ZmqTransport(PeerId("head", 11), listen="ipc://*", cluster="test", limits=self.limits)
        self.system = ActorSystem(transport, limits=self.limits, seed=1)
        await self.system.start()
        command = [sys.executable, "-P", str(HERE / "probe_child.py")]
        options = NodeOptions(cluster="test", command=command, machine=self.machine)
        self.agent = await self.system.spawn("node", NodeAgent("n1", options))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.system.stop()
        assert not psutil.Process().children(), "the agent left processes behind"

    def on_event(self, event: SupervisionEvent) -> None:
        self.events.append(event)
        self._arrival.set()

    async def until(self, kind: str, child: str, count: int = 1) -> SupervisionEvent:
        async with asyncio.timeout(20):
            while True:
                found = [e for e in self.events if (e.kind, e.child) == (kind, child)]
                if len(found) >= count:
                    return found[-1]
                self._arrival.clear()
                await self._arrival.wait()

    async def supervise(self, strategy: Strategy, *names: str, role: str = "probe", **options) -> Supervisor:
        specs = [process_child(role_args(name, self.run_dir, role), self.agent.address, **options) for name in names]
        supervisor = Supervisor("fleet", strategy, specs, on_event=self.on_event)
        await self.system.spawn("fleet", supervisor)
        await supervisor.ready(30)
        return supervisor

    async def processes(self) -> dict[str, tuple[int, str]]:
        reply = await self.agent.ask(ListProcesses(), ProcessList, timeout_s=5)
        return {p.name: (p.pid, p.health) for p in reply.processes}


@pytest.fixture
async def head(tmp_path):
    async with Head(tmp_path) as head:
        yield head


async def test_a_role_process_becomes_ready_quickly_and_its_actor_answers(head):
    supervisor = await head.supervise(Strategy.ONE_FOR_ONE, "p0")
    running = supervisor.running("p0")
    pong = await head.system.ref(running.address).ask(probe_child.Ping(), probe_child.Pong, timeout_s=5)
    assert (pong.pid, pong.node) == (running.pid, "n1")
    assert running.address.peer.name == "n1.j.p0"
    assert (head.run_dir / "logs" / "p0.log").read_text().count('"event": "ready"') == 1


async def test_a_role_process_gives_way_to_the_process_that_started_it(tmp_path):
    own = os.getpriority(os.PRIO_PROCESS, 0)
    async with Head(tmp_path, LIMITS.model_copy(update={"role_niceness": 7})) as head:
        pid = (await head.supervise(Strategy.ONE_FOR_ONE, "p0")).running("p0").pid
        threads = [os.getpriority(os.PRIO_PROCESS, thread.id) for thread in psutil.Process(pid).threads()]
    assert len(threads) > 1 and set(threads) == {min(own + 7, 19)}, "libzmq's threads too"


async def test_a_killed_process_is_seen_at_once_and_comes_back_in_a_new_life(head):
    supervisor = await head.supervise(Strategy.ONE_FOR_ONE, "p0", "p1")
    before, sibling = supervisor.running("p0"), supervisor.running("p1")
    at_s = time.monotonic()
    os.kill(before.pid, signal.SIGKILL)
    exited = await head.until("exited", "p0")
    assert time.monotonic() - at_s < 0.3
    assert exited.cause is ExitCause.KILLED
    await head.until("started", "p0", 2)
    after = supervisor.running("p0")
    assert after.pid != before.pid and after.incarnation != before.incarnation
    assert supervisor.running("p1") is sibling
    assert supervisor.restarts == 1


async def test_a_stopped_process_is_hung_within_two_seconds_killed_and_replaced(head):
    supervisor = await head.supervise(Strategy.ONE_FOR_ONE, "p0")
    pid = supervisor.running("p0").pid
    at_s = time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    exited = await head.until("exited", "p0")
    assert time.monotonic() - at_s < 2.2
    assert exited.cause is ExitCause.KILLED and "hung: stopped by a signal" in exited.detail
    await head.until("started", "p0", 2)


async def test_a_process_that_holds_the_gil_is_busy_and_left_alone(head):
    supervisor = await head.supervise(Strategy.ONE_FOR_ONE, "p0")
    running = supervisor.running("p0")
    head.system.ref(running.address).tell(probe_child.HoldGil(seconds=5))
    pong = await head.system.ref(running.address).ask(probe_child.Ping(), probe_child.Pong, timeout_s=10)
    assert pong.pid == running.pid
    assert [e.kind for e in head.events] == ["started"]
    assert (await head.processes())["j.p0"] == (running.pid, "alive")


async def test_a_silent_event_loop_is_hung_once_its_budget_is_used_up(head):
    supervisor = await head.supervise(Strategy.ONE_FOR_ONE, "p0", beacon_budget_s=2.0)
    head.system.ref(supervisor.running("p0").address).tell(probe_child.HoldGil(seconds=60))
    exited = await head.until("exited", "p0")
    assert "no progress beacon" in exited.detail
    await head.until("started", "p0", 2)


async def test_one_for_all_gives_every_process_a_new_life(head):
    supervisor = await head.supervise(Strategy.ONE_FOR_ALL, "r0", "r1")
    before = {name: supervisor.running(name).incarnation for name in ("r0", "r1")}
    os.kill(supervisor.running("r0").pid, signal.SIGKILL)
    await head.until("started", "r0", 2)
    await head.until("started", "r1", 2)
    after = {name: supervisor.running(name).incarnation for name in ("r0", "r1")}
    assert not set(before.values()) & set(after.values())


async def test_a_crashed_actor_ends_its_process_with_its_last_words(head):
    supervisor = await head.supervise(Strategy.ONE_FOR_ONE, "p0", restart=RestartPolicy.TEMPORARY)
    head.system.ref(supervisor.running("p0").address).tell(probe_child.Crash())
    ended = await head.until("ended", "p0")
    assert ended.cause is ExitCause.CRASHED
    assert ended.detail.endswith("ended with exit code 70: RuntimeError: told to crash")
    assert ended.reason == "RuntimeError: told to crash"
    assert "told to crash" in (head.run_dir / "logs" / "p0.log").read_text()


async def test_an_actor_that_finishes_completes_its_process_and_a_drained_one_is_preempted(head):
    supervisor = await head.supervise(Strategy.ONE_FOR_ONE, "p0", "p1", restart=RestartPolicy.TEMPORARY)
    head.system.ref(supervisor.running("p0").address).tell(probe_child.Finish(reason="completed"))
    head.system.ref(supervisor.running("p1").address).tell(probe_child.Finish(reason="preempted"))
    assert (await head.until("ended", "p0")).cause is ExitCause.COMPLETED
    assert (await head.until("ended", "p1")).cause is ExitCause.PREEMPTED


async def test_an_error_that_is_not_its_own_costs_a_process_no_budget_and_is_told(head):
    supervisor = await head.supervise(Strategy.ONE_FOR_ONE, "p0")
    for count in range(2, LIMITS.restart_max + 4):
        head.system.ref(supervisor.running("p0").address).tell(probe_child.Lose())
        await head.until("started", "p0", count)
    exited = await head.until("exited", "p0")
    assert exited.cause is ExitCause.PREEMPTED
    assert exited.reason == "ServiceGone: what it needs has gone"


async def test_the_spent_budget_escalates_and_leaves_no_process(head):
    supervisor = await head.supervise(Strategy.ONE_FOR_ONE, "p0", "p1")
    for count in range(2, LIMITS.restart_max + 3):
        os.kill(supervisor.running("p0").pid, signal.SIGKILL)
        if count < LIMITS.restart_max + 2:
            await head.until("started", "p0", count)
    end = await head.system.wait_stopped("fleet")
    assert isinstance(end.error, SupervisorGaveUp)
    assert await head.processes() == {}


async def test_a_role_that_cannot_start_fails_with_the_error_that_it_met(head):
    with pytest.raises(SupervisorGaveUp, match=r"3 starts in a row failed.*FileNotFoundError: no model at /nowhere"):
        await head.supervise(Strategy.ONE_FOR_ONE, "p0", role="broken")


async def test_a_role_that_can_never_start_is_started_once(head):
    with pytest.raises(SupervisorGaveUp, match=r"gave up on p0: NoSuchModel: model\.path: /nowhere holds no model"):
        await head.supervise(Strategy.ONE_FOR_ONE, "p0", role="hopeless")
    assert [e.kind for e in head.events] == ["start_failed", "gave_up"]


async def test_a_process_that_meets_a_permanent_error_is_not_started_again(head):
    supervisor = await head.supervise(Strategy.ONE_FOR_ONE, "p0", "p1")
    head.system.ref(supervisor.running("p0").address).tell(probe_child.CrashForGood())
    end = await head.system.wait_stopped("fleet")
    assert "NoSuchModel: model.path: /nowhere is gone (another start could only meet the same error)" in str(end.error)
    assert not [e for e in head.events if e.kind == "restarting"]
    assert await head.processes() == {}


class Owner(Actor):
    """Asks the agent for processes, as a supervisor would, and keeps the news."""

    def __init__(self, agent: ActorAddress) -> None:
        self.agent = agent
        self.news: asyncio.Queue[ProcessExited] = asyncio.Queue(maxsize=8)

    async def spawn(self, args: RoleArgs, ready_s: float = 20) -> SpawnReply:
        order = SpawnProcess(name=f"j.{args.name}", args=args, ready_timeout_s=ready_s, beacon_budget_s=60)
        return await self.ctx.ref(self.agent).ask(order, SpawnReply, timeout_s=ready_s + 5)

    @handles(ProcessExited)
    async def exited(self, message: ProcessExited) -> None:
        self.news.put_nowait(message)


async def test_a_process_that_is_not_ready_in_time_is_a_typed_failure_and_is_gone(head):
    owner = Owner(head.agent.address)
    await head.system.spawn("owner", owner)
    reply = await owner.spawn(role_args("p0", head.run_dir, "never"), ready_s=1.5)
    assert reply.started is None and "not ready" in reply.failure.detail
    assert await head.processes() == {}


async def test_a_name_is_taken_while_its_process_runs_for_another_owner_and_replaced_for_the_same(head):
    owner, other = Owner(head.agent.address), Owner(head.agent.address)
    await head.system.spawn("owner", owner)
    await head.system.spawn("other", other)
    first = (await owner.spawn(role_args("p0", head.run_dir))).started
    assert "runs here already" in (await other.spawn(role_args("p0", head.run_dir))).failure.detail
    second = (await owner.spawn(role_args("p0", head.run_dir))).started
    assert second.pid != first.pid and not psutil.pid_exists(first.pid)
    async with asyncio.timeout(5):
        news = await owner.news.get()
    assert (news.pid, news.cause) == (first.pid, ExitCause.STOPPED)


async def test_an_agent_that_stops_in_good_order_tells_the_owners_of_a_preemption(head):
    owner = Owner(head.agent.address)
    await head.system.spawn("owner", owner)
    await owner.spawn(role_args("p0", head.run_dir))
    await head.system.stop_actor("node")
    async with asyncio.timeout(5):
        news = await owner.news.get()
    assert (news.name, news.cause) == ("j.p0", ExitCause.PREEMPTED)


async def test_a_stubborn_process_is_killed_after_the_deadline_and_reported_as_stopped(head):
    owner = Owner(head.agent.address)
    await head.system.spawn("owner", owner)
    await owner.spawn(role_args("p0", head.run_dir, "stubborn"))
    stop = StopProcess(name="j.p0", deadline_s=0.3)
    assert (await head.agent.ask(stop, StopReply, timeout_s=5)).exit_code == -9
    async with asyncio.timeout(5):
        news = await owner.news.get()
    assert (news.name, news.cause, news.node) == ("j.p0", ExitCause.STOPPED, "n1")
    assert (await head.agent.ask(stop, StopReply, timeout_s=5)).exit_code is None


async def test_processes_whose_owner_is_gone_are_stopped_after_the_grace(head):
    owner = Owner(head.agent.address)
    await head.system.spawn("owner", owner)
    pid = (await owner.spawn(role_args("p0", head.run_dir))).started.pid
    owner.ctx.stop()
    await head.system.wait_stopped("owner")
    assert (await head.processes())["j.p0"][0] == pid
    await asyncio.to_thread(psutil.Process(pid).wait, 5)


async def test_an_agent_behind_a_tcp_link_serves_a_supervisor_and_its_processes_end_when_the_head_is_gone(tmp_path):
    command = [sys.executable, "-P", str(HERE / "probe_child.py")]
    write_keys(generate_keys(), tmp_path / "keys")
    keys = load_keys(tmp_path / "keys")

    def system(peer: PeerId) -> ActorSystem:
        links = ZmqTransport(peer, listen="tcp://127.0.0.1:*", cluster="test", limits=LIMITS, keys=keys)
        return ActorSystem(links, limits=LIMITS)

    node, head = system(PeerId("n2", 21)), system(PeerId("head", 22))
    await node.start()
    options = NodeOptions(cluster="test", command=command, keys=str(tmp_path / "keys"))
    agent = await node.spawn("agent", NodeAgent("n2", options))
    await head.start()
    events: asyncio.Queue[SupervisionEvent] = asyncio.Queue(maxsize=64)
    spec = process_child(role_args("p0", tmp_path), agent.address)
    supervisor = Supervisor("fleet", Strategy.ONE_FOR_ONE, [spec], on_event=events.put_nowait)
    await head.spawn("fleet", supervisor)
    await supervisor.ready(30)
    pid = supervisor.running("p0").pid
    assert (supervisor.running("p0").node, supervisor.running("p0").address.endpoint[:16]) == ("n2", "tcp://127.0.0.1:")
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(20):
        while (await events.get()).kind != "exited":
            pass
        await supervisor.ready(20)
    second = psutil.Process(supervisor.running("p0").pid)
    assert second.pid != pid
    supervisor.remove_child = supervisor.shutdown = _nothing  # the head dies without a word to its children
    await head.stop()
    await asyncio.to_thread(second.wait, 10)
    await node.stop()


async def _nothing(*_: object) -> None:
    pass


AGENT_PROCESS = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {here!r})
import test_role_processes as t
async def go():
    async with t.Head(Path({run_dir!r})) as head:
        supervisor = await head.supervise(t.Strategy.ONE_FOR_ONE, "p0", "p1")
        print("pids", supervisor.running("p0").pid, supervisor.running("p1").pid, flush=True)
        await asyncio.sleep(60)
asyncio.run(go())
"""


def test_kill_9_of_the_agents_process_leaves_no_orphans(tmp_path):
    code = AGENT_PROCESS.format(here=str(HERE), run_dir=str(tmp_path))
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent.parent.parent)}
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    line = next(line for line in parent.stdout if line.startswith("pids "))
    children = [psutil.Process(int(pid)) for pid in line.split()[1:]]
    assert len(children) == 2
    parent.kill()
    parent.communicate(timeout=5)
    for child in children:
        child.wait(timeout=5)


def held_file(head: Head, address: ActorAddress) -> Path:
    """What a killed puller leaves: a segment of 3 bytes in shared memory."""
    path = held_path(segment_path(head.run_dir, 3), address.name)
    path.write_bytes(b"abc")
    return path


async def test_shared_memory_of_a_process_that_does_not_come_back_is_given_back(head):
    supervisor = await head.supervise(Strategy.ONE_FOR_ONE, "p0", "p1", restart=RestartPolicy.TEMPORARY)
    gone, stays = (held_file(head, supervisor.running(name).address) for name in ("p0", "p1"))
    unfinished = gone.with_name(f"{gone.name}.partial")
    gone.rename(unfinished)
    try:
        os.kill(supervisor.running("p0").pid, signal.SIGKILL)
        async with asyncio.timeout(20):
            while unfinished.exists():
                await asyncio.sleep(0.05)
        assert stays.exists(), "its sibling runs, and has its own"
    finally:
        stays.unlink()
        unfinished.unlink(missing_ok=True)


async def test_shared_memory_of_a_process_that_comes_back_waits_for_its_next_life(head):
    supervisor = await head.supervise(Strategy.ONE_FOR_ONE, "p0")
    path = held_file(head, supervisor.running("p0").address)
    try:
        os.kill(supervisor.running("p0").pid, signal.SIGKILL)
        await head.until("started", "p0", 2)
        await asyncio.sleep(2 * LIMITS.orphan_grace_s)
        assert path.exists()
        await head.system.stop()
        assert not path.exists(), "the machine goes: nobody will look for it again"
    finally:
        path.unlink(missing_ok=True)


async def _work(head: Head, name: str, job_dir: Path, devices: tuple[str, ...] | None = None) -> Running:
    """One process of a job of its own in ``job_dir``, which may stay."""
    args, agent = role_args(name, job_dir), head.agent.address
    specs = [process_child(args, agent, restart=RestartPolicy.TEMPORARY, may_stay=True, devices=devices)]
    supervisor = Supervisor(f"fleet-{name}", Strategy.ONE_FOR_ONE, specs, on_event=head.on_event)
    await head.system.spawn(f"fleet-{name}", supervisor)
    await supervisor.ready(30)
    running = supervisor.running(name)
    assert running is not None
    return running


async def _finish(head: Head, running: Running, name: str) -> SupervisionEvent:
    head.system.ref(running.address).tell(probe_child.Finish(reason="preempted"))
    return await head.until("ended", name)


async def test_a_process_that_may_stay_serves_another_job_under_another_name_without_being_started_again(head):
    first = await _work(head, "a", head.run_dir / "one")
    ended = await _finish(head, first, "a")
    assert ended.cause is ExitCause.PREEMPTED, "its owner is told as ever"
    assert await head.processes() == {}, "and nobody sees it any more"

    second = await _work(head, "b", head.run_dir / "two")
    assert second.pid == first.pid and second.incarnation != first.incarnation
    assert second.address.peer.name == "n1.j.b"
    pong = await head.system.ref(second.address).ask(probe_child.Ping(), probe_child.Pong, timeout_s=5)
    assert pong.pid == first.pid
    assert '"process": "j.b"' in (head.run_dir / "two" / "logs" / "b.log").read_text()
    assert "j.b" not in (head.run_dir / "one" / "logs" / "a.log").read_text(), "each job has its own log"


async def test_a_process_that_stays_ends_as_any_other_when_it_is_killed_crashes_or_is_stopped(head):
    for number, (harm, cause) in enumerate(
        (
            (lambda running: os.kill(running.pid, signal.SIGKILL), ExitCause.KILLED),
            (lambda running: head.system.ref(running.address).tell(probe_child.Crash()), ExitCause.CRASHED),
        )
    ):
        before = await _work(head, f"a{number}", head.run_dir)
        await _finish(head, before, f"a{number}")
        running = await _work(head, f"b{number}", head.run_dir)
        assert running.pid == before.pid
        harm(running)
        ended = await head.until("ended", f"b{number}")
        assert ended.cause is cause
        if cause is ExitCause.CRASHED:
            assert ended.reason == "RuntimeError: told to crash", "its last words are heard in any tenancy"
        assert not psutil.pid_exists(running.pid)


async def test_one_that_waits_for_work_is_gone_with_the_agent_or_when_it_is_killed_meanwhile(head):
    running = await _work(head, "a", head.run_dir)
    await _finish(head, running, "a")
    assert psutil.pid_exists(running.pid)
    os.kill(running.pid, signal.SIGKILL)
    while psutil.Process(running.pid).status() != psutil.STATUS_ZOMBIE:  # the loop has no turn to hear of it
        time.sleep(0.001)
    again = await _work(head, "b", head.run_dir)
    assert again.pid != running.pid, "it is not asked, and another one is started"
    await _finish(head, again, "b")  # and this one waits when the agent ends: see Head.__aexit__


async def test_no_more_processes_wait_than_the_limit_says_and_none_for_ever(tmp_path):
    async with Head(tmp_path, LIMITS.model_copy(update={"parked_processes_max": 1, "parked_process_s": 1.0})) as head:
        both = [await _work(head, name, tmp_path) for name in ("a", "b")]
        for running, name in zip(both, ("a", "b"), strict=True):
            await _finish(head, running, name)
        await _until_gone(both[0].pid)
        assert psutil.pid_exists(both[1].pid), "the one that has waited longest goes"
        await _until_gone(both[1].pid)


async def _until_gone(pid: int) -> None:
    async with asyncio.timeout(20):
        while psutil.pid_exists(pid):
            await asyncio.sleep(0.05)


def _variable(running: Running, name: str) -> str | None:
    """What the process was started with."""
    variables = Path(f"/proc/{running.pid}/environ").read_text().split("\0")
    return next((text.partition("=")[2] for text in variables if text.startswith(f"{name}=")), None)


async def test_each_process_sees_its_own_devices_and_a_kept_one_serves_only_work_that_wants_the_same(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    async with Head(tmp_path, devices=Devices(("1", "2"), is_told=True)) as head:
        first = await _work(head, "a", tmp_path, ("2",))
        sees_all, sees_none = await _work(head, "b", tmp_path), await _work(head, "c", tmp_path, ())
        assert [_variable(running, "CUDA_VISIBLE_DEVICES") for running in (first, sees_all, sees_none)] == [
            "2", "1,2", ""
        ]  # fmt: skip
        listed = (await head.agent.ask(ListProcesses(), ProcessList, timeout_s=5)).processes
        assert {info.name: info.devices for info in listed} == {"j.a": ("2",), "j.b": (), "j.c": ()}
        await _finish(head, first, "a")
        other = await _work(head, "d", tmp_path, ("1",))
        assert other.pid != first.pid and _variable(other, "CUDA_VISIBLE_DEVICES") == "1"
        assert (await _work(head, "e", tmp_path, ("2",))).pid == first.pid


async def test_where_no_devices_are_known_a_process_has_the_environment_that_it_always_had(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    async with Head(tmp_path) as head:
        running = await _work(head, "a", tmp_path)
        assert (_variable(running, "CUDA_VISIBLE_DEVICES"), _variable(running, "CUDA_DEVICE_ORDER")) == ("7", None)


async def test_a_device_that_the_node_does_not_have_is_refused_and_nothing_starts(tmp_path):
    async with Head(tmp_path, devices=Devices(("0",))) as head:
        specs = [process_child(role_args("a", tmp_path), head.agent.address, devices=("3",))]
        await head.system.spawn("fleet", Supervisor("fleet", Strategy.ONE_FOR_ONE, specs, on_event=head.on_event))
        refused = await head.until("start_failed", "a")
        assert "j.a is to have the devices 3, but its machine has 0" in refused.detail
        assert not (tmp_path / "logs").exists()
