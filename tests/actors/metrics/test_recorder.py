"""The recorder writes whole lines and a trace that is valid JSON at any time."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import tracemalloc
import types
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from actors.core.errors import StartFailed
from actors.core.system import ActorSystem
from actors.host.room import NoSpaceLeft
from actors.metrics.groups import tag
from actors.metrics.recorder import Metrics
from actors.metrics.samples import read_samples
from actors.metrics.sinks import PrometheusSink, SinkUnavailable, make_sinks
from actors.metrics.trace import TraceFile
from actors.protocol.metrics import (
    Event,
    Flush,
    Flushed,
    ProcessHealth,
    Samples,
    ShownSample,
    ShownTurn,
    Span,
    Spans,
    StepRow,
)
from configs.schema import MetricsConfig
from transport.address import PeerId
from transport.memory_transport import MemoryNetwork, MemoryTransport

PLAIN = MetricsConfig(tensorboard=False)


@pytest.fixture
async def system() -> AsyncIterator[ActorSystem]:
    system = ActorSystem(MemoryTransport(MemoryNetwork(), PeerId("head", 1)))
    await system.start()
    yield system
    await system.stop()


async def test_rows_events_and_spans_land_in_their_files_and_a_resumed_run_appends(
    system: ActorSystem, tmp_path: Path
) -> None:
    for life in range(2):
        ref = await system.spawn("metrics", Metrics("j", tmp_path, PLAIN))
        ref.tell(StepRow(job="j", row={"step": life, "reward_mean": 0.5, "kl": float("nan")}))
        ref.tell(Event(job="j", name="worker_down", fields={"worker": "rollout-0"}))
        ref.tell(Spans(job="j", track="trainer", spans=[Span("train", 1.0 + life, 1.5 + life, {"step": life})]))
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
        trace.add(f"rollout-{i % 2}", [Span("generate", i, i + 1, {})])
        assert len(json.loads((tmp_path / "trace.json").read_text())) == 1 + 2 * min(i + 1, 2) + i + 1
    trace.close()


def test_a_damaged_trace_is_put_aside(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text("[{,")
    trace = TraceFile(tmp_path / "trace.json", "j")
    trace.add("trainer", [Span("train", 0, 1, {})])
    trace.close()
    assert json.loads((tmp_path / "trace.json").read_text()) and (tmp_path / "trace.damaged.json").exists()


async def test_a_cut_off_last_line_does_not_spoil_the_next(system: ActorSystem, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"ste')
    ref = await system.spawn("metrics", Metrics("j", tmp_path, PLAIN))
    ref.tell(StepRow(job="j", row={"step": 1}))
    await ref.ask(Flush(job="j"), Flushed)
    await system.stop_actor("metrics")
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == ['{"step": 0}', '{"ste', '{"step": 1}']


async def test_tensorboard_files_are_written(system: ActorSystem, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("data: {}\nmax_word_len: 5\n")
    ref = await system.spawn("metrics", Metrics("j", tmp_path, MetricsConfig()))
    ref.tell(StepRow(job="j", row={"step": 0, "reward_mean": 0.5}))
    await ref.ask(Flush(job="j"), Flushed)
    await system.stop_actor("metrics")
    files = list((tmp_path / "tensorboard").glob("events.out.tfevents*"))
    assert files and b"learning/reward_mean" in files[0].read_bytes()
    assert b"max_word_len: 5" in files[0].read_bytes()  # the job file, as text


def test_every_column_of_the_reference_stands_in_a_group_of_its_section() -> None:
    """What is about learning, time, weights, faults is found together; the sections are those of the reference."""
    page = (Path(__file__).parents[3] / "docs" / "reference" / "metrics.md").read_text()
    groups: dict[str, set[str]] = {}
    for section in page.split("\n## ")[1:]:
        title = section.partition("\n")[0].partition(",")[0]
        for column in re.findall(r"^\| `(\w+)`", section, re.MULTILINE):
            groups.setdefault(title, set()).add(tag(column).partition("/")[0])
    assert groups["Learning"] == {"learning"}
    assert groups["Weights"] == {"weights"}
    assert groups["Where time goes"] == {"time"}
    assert groups["Shared training"] == {"shared_training"}
    assert groups["Length ranking"] == {"length_ranking"}
    assert "faults" in groups["Faults"]
    assert groups["Progress"] == {"progress", "time", "learning"}  # its seconds and its reward


def test_prometheus_serves_the_newest_step() -> None:
    sink = PrometheusSink(0, "j")
    try:
        sink.write(3, {"step": 3, "reward_mean": 0.25})
        with urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=5) as reply:
            assert b'headrace_reward_mean{job="j"} 0.25' in reply.read()
    finally:
        sink.close()


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
    (sink,) = metrics._sinks  # pyright: ignore[reportPrivateUsage]
    assert isinstance(sink, PrometheusSink)
    page = await asyncio.to_thread(lambda: urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics").read())
    assert b'headrace_process_loop_lag_p99_s{job="j",process="head.j.trainer"} 0.125' in page
    assert b'headrace_process_loop_lag_p99_s{job="j",process="head.j.rollout-0"} 0.5' in page
    assert b'headrace_process_dead_letters{job="j",process="head.j.trainer"} 3.0' in page
    await system.stop_actor("metrics")
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    health = [line for line in lines if line["event"] == "process_health"]
    assert [line["loop_lag_p99_s"] for line in health] == [0.25, 0.5, 0.125]


async def test_a_sink_that_cannot_be_had_is_named_with_its_remedy(
    system: ActorSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "wandb", None)
    config = MetricsConfig(tensorboard=False, wandb_project="p")
    with pytest.raises(SinkUnavailable, match=r"headrace\[wandb\]"):
        make_sinks(config, "j", tmp_path)
    with pytest.raises(StartFailed):
        await system.spawn("metrics", Metrics("j", tmp_path, config))


def test_a_wandb_run_has_its_owner_name_tags_and_settings_and_a_resumed_one_goes_on_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys
    import types

    begun: list[dict[str, Any]] = []
    wandb = types.ModuleType("wandb")
    wandb.util = types.SimpleNamespace(generate_id=lambda: f"id{len(begun)}")  # type: ignore[attr-defined]
    wandb.init = lambda **settings: begun.append(settings)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    (tmp_path / "job.yaml").write_text("steps: 7\ntrainer: {lr: 0.1}\n")
    config = MetricsConfig(tensorboard=False, wandb_project="p", wandb_entity="team", wandb_tags=["a", "b"])
    for _ in range(2):
        make_sinks(config, "j", tmp_path)
    make_sinks(config.model_copy(update={"wandb_name": "n"}), "j", tmp_path)
    first, resumed, named = begun
    told = {key: first[key] for key in ("project", "entity", "name", "tags", "config", "id", "resume")}
    assert told == {
        "project": "p", "entity": "team", "name": "j", "tags": ["a", "b"],
        "config": {"steps": 7, "trainer": {"lr": 0.1}}, "id": "id0", "resume": "allow",
    }  # fmt: skip
    assert (resumed["id"], named["name"]) == ("id0", "n")


async def test_a_sink_that_fails_is_left_out_and_the_files_go_on(system: ActorSystem, tmp_path: Path) -> None:
    class Broken:
        calls = 0

        def write(self, step: int, row: object) -> None:
            self.calls += 1
            raise OSError("the network is gone")

        def close(self) -> None: ...

    actor, broken = Metrics("j", tmp_path, PLAIN), Broken()
    ref = await system.spawn("metrics", actor)
    actor._sinks = [broken]
    for step in range(3):
        ref.tell(StepRow(job="j", row={"step": step}))
    await ref.ask(Flush(job="j"), Flushed)
    await system.stop_actor("metrics")
    assert broken.calls == 1 and len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def shown(step: int, *turns: ShownTurn) -> ShownSample:
    return ShownSample(
        step=step, chosen="best", prompt=7, sibling=1, source="", row=3, reward=0.5, reward_parts={"right": 1.0},
        finish="ended", tokens=4, versions=[2, 3], reason="", prompt_text="2+2=", turns=list(turns), answer="4",
    )  # fmt: skip


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


class FakeWandb(types.ModuleType):
    """Notes what is logged."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.logged: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.util = types.SimpleNamespace(generate_id=lambda: "id")

    def init(self, **_: Any) -> FakeWandb:
        return self

    def Table(self, *, columns: list[str], data: list[list[Any]]) -> Any:  # noqa: N802 (as the library has it)
        return [dict(zip(columns, row, strict=True)) for row in data]

    def log(self, values: dict[str, Any], **options: Any) -> None:
        self.logged.append((values, options))

    def finish(self) -> None:
        """Nothing is left to send."""


