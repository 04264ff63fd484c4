"""An interruption outlives the restarts of those who are to obey it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from actors.core.errors import AskError
from actors.protocol.job_news import JobEvent
from actors.protocol.jobs import JobState
from configs.limits import Limits
from supervisors.jobs.job_run import JobRun
from supervisors.machine.nodes import Nodes
from tests.simulated import run_simulated
from tests.smallest_job import smallest_job

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
    system = SimpleNamespace(ref=lambda _: job, address=lambda name: name)
    run = JobRun(cast(Any, system), Nodes("head"), smallest_job(limits=LIMITS), run_dir, on_progress=None)
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
