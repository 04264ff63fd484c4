"""The recorder writes whole lines and a trace that is valid JSON at any time."""

from __future__ import annotations

import asyncio
import json
import os
import tracemalloc
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import prometheus_client  # noqa: F401 (imported ahead, as is the next: on a busy machine that takes seconds)
import pytest
import tensorboardX  # noqa: F401

from actors.core.system import ActorSystem
from actors.host.room import NoSpaceLeft
from actors.metrics.recorder import Metrics
from actors.metrics.samples import read_samples
from actors.metrics.sinks.feeds import SinkFeed
from actors.metrics.sinks.prometheus_port import PrometheusSink
from actors.metrics.trace import TraceFile
from actors.protocol.metrics import (
    Event,
    Flush,
    Flushed,
    ProcessHealth,
    Samples,
    ShownTurn,
    Spans,
    StepRow,
    TraceSpan,
)
from configs.schema import MetricsConfig
from tests.actors.metrics.made_samples import shown
from transport.address import PeerId
from transport.memory_transport import MemoryNetwork, MemoryTransport

PLAIN = MetricsConfig(tensorboard=False)


@pytest.fixture
async def system() -> AsyncIterator[ActorSystem]:
    system = ActorSystem(MemoryTransport(MemoryNetwork(), PeerId("head", 1)))
    await system.start()
    yield system
    await system.stop()


def scrape(metrics: Metrics) -> str:
    """What Prometheus reads at the port of a run's gauges."""
    feeds = [cell.actor for cell in metrics.ctx._cell.children.values()]
    (port,) = [feed.sink.port for feed in feeds if isinstance(feed, SinkFeed) and isinstance(feed.sink, PrometheusSink)]
    return urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()


async def test_rows_events_and_spans_land_in_their_files_and_a_resumed_run_appends(
    system: ActorSystem, tmp_path: Path
) -> None:
    for life in range(2):
        ref = await system.spawn("metrics", Metrics("j", tmp_path, PLAIN))
        ref.tell(StepRow(job="j", row={"step": life, "reward_mean": 0.5, "kl": float("nan")}))
        ref.tell(Event(job="j", name="worker_down", fields={"worker": "rollout-0"}))
        ref.tell(Spans(job="j", track="trainer", spans=[TraceSpan("train", 1.0 + life, 1.5 + life, {"step": life})]))
        await ref.ask(Flush(job="j"), Flushed)
        await system.stop_actor("metrics")
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows] == [0, 1] and rows[0]["kl"] is None
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["worker_down", "asks_counted"] * 2
    assert events[0]["worker"] == "rollout-0"
    trace = json.loads((tmp_path / "trace.json").read_text())
    bars = [e for e in trace if e["ph"] == "X"]
    assert [(b["name"], b["ts"], b["dur"], b["tid"]) for b in bars] == [("train", 1e6, 5e5, 1), ("train", 2e6, 5e5, 1)]
    assert sum(e["name"] == "thread_name" for e in trace) == 1


def test_the_trace_is_valid_json_after_every_write(tmp_path: Path) -> None:
    trace = TraceFile(tmp_path / "trace.json", "j")
    for i in range(5):
        trace.add(f"rollout-{i % 2}", [TraceSpan("generate", i, i + 1, {})])
        assert len(json.loads((tmp_path / "trace.json").read_text())) == 1 + 2 * min(i + 1, 2) + i + 1
    trace.close()