def test_weights_and_biases_gets_a_table_of_samples_and_no_mean_of_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    (sink,) = make_sinks(MetricsConfig(tensorboard=False, wandb_project="p"), "j", tmp_path)
    sink.write(3, {"step": 3, "reward_mean": None, "samples": 0})
    answer, asked = ShownTurn("model", "4", 1), ShownTurn("tool", "4.0", 3, name="calculator")
    sink.samples(3, [shown(3, answer), shown(3, answer, asked)])
    sink.samples(4, [shown(4, answer)])
    sink.close()
    (first, (table, options)) = wandb.logged
    assert first == ({"step": 3, "samples": 0}, {"step": 3})
    assert options == {"commit": False}, "and a table is an upload: not one for each step"
    one, several = table["samples"]
    assert (one["step"], one["reward"], one["reward_right"], one["versions"]) == (3, 0.5, 1.0, "2–3")
    assert (one["prompt_text"], one["turns"]) == ("2+2=", "4")
    assert several["turns"] == "[turn 1, model, 1 tokens]\n4\n[turn 2, tool calculator, 3 tokens]\n4.0"
    assert all(isinstance(value, str | int | float) for value in one.values())


async def test_a_mean_of_nothing_is_no_number_to_any_sink(system: ActorSystem, tmp_path: Path) -> None:
    config = MetricsConfig(tensorboard=True, prometheus_port=0)
    metrics = Metrics("j", tmp_path, config)
    ref = await system.spawn("metrics", metrics)
    ref.tell(StepRow(job="j", row={"step": 0, "reward_mean": 0.5}))
    ref.tell(StepRow(job="j", row={"step": 1, "reward_mean": None}))
    await ref.ask(Flush(job="j"), Flushed)
    assert [type(sink).__name__ for sink in metrics._sinks] == ["TensorBoardSink", "PrometheusSink"]
    port = next(sink.port for sink in metrics._sinks if isinstance(sink, PrometheusSink))
    page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
    assert 'headrace_reward_mean{job="j"} NaN' in page, "and not what an older step had"
    await system.stop_actor("metrics")


