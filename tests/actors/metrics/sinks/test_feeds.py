"""A sink that fails, hangs, is slow or cannot be had costs a warning; the files and the other sinks go on."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from actors.core.actor import Actor, handles
from actors.core.system import ActorSystem
from actors.metrics.recorder import Metrics
from actors.metrics.sinks import feeds
from actors.metrics.sinks.feeds import SinkKind
from actors.metrics.sinks.sink import SinkSetup
from actors.metrics.sinks.wandb_run import WandbSink
from actors.protocol.evaluations import EvaluationRow
from actors.protocol.job_news import Trouble
from actors.protocol.metrics import Flush, Flushed, ProcessHealth, Samples, StepRow
from configs.limits import Limits
from configs.schema import MetricsConfig
from tests.actors.metrics.made_samples import shown
from transport.address import PeerId
from transport.memory_transport import MemoryNetwork, MemoryTransport

PLAIN = MetricsConfig(tensorboard=False)
PATIENCE_S = 10.0


class Job(Actor):
    """The job of the run hears of troubles."""

    def __init__(self) -> None:
        self.heard: list[Trouble] = []
        self.news = asyncio.Event()

    @handles(Trouble)
    async def trouble(self, message: Trouble) -> None:
        self.heard.append(message)
        self.news.set()


class FakeSink:
    """Notes the steps that it is given; ``write`` may do something else first."""

    def __init__(self, write: Callable[[int], None] = lambda step: None) -> None:
        self.steps: list[int] = []
        self.closed = False
        self._write = write

    def write(self, step: int, row: object) -> None:
        self._write(step)
        self.steps.append(step)

    def evaluation(self, row: object) -> None: ...
    def samples(self, step: int, rows: object) -> None: ...
    def observe(self, process: str, gauges: object) -> None: ...

    def close(self) -> None:
        self.closed = True


class RaisingSink:
    """Raises at every call."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name} today")


@pytest.fixture
async def system() -> AsyncIterator[ActorSystem]:
    limits = Limits(beacon_interval_s=0.05, sink_flush_s=1.0, stop_timeout_s=0.5)
    system = ActorSystem(MemoryTransport(MemoryNetwork(), PeerId("head", 1)), limits=limits)
    await system.start()
    yield system
    await system.stop()


def with_sinks(monkeypatch: pytest.MonkeyPatch, **make: Callable[[SinkSetup], Any]) -> None:
    kinds = tuple(SinkKind(name.title(), name, lambda config: True, one) for name, one in make.items())
    monkeypatch.setattr(feeds.Sinks.start, "__defaults__", (kinds,))


async def troubles(job: Job, count: int) -> list[Trouble]:
    async with asyncio.timeout(PATIENCE_S):
        while len(job.heard) < count:
            job.news.clear()
            await job.news.wait()
    return job.heard


