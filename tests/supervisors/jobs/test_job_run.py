"""An interruption outlives the restarts of those who are to obey it; a job may have to wait for a service."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from actors.core.errors import AskError
from actors.protocol.job_news import JobEvent
from actors.protocol.jobs import JobState
from configs.limits import Limits
from configs.schema import JobConfig
from supervisors.jobs import job_run
from supervisors.jobs.job_run import JobRun
from supervisors.machine.membership.nodes import Nodes
from supervisors.tree.errors import NeverServed
from tests.simulated import run_simulated
from tests.smallest_job import smallest_job
from transport.address import ActorAddress

LIMITS = Limits(restart_window_s=30.0)


class Job:
    """In the place of the job's actor; ``away_s``: so long nobody answers for it."""

    def __init__(self, away_s: float, *, hears: bool = False) -> None:
        self.run: JobRun
        self._back_s, self._hears = asyncio.get_running_loop().time() + away_s, hears
        self.asked = 0

    async def ask(self, *_: Any) -> None:
        self.asked += 1
        away = asyncio.get_running_loop().time() < self._back_s
        if self._hears or not away:
            self.tell("state", JobState.STOPPING)
            asyncio.get_running_loop().call_later(5.0, self._end)
        if away:
            raise AskError("unknown actor job.j: its supervisor starts another one")

    def _end(self) -> None:
        self.tell("state", JobState.INTERRUPTED)
        self.tell("ended", JobState.INTERRUPTED)

    def tell(self, kind: str, state: JobState) -> None:
        result = {"job": "j", "steps": 3, "seconds": 1.0, "state": str(state)}
        self.run._hear(JobEvent(job="j", kind=kind, fields={"state": str(state)}, result=result))


async def _never() -> str:
    return await asyncio.get_running_loop().create_future()


async def _interrupted(job: Job, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], float]:
    """The summary of a run of ``job`` whose operator interrupts at once, and how long it took."""
    system = SimpleNamespace(ref=lambda _: job, address=lambda name: name, endpoint="ipc://head")
    run = JobRun(cast(Any, system), Nodes("head"), smallest_job(limits=LIMITS), run_dir)
    job.run = run
    job.tell("begun", JobState.RUNNING)
    monkeypatch.setattr(run.tree, "failed", _never)
    interrupted, loop = asyncio.Event(), asyncio.get_running_loop()
    interrupted.set()
    began_s = loop.time()
    async with asyncio.timeout(600.0):
        return await run.wait(interrupted), loop.time() - began_s


def test_a_job_that_is_away_when_it_is_interrupted_ends_once_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        summary, _ = await _interrupted(Job(away_s=12.0), tmp_path, monkeypatch)
        assert summary == {"job": "j", "steps": 3, "seconds": 1.0, "restarts": 0, "state": "interrupted"}

    run_simulated(scenario())


def test_a_job_that_stops_though_its_answer_was_lost_is_not_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        job = Job(away_s=1000.0, hears=True)
        summary, _ = await _interrupted(job, tmp_path, monkeypatch)
        assert (summary["state"], job.asked) == ("interrupted", 1)

    run_simulated(scenario())


def test_a_job_that_never_comes_back_ends_as_failed_after_the_restart_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        summary, took_s = await _interrupted(Job(away_s=1000.0), tmp_path, monkeypatch)
        assert summary["state"] == "failed"
        assert "could not be interrupted" in summary["error"]
        assert took_s <= LIMITS.restart_window_s

    run_simulated(scenario())


class Stopping(Job):
    """Is stopping for ``stops_s`` before it ends."""

    stops_s = 10_000.0

    async def ask(self, *_: Any) -> None:
        self.tell("state", JobState.STOPPING)
        asyncio.get_running_loop().call_later(self.stops_s, self._end)


