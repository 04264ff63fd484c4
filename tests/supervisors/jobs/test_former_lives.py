"""What the next life of a head is told of those before it: whether there is anything of theirs to go on with."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from actors.core.system import ActorSystem
from configs.limits import DEFAULT_LIMITS, Limits
from configs.run_files import JOURNAL
from supervisors.head.head import Head
from supervisors.head.head_messages import Former, FormerJob, HeadOrder, HeadProgress, JobOrder
from supervisors.head.head_process import lead
from supervisors.head.machine_process import HeadKeeper, MachineProcess
from supervisors.jobs.job_run import FormerLife
from supervisors.machine.machine import LocalMachine
from supervisors.machine.processes.held_sockets import Listening
from supervisors.machine.processes.process import EXIT_CRASHED, Child, Launch
from supervisors.simulation.cluster import main_process
from supervisors.simulation.runner import simulate
from tests.simulated import run_simulated
from tests.smallest_job import smallest_job
from tests.supervisors.simulation.scenarios import scenario
from transport.address import PeerId
from transport.memory_transport import MemoryNetwork, MemoryTransport


def order(run_dir: Path, **more: Any) -> HeadOrder:
    return HeadOrder(
        run_root=str(run_dir.parent), directory=str(run_dir), log=str(run_dir / "head.log"),
        jobs=(JobOrder(smallest_job().model_dump_json(), str(run_dir)),), **more,
    )  # fmt: skip


class PretendHead:
    """Keeps what it is told of the lives before."""

    endpoint, limits = "", DEFAULT_LIMITS
    admission, nodes = SimpleNamespace(keep_only=lambda _: None), None

    def __init__(self, system: ActorSystem) -> None:
        self.system = system
        self.former: FormerLife | None = None

    async def begin_services(self, rules: object, *, former: bool) -> None:
        assert rules is None, "it has none"

    def subscribe(self, listener: object) -> None:
        pass

    def launch(
        self, job: object, run_dir: object, former: FormerLife | None, **_: object
    ) -> asyncio.Future[dict[str, Any]]:
        self.former = former
        ended = asyncio.get_running_loop().create_future()
        ended.set_result({})
        return ended


@pytest.mark.parametrize(
    ("resume", "begun", "journal", "goes_on"),
    [
        (True, False, True, False),
        (True, True, True, True),
        (False, False, True, True),
        (False, False, False, False),
    ],
)
def test_a_journal_of_before_the_resume_is_no_sign_of_a_former_life(
    tmp_path: Path, resume: bool, begun: bool, journal: bool, goes_on: bool
) -> None:
    """Taken for one, the order to stop that ended the run before would end this one, too."""

    async def lives() -> None:
        system = ActorSystem(MemoryTransport(MemoryNetwork(), PeerId("head", 1)))
        await system.start()
        keeper = await system.spawn("keeper", HeadKeeper(lambda _: None, lambda _: None))
        if journal:
            (tmp_path / JOURNAL).touch()
        head = PretendHead(system)
        former = Former(ended="killed", restarts=1, jobs={"j": FormerJob(restarts=1, workers=3, begun=begun)})
        told = msgspec.structs.replace(order(tmp_path, resume=resume, former=former), life=2, keeper=keeper.address)
        await lead(cast(Head, head), told, "", asyncio.Event())
        assert head.former == (FormerLife("killed", 1, 3) if goes_on else None)

    run_simulated(lives())


class PretendChild(Child):
    def send_signal(self, number: int) -> None:
        self._ended(-number)

    def _signal_group(self, number: int) -> None:
        self._ended(-number)

    def crash(self) -> None:
        self._ended(EXIT_CRASHED)


class PretendMachine(LocalMachine):
    """Its heads are objects."""

    def __init__(self) -> None:
        super().__init__()
        self.heads: asyncio.Queue[tuple[HeadOrder, PretendChild]] = asyncio.Queue()

    def transport(self, name: str, *, limits: Limits, **_: object) -> MemoryTransport:
        return MemoryTransport(MemoryNetwork(), PeerId(name, 1), limits=limits)

    def launch(self, spec: Launch, listening: Listening | None = None) -> Child:
        child = PretendChild(1, asyncio.get_running_loop())
        self.heads.put_nowait((HeadOrder.decode(spec.stdin), child))
        return child

    def is_stopped(self, pid: int) -> bool:
        return False


def test_the_next_life_is_told_whether_any_before_it_got_as_far_as_the_core(tmp_path: Path) -> None:
    async def lives() -> None:
        machine = PretendMachine()
        process = MachineProcess(
            listen="memory://head", limits=Limits(start_attempts_max=9), on_progress=lambda _: None,
            on_ready=lambda _: None, machine=machine,
        )  # fmt: skip
        await process.start()
        leading = asyncio.create_task(process.lead(order(tmp_path, resume=True), asyncio.Event()))
        begun: list[bool | None] = []
        for says in ("nothing", "ready", "nothing", "nothing"):
            told, head = await machine.heads.get()
            begun.append(told.former.jobs["j"].begun if told.former is not None else None)
            await process.keeper.head_progress(HeadProgress(life=told.life, fields={"of_job": "j", "core": says}))
            head.crash()
        assert begun == [None, False, True, True]
        leading.cancel()
        await process.stop()

    run_simulated(lives())


def test_a_head_whose_core_stands_has_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    led: list[MachineProcess] = []

    class Kept(MachineProcess):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            led.append(self)

    monkeypatch.setattr(main_process, "MachineProcess", Kept)
    assert simulate(scenario(jobs=[{"name": "a", "steps": 1}]), 1).violations == []
    assert [process.keeper.jobs["a"].begun for process in led] == [True]