def rows_of(run_dir: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


async def test_a_sink_that_raises_at_every_call_costs_one_warning_and_the_others_go_on(
    system: ActorSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, job = FakeSink(), Job()
    with_sinks(monkeypatch, bad=lambda setup: RaisingSink(), good=lambda setup: good)
    await system.spawn("job.j", job)
    ref = await system.spawn("metrics.j", Metrics("j", tmp_path, PLAIN))
    for step in range(3):
        ref.tell(StepRow(job="j", row={"step": step}))
        await ref.ask(Flush(job="j"), Flushed)
    ref.tell(Samples(job="j", step=2, rows=[shown(2)]))
    ref.tell(EvaluationRow(job="j", row={"version": 3, "pass_at_k": {}}))
    ref.tell(ProcessHealth("j", "head", 0.0, 0.0, 0.0, 0, 0.0))
    (trouble,) = await troubles(job, 1)
    assert trouble.kind == "bad_failed"
    assert trouble.text == (
        "Bad (metrics.bad) is left out from here on, and the run goes on: RuntimeError: no write today"
    )
    await system.stop_actor("metrics.j")
    assert rows_of(tmp_path) == good.steps == [0, 1, 2] and good.closed and len(job.heard) == 1


@pytest.mark.parametrize("error", [OSError("no network"), SystemExit(1), TimeoutError("login")])
async def test_a_sink_that_cannot_be_made_is_told_once_the_job_is_there(
    system: ActorSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """A log-in that fails, for example; the failure comes before the job's actor does."""

    def make(setup: SinkSetup) -> Any:
        raise error

    with_sinks(monkeypatch, bad=make)
    ref = await system.spawn("metrics.j", Metrics("j", tmp_path, PLAIN))
    await ref.ask(Flush(job="j"), Flushed)
    job = Job()
    await system.spawn("job.j", job)
    (trouble,) = await troubles(job, 1)
    assert type(error).__name__ in trouble.text
    ref.tell(StepRow(job="j", row={"step": 0}))
    await ref.ask(Flush(job="j"), Flushed)
    assert rows_of(tmp_path) == [0]


async def test_a_missing_library_is_named_with_its_remedy_and_the_run_goes_on(
    system: ActorSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "wandb", None)
    job = Job()
    await system.spawn("job.j", job)
    ref = await system.spawn("metrics.j", Metrics("j", tmp_path, MetricsConfig(tensorboard=False, wandb_project="p")))
    (trouble,) = await troubles(job, 1)
    assert trouble.kind == "wandb_project_failed" and "pip install 'headrace[wandb]'" in trouble.text
    ref.tell(StepRow(job="j", row={"step": 0}))
    await ref.ask(Flush(job="j"), Flushed)
    assert rows_of(tmp_path) == [0]


async def test_a_sink_that_hangs_holds_up_neither_start_nor_files_nor_other_sinks_nor_the_end(
    system: ActorSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_go, good = threading.Event(), FakeSink()

    def hang(setup: SinkSetup) -> Any:
        let_go.wait(PATIENCE_S)
        raise RuntimeError("too late")

    with_sinks(monkeypatch, slow=hang, good=lambda setup: good)
    job = Job()
    await system.spawn("job.j", job)
    try:
        ref = await system.spawn("metrics.j", Metrics("j", tmp_path, PLAIN))
        for step in range(3):
            ref.tell(StepRow(job="j", row={"step": step}))
        await ref.ask(Flush(job="j"), Flushed)
        assert rows_of(tmp_path) == good.steps == [0, 1, 2]
        (trouble,) = await troubles(job, 1)
        assert "has not taken the last rows within 1 s" in trouble.text
        async with asyncio.timeout(PATIENCE_S):
            await system.stop_actor("metrics.j")
        assert good.closed
    finally:
        let_go.set()


async def test_a_sink_that_hangs_for_too_long_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As TensorBoard's writer does on a full disk: its thread has died, and its queue takes nothing more."""
    let_go, job = threading.Event(), Job()
    limits = Limits(blocking_call_s=0.5, sink_flush_s=0.1, stop_timeout_s=0.2)
    system = ActorSystem(MemoryTransport(MemoryNetwork(), PeerId("head", 1)), limits=limits)
    await system.start()
    with_sinks(monkeypatch, slow=lambda setup: FakeSink(lambda step: let_go.wait(PATIENCE_S) and None))
    try:
        await system.spawn("job.j", job)
        ref = await system.spawn("metrics.j", Metrics("j", tmp_path, PLAIN))
        ref.tell(StepRow(job="j", row={"step": 0}))
        (trouble,) = await troubles(job, 1)
        assert "has not returned within 0.5 s" in trouble.text
    finally:
        let_go.set()
        await system.stop()


async def test_a_sink_that_is_too_far_behind_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    let_go, job = threading.Event(), Job()
    limits = Limits(mailbox_messages=8, stop_timeout_s=0.2)
    system = ActorSystem(MemoryTransport(MemoryNetwork(), PeerId("head", 1)), limits=limits)
    await system.start()
    with_sinks(monkeypatch, slow=lambda setup: FakeSink(lambda step: let_go.wait(PATIENCE_S) and None))
    try:
        await system.spawn("job.j", job)
        ref = await system.spawn("metrics.j", Metrics("j", tmp_path, PLAIN))
        for step in range(20):
            ref.tell(StepRow(job="j", row={"step": step}))
            while len(rows_of(tmp_path)) <= step:
                await asyncio.sleep(0)
        (trouble,) = await troubles(job, 1)
        assert "it is too slow for the run" in trouble.text
        assert rows_of(tmp_path) == list(range(20))
    finally:
        let_go.set()
        await system.stop()


def test_a_run_that_goes_on_says_with_which_step(tmp_path: Path) -> None:
    """A line that was cut off is none, wherever the part of the file that is read begins."""

    def first() -> int:
        return SinkSetup.of("j", tmp_path, PLAIN, Limits()).first_step

    assert first() == 0
    file = tmp_path / "metrics.jsonl"
    file.write_text("")
    assert first() == 0
    file.write_text("".join(json.dumps({"step": step, "pad": "x" * 2000}) + "\n" for step in range(300)) + '{"step": 3')
    assert first() == 300


def test_the_oldest_wandb_that_is_taken_is_the_one_that_the_extra_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys
    import types

    from actors.metrics.sinks.sink import SinkUnavailable
    from actors.metrics.sinks.wandb_run import OLDEST

    project = (Path(__file__).parents[4] / "pyproject.toml").read_text()
    assert f'wandb = ["wandb>={OLDEST},<1"]' in project
    old = types.ModuleType("wandb")
    old.__version__ = "0.19.11"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", old)
    with pytest.raises(SinkUnavailable, match=r"0\.19\.11 is installed, and at least"):
        WandbSink(SinkSetup.of("j", tmp_path, MetricsConfig(wandb_project="p"), Limits()))
