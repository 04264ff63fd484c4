"""What a head makes of its jobs' ends, whatever they are. The runs are stubs: no process is started."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from actors.control.backend import Plain
from actors.control.errors import NotNow
from actors.protocol.jobs import JobState
from configs.errors import ConfigError
from configs.limits import Limits
from configs.run_files import HEAD_JOBS
from configs.schema import JobConfig
from configs.services import ServiceConfig, ServicesConfig
from supervisors.cli.running.services_file import services_of
from supervisors.head import head as head_module
from supervisors.head.head import Head
from supervisors.head.head_messages import Former, FormerJob, HeadOrder, JobOrder
from supervisors.head.head_process import Reporter, former_life, launch_again, run_jobs
from supervisors.head.job_register import JobRegister
from supervisors.head.operations import Operations
from supervisors.sharing.service_register import ServiceRegister
from tests.smallest_job import smallest_job
from transport.address import ActorAddress, PeerId

NOBODY = ActorAddress("", PeerId("", 0))


class Run:
    """As much of a JobRun as a head looks at."""

    def __init__(self, *parts: Any, **_: Any) -> None:
        self.job, self.run_dir = parts[2], parts[3]
        self.tree = SimpleNamespace(pool=SimpleNamespace(workers_wanted=1))
        self.continued, self.error, self.done = False, "", asyncio.Event()
        self.stopping, self.may_stop = asyncio.Event(), asyncio.Event()
        self.may_stop.set()
        self.listeners: list[Callable[[dict[str, Any]], None]] = []

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

    def subscribe(self, listener: Callable[[dict[str, Any]], None]) -> Callable[[], None]:
        self.listeners.append(listener)
        return lambda: self.listeners.remove(listener)

    def say(self, **progress: Any) -> None:
        for listener in list(self.listeners):
            listener(progress)


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


async def _none_left() -> float:
    return 0.0


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
    summary = await head.launch(smallest_job(), tmp_path, alone=True)
    assert (summary["state"], summary["error"]) == ("failed", "KeyError('nobody has thought of it')")


# ------------------------------------------------------------ what an earlier run has left


async def test_a_head_whose_first_life_died_at_once_goes_on_with_nothing_of_an_earlier_run(
    head: Head, tmp_path: Path
) -> None:
    earlier = "machine#1"
    old = ServicesConfig(services=[ServiceConfig(name="old", memory_bytes=1000)])
    ServiceRegister(tmp_path, earlier).begin(old)
    JobRegister(tmp_path, earlier).add(tmp_path / "old")

    await head.begin_services(ServicesConfig(services=[]), former=True)
    assert (head.services.all, head.register.read()) == ([], [])
    head.register.add(tmp_path / "new")
    assert JobRegister(tmp_path, str(NOBODY.peer)).read() == [tmp_path / "new"]


@pytest.mark.parametrize("left", [b"", b'{"owner": "machine#1", "run_d', b'["/runs/old"]'])
def test_a_register_that_cannot_be_read_counts_as_nothing(left: bytes, tmp_path: Path) -> None:
    (tmp_path / HEAD_JOBS).write_bytes(left)
    register = JobRegister(tmp_path, "machine#2")
    assert register.read() == []
    register.add(tmp_path / "new")
    assert register.read() == [tmp_path / "new"]


async def test_people_are_told_of_a_job_with_which_the_next_life_of_a_head_cannot_go_on(
    head: Head, tmp_path: Path
) -> None:
    head.register.add(tmp_path / "gone")
    told: list[dict[str, Any]] = []
    order = HeadOrder(run_root="", directory="", log="")
    launch_again(head, order, cast(Reporter, SimpleNamespace(progress=told.append)))
    (said,) = told
    assert said["message"].startswith(f"the restarted head cannot go on with {tmp_path / 'gone'}: ")


async def test_a_job_that_cannot_be_noted_does_not_begin_and_can_be_submitted_again(
    head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(JobRegister, "add", full)
        with pytest.raises(NotNow, match="No space left"):
            await Operations(head).submit(submitted())
    assert (head.jobs, head.register.read()) == ({}, [])
    run_dir = next(head.run_root.glob("*/job.yaml")).parent
    head.machine.lock(run_dir, 1).release()
    await Operations(head).submit(submitted())
    stub(head).done.set()
    await head.interrupt_jobs()


async def test_a_job_that_ends_on_a_full_disk_leaves_the_register_all_the_same(
    head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("j", "k"):
        head.launch(smallest_job(name=name), tmp_path / name)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        stub(head, "j").done.set()
        await soon(lambda: head.register.read() == [tmp_path / "k"])
        patch.setattr(Path, "open", full)
        stub(head, "k").done.set()
        assert await head.name_is_free("k"), "what cannot be written at all is said, and keeps nobody"
    assert head.register.read() == [tmp_path / "k"]
    await head.interrupt_jobs()


async def test_a_submitted_job_that_wants_machines_started_is_refused(head: Head) -> None:
    """Nobody would start them: it would wait for workers for ever."""
    functions = {
        "provider": {"kind": "functions"}, "cluster": {"place_rollout": "elastic"}, "sync": {"mode": "sync"},
        "rollout": {"engine": "simulated", "workers": 0, "length_ranking": "history"},
        "scheduling": {"policy": "planned", "workers_max": 2},
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"provider\.kind: functions, and a head starts no machines"):
        await Operations(head).submit(submitted() | functions)
    assert head.jobs == {}


def test_a_command_that_is_resumed_finds_the_services_of_the_run_before(tmp_path: Path) -> None:
    old = ServicesConfig(services=[ServiceConfig(name="old", memory_bytes=1000)])
    ServiceRegister(tmp_path, "machine#1").begin(old)
    assert services_of(None, tmp_path) == old


# ------------------------------------------------------------ a name that is used again


def submitted() -> dict[str, Any]:
    data = {"source": "reasoning_gym", "task": "spell_backward"}
    return smallest_job(data=data, reward={"kind": "reasoning_gym"}).model_dump(mode="json", exclude_unset=True)


async def being_taken_down(head: Head, ops: Operations) -> Run:
    """A job that is over, and whose tree stays until ``may_stop``."""
    await ops.submit(submitted())
    run = stub(head)
    run.may_stop.clear()
    run.done.set()
    await run.stopping.wait()
    return run


async def test_a_job_of_the_same_name_waits_until_the_former_one_is_taken_down(head: Head) -> None:
    ops = Operations(head)
    former = await being_taken_down(head, ops)
    again = asyncio.create_task(ops.submit(submitted()))
    await asyncio.sleep(0.05)
    assert (again.done(), stub(head)) == (False, former)
    former.may_stop.set()
    assert (await again)["run_dir"].endswith("j-2")
    assert stub(head) is not former
    assert [directory.name for directory in head.register.read()] == ["j-2"]


async def test_a_former_job_that_takes_long_to_take_down_is_told_of_and_nothing_is_begun(
    head: Head, tmp_path: Path
) -> None:
    ops = Operations(head)
    await being_taken_down(head, ops)
    with pytest.raises(NotNow, match="taken down"):
        await ops.submit(submitted())
    assert not (tmp_path / "j-2").exists()


async def test_of_two_that_wait_for_a_name_one_gets_it(head: Head) -> None:
    ops = Operations(head)
    former = await being_taken_down(head, ops)
    both = [asyncio.create_task(ops.submit(submitted())) for _ in range(2)]
    await asyncio.sleep(0.05)
    former.may_stop.set()
    ends = await asyncio.gather(*both, return_exceptions=True)
    assert sorted(type(end).__name__ for end in ends) == ["NotNow", "dict"]


# ------------------------------------------------------------ who watches


async def next_of(events: AsyncGenerator[Plain, None]) -> Plain:
    async with asyncio.timeout(5.0):
        return await anext(events)


async def test_who_watches_an_idle_head_sees_the_jobs_that_are_submitted_later(head: Head, tmp_path: Path) -> None:
    events = Operations(head).watch(None)
    first = asyncio.create_task(next_of(events))
    await asyncio.sleep(0.05)
    head.launch(smallest_job(), tmp_path / "j")
    assert await first == {"kind": "state", "job": "j", "state": "running"}
    stub(head).say(message="hello")
    assert await next_of(events) == {"kind": "message", "job": "j", "message": "hello"}
    former = stub(head)
    former.done.set()
    assert await head.name_is_free("j")
    head.launch(smallest_job(), tmp_path / "j-2")
    assert (await next_of(events))["kind"] == "state"
    assert former.listeners == []
    await events.aclose()
    assert stub(head).listeners == []


async def test_who_watches_one_job_hears_of_no_other_and_its_stream_ends_with_it(head: Head, tmp_path: Path) -> None:
    head.launch(smallest_job(), tmp_path / "j")
    events = Operations(head).watch("j")
    assert (await next_of(events))["job"] == "j"
    head.launch(smallest_job(name="k"), tmp_path / "k")
    stub(head, "k").say(message="unheard")
    stub(head).done.set()
    stub(head).say(state="finished")
    assert [event async for event in events] == [{"kind": "state", "job": "j", "state": "finished"}]


# ------------------------------------------------------------ several jobs of one command


def several(tmp_path: Path, *names: str, **order: Any) -> HeadOrder:
    """Run directories, and the order to run jobs in them."""
    jobs: list[JobOrder] = []
    for name in names:
        (tmp_path / name).mkdir(exist_ok=True)
        job = JobConfig.model_validate(submitted() | {"name": name})
        jobs.append(JobOrder(job.model_dump_json(), str(tmp_path / name)))
    return HeadOrder(run_root=str(tmp_path), directory=str(tmp_path), log="", jobs=tuple(jobs), **order)


def started(
    head: Head, order: HeadOrder, interrupted: asyncio.Event, told: list[dict[str, Any]]
) -> asyncio.Task[dict[str, Any]]:
    assert order.jobs is not None
    reporter = cast(Reporter, SimpleNamespace(progress=told.append))
    return asyncio.create_task(run_jobs(head, order, order.jobs, interrupted, reporter))


async def ended(head: Head, work: asyncio.Task[dict[str, Any]], *names: str) -> dict[str, Any]:
    await soon(lambda: set(names) <= head.jobs.keys())
    for name in names:
        stub(head, name).done.set()
    async with asyncio.timeout(5.0):
        return await work


async def test_several_jobs_run_side_by_side_and_each_leaves_its_summary(head: Head, tmp_path: Path) -> None:
    told: list[dict[str, Any]] = []
    work = started(head, several(tmp_path, "a", "b"), asyncio.Event(), told)
    await soon(lambda: {"a", "b"} <= head.jobs.keys())
    stub(head, "a").fail("it broke")
    summaries = await ended(head, work, "a", "b")
    assert {name: summary["state"] for name, summary in summaries.items()} == {"a": "failed", "b": "finished"}
    assert json.loads((tmp_path / "b" / "summary.json").read_text()) == summaries["b"]
    assert [news["of_job"] for news in told if news.get("processes") == "gone"] == ["a", "b"]


async def test_a_job_that_is_alone_in_the_heads_directory_shares_and_notes_nothing(head: Head, tmp_path: Path) -> None:
    job = smallest_job()
    order = HeadOrder(
        run_root="", directory=str(tmp_path), log="", jobs=(JobOrder(job.model_dump_json(), str(tmp_path)),)
    )
    summaries = await ended(head, started(head, order, asyncio.Event(), []), "j")
    assert (summaries["j"]["state"], [*tmp_path.iterdir()]) == ("finished", [])


async def test_machines_of_one_jobs_provider_are_no_others(head: Head, tmp_path: Path) -> None:
    head.launch(smallest_job(name="a"), tmp_path / "a", machines="a-")
    head.launch(smallest_job(name="b"), tmp_path / "b")
    shares = [head._shares.of(name, _none_left) for name in ("a", "b")]
    for share in shares:
        share.join(lambda: None)
    places = ["rollout-a-1", "rollout-free"]
    for share in shares:
        share.granted(places, None)
    granted = [share.granted(places, None) for share in shares]
    assert "rollout-a-1" in granted[0] and "rollout-a-1" not in granted[1]
    assert granted[0] | granted[1] == set(places)
    for name in ("a", "b"):
        stub(head, name).done.set()
    await head.interrupt_jobs()


async def test_a_next_life_of_the_head_does_not_begin_anew_with_a_job_that_is_over(head: Head, tmp_path: Path) -> None:
    order = several(tmp_path, "a", "b", former=Former(ended="killed", restarts=1))
    over = {"job": "a", "state": "finished", "steps": 7}
    (tmp_path / "a" / "summary.json").write_text(json.dumps(over))
    work = started(head, order, asyncio.Event(), [])
    summaries = await ended(head, work, "b")
    assert (summaries["a"], summaries["b"]["state"], list(head.jobs)) == (over, "finished", ["b"])


async def test_an_interruption_reaches_all_of_several_jobs(head: Head, tmp_path: Path) -> None:
    interrupted = asyncio.Event()
    work = started(head, several(tmp_path, "a", "b"), interrupted, [])
    await soon(lambda: {"a", "b"} <= head.jobs.keys())
    interrupted.set()
    await soon(lambda: head._interrupted.is_set())
    await ended(head, work, "a", "b")


def test_a_job_of_a_resumed_command_counts_as_begun_only_if_a_life_before_has_said_so(tmp_path: Path) -> None:
    """Its journal is of before: what it says of an end is not of these lives."""
    (tmp_path / "journal.db").touch()
    former = Former(ended="killed", restarts=1, jobs={"a": FormerJob(begun=True)})
    order = HeadOrder(run_root="", directory="", log="", resume=True, former=former)
    assert former_life(order, tmp_path, "a") is not None
    assert former_life(order, tmp_path, "b") is None