@pytest.mark.parametrize("trainer_runs", [False, True])
def test_a_job_whose_trainer_stays_away_when_it_is_to_stop_ends_as_failed_and_any_other_takes_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainer_runs: bool
) -> None:
    """As on a lost node: nobody will take the checkpoint."""

    async def scenario() -> None:
        monkeypatch.setattr(job_run.JobTree, "trainer_runs", lambda _: trainer_runs)
        job = Stopping(away_s=0.0)
        job.stops_s = 500.0 if trainer_runs else 10_000.0
        summary, took_s = await _interrupted(job, tmp_path, monkeypatch)
        if trainer_runs:
            assert (summary["state"], took_s) == ("interrupted", 500.0)
        else:
            assert summary["state"] == "failed" and "the job needs its trainer, which has been away" in summary["error"]
            assert took_s <= LIMITS.stop_silence_s + LIMITS.stall_report_s

    run_simulated(scenario())


async def test_a_job_that_waits_for_nodes_ends_at_once_when_it_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = waiting_run(tmp_path, None, monkeypatch, cluster={"nodes": 1, "wait_s": 600.0}, trainer={})
    interrupted = asyncio.Event()
    starting = asyncio.create_task(run.start(interrupted))
    await asyncio.sleep(0.05)
    interrupted.set()
    async with asyncio.timeout(5.0):
        assert not await starting
    assert run.state is JobState.INTERRUPTED


# ------------------------------------------------------------ a place on a training service


class FullService:
    """Services that have no room until ``freed``."""

    def __init__(self) -> None:
        self.freed, self.left = asyncio.Event(), list[str]()

    async def admit(self, job: JobConfig, run_dir: Path, model_path: Path, say: Callable[[str], None]) -> None:
        say("queued: waits for 1.2 GB on train-0")
        await self.freed.wait()

    async def address(self, job: str) -> ActorAddress:
        raise AssertionError("no trainer is started here")

    async def leave(self, job: str) -> None:
        self.left.append(job)


def waiting_run(
    run_dir: Path, places: FullService | None, monkeypatch: pytest.MonkeyPatch, **changes: Any
) -> tuple[JobRun, list[Mapping[str, Any]]]:
    async def model(*_: Any) -> Path:
        return run_dir

    async def begun(*_: Any) -> None:
        raise OSError("the core is built here")

    monkeypatch.setattr(job_run, "prepare_model", model)
    monkeypatch.setattr(job_run, "look_at_text", begun)
    system = SimpleNamespace(address=lambda name: name, actors=list, endpoint="ipc://head")

    async def spawn(*_: Any) -> None: ...

    system.spawn = spawn
    said: list[Mapping[str, Any]] = []
    wanted = smallest_job(**{"trainer": {"service": "train-0"}} | changes)
    run = JobRun(cast(Any, system), Nodes("head"), wanted, run_dir, places=places)
    run.subscribe(said.append)
    return run, said


async def test_a_job_is_queued_until_a_service_has_room_and_says_for_what_it_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = FullService()
    run, said = waiting_run(tmp_path, places, monkeypatch)
    starting = asyncio.create_task(run.start(asyncio.Event()))
    await asyncio.sleep(0.05)
    assert (run.state, said[-1]["message"]) == (JobState.QUEUED, "queued: waits for 1.2 GB on train-0")
    places.freed.set()
    with pytest.raises(OSError, match="the core is built here"):
        await starting
    assert run.state is not JobState.QUEUED
    await run.stop()
    assert places.left == ["j"]


@pytest.mark.parametrize("how", ["cancel", "interrupt"])
async def test_a_queued_job_that_is_cancelled_ends_as_interrupted_before_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    run, _ = waiting_run(tmp_path, FullService(), monkeypatch)
    interrupted = asyncio.Event()
    starting = asyncio.create_task(run.start(interrupted))
    await asyncio.sleep(0.05)
    if how == "cancel":
        assert run.abandon()
    else:
        interrupted.set()
    async with asyncio.timeout(5.0):
        assert not await starting
    assert run.state is JobState.INTERRUPTED


async def test_a_job_that_names_a_service_of_a_head_without_any_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = waiting_run(tmp_path, None, monkeypatch)
    with pytest.raises(NeverServed, match=r"train-0 is named, but there are no services\. Add --services FILE"):
        await run.start(asyncio.Event())