def test_the_trace_is_bounded_and_each_part_of_it_is_whole(tmp_path: Path) -> None:
    path, former = tmp_path / "trace.json", tmp_path / "trace.1.json"
    trace = TraceFile(path, "j", max_bytes=20_000)
    for i in range(1000):
        trace.add(f"rollout-{i % 2}", [Span("generate", i, i + 1, {})])
        assert path.stat().st_size + (former.stat().st_size if former.exists() else 0) < 21_000
    trace.close()
    for part in (path, former):
        events = json.loads(part.read_text())
        names = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
        assert names == {"rollout-0": 1, "rollout-1": 2}, "each part names its tracks, with the same numbers"
    again = TraceFile(path, "j", max_bytes=20_000)
    again.add("rollout-1", [Span("generate", 2000, 2001, {})])
    again.close()
    assert json.loads(path.read_text())[-1]["tid"] == 2


def test_a_large_trace_is_resumed_without_being_taken_into_memory(tmp_path: Path) -> None:
    trace = TraceFile(tmp_path / "trace.json", "j")
    trace.add("trainer", [Span("train", i, i + 1, {"step": i}) for i in range(40_000)])
    trace.close()
    tracemalloc.start()
    TraceFile(tmp_path / "trace.json", "j").close()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (tmp_path / "trace.json").stat().st_size > 4 << 20 and peak < 1 << 20


def test_a_trace_that_finds_no_room_stays_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, pwrite = TraceFile(tmp_path / "trace.json", "j"), os.pwrite
    trace.add("trainer", [Span("train", 0, 1, {})])
    before = (tmp_path / "trace.json").read_bytes()
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: pwrite(file, data[:5], at))  # a part still fits
    trace.add("trainer", [Span("train", 1, 2, {})])
    monkeypatch.undo()
    assert (tmp_path / "trace.json").read_bytes() == before
    trace.add("trainer", [Span("train", 2, 3, {})])
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
