"""What a head makes of its jobs' ends, whatever they are. The runs are stubs: no process is started."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from actors.jobs.messages import JobState
from configs.limits import Limits
from supervisors import head as head_module
from supervisors.head import Head
from tests.smallest_job import smallest_job
from transport.address import ActorAddress, PeerId

NOBODY = ActorAddress("", PeerId("", 0))


class Run:
    """As much of a JobRun as a head looks at."""

    def __init__(self, *parts: Any, **_: Any) -> None:
        self.job, self.run_dir = parts[2], parts[3]
        self.tree = SimpleNamespace(workers_wanted=1)
        self.continued, self.error, self.done = False, "", asyncio.Event()
        self.stopping, self.may_stop = asyncio.Event(), asyncio.Event()
        self.may_stop.set()

    async def start(self, _: asyncio.Event) -> bool:
        return True

    async def wait(self, _: asyncio.Event) -> None:
        await self.done.wait()

    async def stop(self) -> None:
        self.stopping.set()
        await self.may_stop.wait()

    def fail(self, why: str) -> None:
        self.error = why

    @property
    def state(self) -> JobState:
        if self.error:
            return JobState.FAILED
        return JobState.FINISHED if self.done.is_set() else JobState.RUNNING

    def summary(self) -> dict[str, Any]:
        return {"job": self.job.name, "state": str(self.state), "error": self.error}

    def subscribe(self, _: Any) -> Callable[[], None]:
        return lambda: None


@pytest.fixture
async def head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Head]:
    monkeypatch.setattr(head_module, "JobRun", Run)
    monkeypatch.setattr(head_module, "Nemesis", lambda *_: SimpleNamespace(stop=lambda: None))
    made = Head(run_root=tmp_path, listen="memory://head", agent=NOBODY, limits=Limits(stop_timeout_s=0.2))
    made.system = cast(Any, SimpleNamespace(stop=_nothing))
    yield made
    for run in made.jobs.values():
        cast(Any, run).may_stop.set()
    await made.stop()


async def _nothing() -> None:
    pass


async def _bug(*_: Any) -> bool:
    raise KeyError("nobody has thought of it")


def stub(head: Head, job: str = "j") -> Run:
    return cast(Run, head.jobs[job])


async def soon(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5.0):
        while not condition():
            await asyncio.sleep(0.005)


# ------------------------------------------------------------ errors that nobody has thought of


async def test_a_submitted_job_whose_start_has_a_bug_is_failed_and_its_name_is_free(
    head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Run, "start", _bug)
    head.launch(smallest_job(), tmp_path)
    await soon(lambda: stub(head).state.over)
    assert "nobody has thought of it" in stub(head).error
    await soon(lambda: not head.register.read())
    await head.interrupt_jobs()


async def test_a_run_with_a_bug_ends_in_a_summary_that_says_so(
    head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Run, "wait", _bug)
    summary = await head.run(smallest_job(), tmp_path, asyncio.Event())
    assert (summary["state"], summary["error"]) == ("failed", "KeyError('nobody has thought of it')")
