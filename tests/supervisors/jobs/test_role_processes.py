"""The processes of a job as children: rank groups are adopted whole, or what is left of them is stopped."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from supervisors.jobs import group_adoption, role_processes
from supervisors.jobs.role_processes import RoleProcesses
from supervisors.machine.membership.nodes import Nodes
from supervisors.tree.children import ChildSpec, Running
from supervisors.tree.restart_budget import ExitCause
from tests.smallest_job import smallest_job
from transport.address import ActorAddress, PeerId

NOBODY = ActorAddress("nobody", PeerId("nowhere", 1))
JOB = smallest_job(trainer={"backend": "fsdp", "ranks": 3})


class Log:
    def warning(self, *_: object, **__: object) -> None: ...


class Context:
    log = Log()


class Machines:
    """Adopts those that ``run``, and starts others; notes who is stopped and started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, run: set[str]) -> None:
        self.run, self.stopped, self.started = run, set[str](), set[str]()
        self.answers = asyncio.Event()
        self.answers.set()
        monkeypatch.setattr(group_adoption, "adopt", self.adopt)
        monkeypatch.setattr(role_processes, "start_process", self.start)

    async def adopt(
        self, _: object, __: object, process: str, actor: str, *, group: list[str], lent: bool
    ) -> Running | None:
        assert not lent and group == ["j.trainer", "j.trainer.rank1", "j.trainer.rank2"]
        await self.answers.wait()
        return self._running(actor, adopted=True) if actor in self.run else None

    async def start(self, _: object, __: object, args: Any, **___: object) -> Running:
        assert args.name not in self.run - self.stopped, "what is left of a group has ended before"
        self.started.add(args.name)
        return self._running(args.name, adopted=False)

    def _running(self, name: str, *, adopted: bool) -> Running:
        async def stop(_: float, __: ExitCause) -> None:
            await asyncio.sleep(0)
            self.stopped.add(name)

        return Running(NOBODY, stop, 1, "head", 1, adopted=adopted)


async def started(children: list[ChildSpec]) -> dict[str, bool]:
    """Name → whether it was adopted."""
    running = await asyncio.gather(*(child.start(cast(Any, Context())) for child in children))
    return {child.name: one.adopted for child, one in zip(children, running, strict=True)}


def trainer(tmp_path: Path, *, adopting: bool) -> list[ChildSpec]:
    nodes = Nodes("head")
    nodes.add_local("head", NOBODY, 1)
    nodes._signal = lambda: None
    processes = RoleProcesses(
        nodes, JOB, tmp_path, NOBODY, NOBODY, adopting=adopting, may_stay=False, service=None,
        record=lambda *_, **__: None,
    )  # fmt: skip
    return processes.children("trainer", "trainer", "local")


def test_followers_come_before_their_leader_and_share_its_fate(tmp_path: Path) -> None:
    children = trainer(tmp_path, adopting=False)
    assert [(child.name, child.role, child.group) for child in children] == [
        ("trainer.rank1", "rank", "trainer"), ("trainer.rank2", "rank", "trainer"), ("trainer", "trainer", "trainer"),
    ]  # fmt: skip


async def test_a_group_that_runs_whole_is_adopted_whole_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machines = Machines(monkeypatch, {"trainer", "trainer.rank1", "trainer.rank2"})
    children = trainer(tmp_path, adopting=True)
    assert await started(children) == {"trainer.rank1": True, "trainer.rank2": True, "trainer": True}
    assert not machines.stopped and not machines.started
    machines.run.clear()
    assert set((await started(children)).values()) == {False}, "a later start looks for nobody"


@pytest.mark.parametrize("missing", ["trainer", "trainer.rank1", "trainer.rank2"])
async def test_what_is_left_of_a_group_is_stopped_before_all_of_it_starts_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    machines = Machines(monkeypatch, {"trainer", "trainer.rank1", "trainer.rank2"} - {missing})
    assert set((await started(trainer(tmp_path, adopting=True))).values()) == {False}
    assert machines.stopped == machines.run and len(machines.started) == 3


@pytest.mark.parametrize("turns", range(-1, 6))
async def test_a_group_that_is_given_up_while_it_is_looked_for_leaves_nothing_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    """Before it is found, or so many turns of the loop later. Who has been given it by then stops it as any child."""
    machines = Machines(monkeypatch, {"trainer", "trainer.rank1", "trainer.rank2"})
    machines.answers.clear()
    children = trainer(tmp_path, adopting=True)
    starts = [asyncio.ensure_future(child.start(cast(Any, Context()))) for child in children]
    await asyncio.sleep(0.01)
    if turns >= 0:
        machines.answers.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    for start in starts:
        start.cancel()
    await asyncio.sleep(0)
    machines.answers.set()
    given = await asyncio.gather(*starts, return_exceptions=True)
    await asyncio.sleep(0.01)
    kept = {child.name for child, one in zip(children, given, strict=True) if isinstance(one, Running)}
    assert machines.stopped == machines.run - kept
    assert {child.adopted for child in given if isinstance(child, Running)} <= {True}
    machines.run.clear()
    if not kept:
        assert set((await started(children)).values()) == {False}