def test_a_damaged_trace_is_put_aside(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text("[{,")
    trace = TraceFile(tmp_path / "trace.json", "j")
    trace.add("trainer", [TraceSpan("train", 0, 1, {})])
    trace.close()
    assert json.loads((tmp_path / "trace.json").read_text()) and (tmp_path / "trace.damaged.json").exists()


async def test_a_cut_off_last_line_does_not_spoil_the_next(system: ActorSystem, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"ste')
    ref = await system.spawn("metrics", Metrics("j", tmp_path, PLAIN))
    ref.tell(StepRow(job="j", row={"step": 1}))
    await ref.ask(Flush(job="j"), Flushed)
    await system.stop_actor("metrics")
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == ['{"step": 0}', '{"ste', '{"step": 1}']


async def test_the_health_of_each_process_is_an_event_and_a_gauge(system: ActorSystem, tmp_path: Path) -> None:
    config = MetricsConfig(tensorboard=False, prometheus_port=0)
    metrics = Metrics("j", tmp_path, config)
    ref = await system.spawn("metrics", metrics)
    for process, lag_s in (("head.j.trainer", 0.25), ("head.j.rollout-0", 0.5), ("head.j.trainer", 0.125)):
        ref.tell(
            ProcessHealth(
                job="j", process=process, loop_lag_p50_s=0.0, loop_lag_p99_s=lag_s, loop_lag_max_s=lag_s,
                dead_letters=3, oldest_wait_s=0.0,
            )
        )  # fmt: skip
    await ref.ask(Flush(job="j"), Flushed)
    page = (await asyncio.to_thread(scrape, metrics)).encode()
    assert b'headrace_process_loop_lag_p99_s{job="j",process="head.j.trainer"} 0.125' in page
    assert b'headrace_process_loop_lag_p99_s{job="j",process="head.j.rollout-0"} 0.5' in page
    assert b'headrace_process_dead_letters{job="j",process="head.j.trainer"} 3.0' in page
    await system.stop_actor("metrics")
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    health = [line for line in lines if line["event"] == "process_health"]
    assert [line["loop_lag_p99_s"] for line in health] == [0.25, 0.5, 0.125]


async def test_samples_are_written_and_a_disk_that_takes_none_ends_nothing(system: ActorSystem, tmp_path: Path) -> None:
    ref = await system.spawn("metrics", Metrics("j", tmp_path, PLAIN))
    ref.tell(Samples(job="j", step=3, rows=[shown(3, ShownTurn("model", "a\u2028b", 3))]))
    await ref.ask(Flush(job="j"), Flushed)
    assert read_samples(tmp_path / "samples.jsonl")[0]["turns"][0]["text"] == "a\u2028b"
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == 1
    (tmp_path / "samples.jsonl").unlink()
    (tmp_path / "samples.jsonl").mkdir()
    for _ in range(2):
        ref.tell(Samples(job="j", step=4, rows=[shown(4)]))
    ref.tell(StepRow(job="j", row={"step": 4}))
    await ref.ask(Flush(job="j"), Flushed)
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 4}
    await system.stop_actor("metrics")


async def test_a_mean_of_nothing_is_no_number_to_any_sink(system: ActorSystem, tmp_path: Path) -> None:
    config = MetricsConfig(tensorboard=True, prometheus_port=0)
    metrics = Metrics("j", tmp_path, config)
    ref = await system.spawn("metrics", metrics)
    ref.tell(StepRow(job="j", row={"step": 0, "reward_mean": 0.5}))
    ref.tell(StepRow(job="j", row={"step": 1, "reward_mean": None}))
    await ref.ask(Flush(job="j"), Flushed)
    assert len(metrics._sinks) == 2
    page = await asyncio.to_thread(scrape, metrics)
    assert 'headrace_reward_mean{job="j"} NaN' in page, "and not what an older step had"
    await system.stop_actor("metrics")


def test_the_trace_is_bounded_and_each_part_of_it_is_whole(tmp_path: Path) -> None:
    path, former = tmp_path / "trace.json", tmp_path / "trace.1.json"
    trace = TraceFile(path, "j", max_bytes=20_000)
    for i in range(1000):
        trace.add(f"rollout-{i % 2}", [TraceSpan("generate", i, i + 1, {})])
        assert path.stat().st_size + (former.stat().st_size if former.exists() else 0) < 21_000
    trace.close()
    for part in (path, former):
        events = json.loads(part.read_text())
        names = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
        assert names == {"rollout-0": 1, "rollout-1": 2}, "each part names its tracks, with the same numbers"
    again = TraceFile(path, "j", max_bytes=20_000)
    again.add("rollout-1", [TraceSpan("generate", 2000, 2001, {})])
    again.close()
    assert json.loads(path.read_text())[-1]["tid"] == 2


def test_a_large_trace_is_resumed_without_being_taken_into_memory(tmp_path: Path) -> None:
    trace = TraceFile(tmp_path / "trace.json", "j")
    trace.add("trainer", [TraceSpan("train", i, i + 1, {"step": i}) for i in range(40_000)])
    trace.close()
    tracemalloc.start()
    TraceFile(tmp_path / "trace.json", "j").close()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (tmp_path / "trace.json").stat().st_size > 4 << 20 and peak < 1 << 20


def test_a_trace_that_finds_no_room_stays_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, pwrite = TraceFile(tmp_path / "trace.json", "j"), os.pwrite
    trace.add("trainer", [TraceSpan("train", 0, 1, {})])
    before = (tmp_path / "trace.json").read_bytes()
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: pwrite(file, data[:5], at))  # a part still fits
    trace.add("trainer", [TraceSpan("train", 1, 2, {})])
    monkeypatch.undo()
    assert (tmp_path / "trace.json").read_bytes() == before
    trace.add("trainer", [TraceSpan("train", 2, 3, {})])
    trace.close()
    assert len(json.loads((tmp_path / "trace.json").read_text())) == 5


async def test_a_row_without_room_ends_the_recorder_and_an_event_without_room_does_not(
    system: ActorSystem, tmp_path: Path
) -> None:
    (tmp_path / "events.jsonl").symlink_to("/dev/full")
    ref = await system.spawn("metrics", Metrics("j", tmp_path, PLAIN))
    ref.tell(Event(job="j", name="worker_down", fields={}))
    await ref.ask(Flush(job="j"), Flushed)
    await system.stop_actor("metrics")
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    ref = await system.spawn("metrics", Metrics("j", tmp_path, PLAIN))
    ref.tell(StepRow(job="j", row={"step": 0}))
    ended = await system.wait_stopped("metrics", timeout_s=10)
    assert isinstance(ended.error, NoSpaceLeft) and "the row of a step" in str(ended.error)
