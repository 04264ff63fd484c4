"""One look into every process of a head: rows of all of them, oldest first, and those that do not answer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from actors.core.actor import Actor, handles
from actors.core.kernel.delivery import current
from actors.core.look import Look, Sight
from actors.core.message import Done, Message, message
from actors.core.system import ActorSystem
from actors.ledger.memory_journal import MemoryJournal
from actors.protocol.batches import SetPaused
from actors.protocol.failures import Acknowledged
from actors.protocol.jobs import JobState
from actors.scheduler.scheduler import Scheduler
from configs.limits import DEFAULT_LIMITS
from supervisors.head.stall_report import StallReport
from supervisors.head.view import HeadView
from supervisors.machine.membership.nodes import Node
from tests.simulated import run_simulated
from tests.smallest_job import smallest_job
from transport.address import PeerId
from transport.memory_transport import MemoryNetwork, MemoryTransport
from transport.transport import Lane


@message("test_lookout.work")
class Work(Message):
    take_s: float


class Agent(Actor):
    def __init__(self, *, mute: bool = False) -> None:
        self.mute = mute
        self.asked_on: list[Lane] = []

    @handles(Look)
    async def look(self, message: Look) -> Sight:
        delivery = current.get()
        assert delivery is not None
        self.asked_on.append(delivery.lane)
        if self.mute:
            await self.ctx.sleep(60.0)
        return self.ctx.look(message)


class Worker(Actor):
    @handles(Work)
    async def work(self, message: Work) -> None:
        await self.ctx.sleep(message.take_s)


async def _stalls(*names: str, mute: str = "") -> tuple[StallReport, dict[str, ActorSystem], Any]:
    network = MemoryNetwork()
    systems: dict[str, ActorSystem] = {}
    nodes: list[Node] = []
    for number, name in enumerate(("head", *names), 1):
        systems[name] = system = ActorSystem(MemoryTransport(network, PeerId(name, number), limits=DEFAULT_LIMITS))
        await system.start()
        if name != "head":
            agent = await system.spawn("agent", Agent(mute=name == mute))
            nodes.append(Node(name, agent.address, 1, local=False))
    head = SimpleNamespace(system=systems["head"], limits=DEFAULT_LIMITS, jobs={}, nodes=SimpleNamespace(present=nodes),
                           services=SimpleNamespace(all=[]))  # fmt: skip
    return StallReport(cast(HeadView, head)), systems, head


async def _stop(systems: dict[str, ActorSystem]) -> None:
    for system in systems.values():
        await system.stop()


def test_waits_of_all_processes_stand_in_one_table_oldest_first():
    async def scenario() -> None:
        stall_report, systems, _ = await _stalls("a", "b")
        asked: list[asyncio.Future[Any]] = []
        for name in ("b", "a"):
            worker = await systems[name].spawn("worker", Worker())
            asked.append(asyncio.ensure_future(worker.ask(Work(take_s=9.0), Done)))
            await asyncio.sleep(2.0)
        rows = await stall_report.stalls(1.0)
        # each question is a wait of its asker and work of its target, both in that process
        assert [(row["process"], row["kind"]) for row in rows] == [
            ("b", "ask"), ("b", "handler"), ("a", "ask"), ("a", "handler"),
        ]  # fmt: skip
        assert [round(row["since_s"]) for row in rows] == [4, 4, 2, 2]
        assert [row["process"] for row in await stall_report.stalls(3.0)] == ["b", "b"]
        await asyncio.gather(*asked)
        assert await stall_report.stalls(1.0) == []
        await _stop(systems)

    run_simulated(scenario())


class StuckDisk(MemoryJournal):
    """Takes what it is given, and confirms nothing while it is not ``well``."""

    def __init__(self) -> None:
        super().__init__("j")
        self.well = asyncio.Event()
        self.well.set()

    async def durable(self) -> None:
        await self.well.wait()
        await super().durable()


def test_what_a_job_waits_for_is_told_though_its_scheduler_takes_no_further_message(tmp_path: Path):
    async def scenario() -> None:
        stall_report, systems, head = await _stalls()
        journal = StuckDisk()
        scheduler = await systems["head"].spawn("scheduler.j", Scheduler(smallest_job(), tmp_path, journal))
        no_processes = SimpleNamespace(supervisors={}, pool=SimpleNamespace(trainer_waits=lambda: ("", 0.0)))
        head.jobs["j"] = SimpleNamespace(job=smallest_job(), state=JobState.RUNNING, tree=no_processes)
        journal.well.clear()
        pausing = asyncio.ensure_future(scheduler.ask(SetPaused(job="j", paused=True), Acknowledged, timeout_s=60.0))
        await asyncio.sleep(8.0)
        (row,) = [row for row in await stall_report.stalls(0.0) if row["kind"] == "job"]
        assert (row["waiter"], row["waits_for"]) == ("job.j", "a resume: the job is paused")
        assert not [row for row in await stall_report.stalls(9.0) if row["kind"] == "job"]
        head.jobs["j"].state = JobState.FAILED
        assert not [row for row in await stall_report.stalls(0.0) if row["kind"] == "job"]
        assert not pausing.done()
        journal.well.set()
        await pausing
        await _stop(systems)

    run_simulated(scenario())


def test_a_process_that_does_not_answer_is_a_row_and_holds_up_nobody():
    async def scenario() -> None:
        stall_report, systems, _ = await _stalls("a", "b", "c", mute="b")
        began_s = asyncio.get_running_loop().time()
        (row,) = await stall_report.stalls(1.0)
        assert (row["waiter"], row["waits_for"], row["kind"]) == ("head", "b", "silent")
        assert asyncio.get_running_loop().time() - began_s <= DEFAULT_LIMITS.look_timeout_s + 0.1
        await _stop(systems)

    run_simulated(scenario())


def test_dead_letters_of_all_processes_are_counted_and_listed():
    async def scenario() -> None:
        stall_report, systems, _ = await _stalls("a")
        lost = systems["a"].address("nobody")
        systems["head"].ref(lost).tell(Work(take_s=0.0))
        systems["head"].ref(lost).tell(Work(take_s=0.0))
        await asyncio.sleep(1.0)
        told = await stall_report.dead_letters()
        assert told["counts"] == [{"process": "a", "reason": "unknown_actor", "messages": 2}]
        assert [(letter["tag"], letter["ago_s"]) for letter in told["newest"]] == [("test_lookout.work", 1.0)] * 2
        await _stop(systems)

    run_simulated(scenario())


def test_processes_are_looked_into_on_the_lane_for_signals_past_what_they_say():
    async def scenario() -> None:
        stall_report, systems, _ = await _stalls("a")
        await stall_report.stalls(0.0)
        agent = systems["a"].hosted("agent")
        assert isinstance(agent, Agent) and agent.asked_on == [Lane.SIGNAL]
        await _stop(systems)

    run_simulated(scenario())
