"""A run's files are read as they grow, and a page is told what has changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from actors.metrics.trace import TraceFile
from configs.errors import ConfigError
from configs.limits import DEFAULT_LIMITS, Limits
from supervisors.cli.console.feed import Feed
from supervisors.cli.console.live_run import LiveRun
from supervisors.cli.console.page_data import COLUMNS
from supervisors.cli.console.run_files import RunFiles
from supervisors.cli.console.tails import JsonLines, TraceEvents
from tests.supervisors.cli.console.recorded_run import STEPS, add_spans, event, record, row, sample, write_lines


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return record(tmp_path / "demo", state="running")


def test_only_whole_lines_are_read_and_each_once(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    tail = JsonLines(path, 1 << 20)
    assert tail.look().items == [], "it is not there yet"
    path.write_text('{"a": 1}\nno json\n[1]\n{"a"')
    assert tail.look() == (True, [{"a": 1}])
    with path.open("a") as file:
        file.write(": 2}\n")
    assert tail.look() == (False, [{"a": 2}])
    assert tail.look() == (False, [])


def test_a_file_that_is_replaced_or_cut_begins_anew(tmp_path: Path) -> None:
    path, other = tmp_path / "a.jsonl", tmp_path / "new"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    tail = JsonLines(path, 1 << 20)
    tail.look()
    other.write_text('{"a": 2}\n{"a": 3}\n{"a": 4}\n')
    other.replace(path)
    assert tail.look() == (True, [{"a": 2}, {"a": 3}, {"a": 4}])
    path.write_text('{"a": 5}\n')
    assert tail.look() == (True, [{"a": 5}])


def test_of_a_long_file_only_the_newest_part_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_lines(path, [{"a": i} for i in range(1000)])
    items = JsonLines(path, 100).look().items
    assert 0 < len(items) < 15 and items[-1] == {"a": 999}


def test_a_trace_is_read_while_its_end_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace, tail = TraceFile(path, "demo"), TraceEvents(path, 1 << 20)
    seen = tail.look().items
    for step in range(5):
        add_spans(trace, step)
        seen += tail.look().items
    trace.close()
    assert seen == json.loads(path.read_bytes())
    assert tail.look() == (False, [])


def test_tracks_of_a_long_trace_have_their_names_though_their_beginning_is_passed_over(tmp_path: Path) -> None:
    trace = TraceFile(tmp_path / "trace.json", "demo")
    for step in range(50):
        add_spans(trace, step)
    trace.close()
    items = TraceEvents(tmp_path / "trace.json", 4000).look().items
    assert {item["args"]["name"] for item in items if item["name"] == "thread_name"} == {
        "rollout-0", "rollout-1", "trainer",
    }  # fmt: skip
    assert 5 < len(items) < 60 and items[-1] == json.loads((tmp_path / "trace.json").read_bytes())[-1]


def test_no_run_directory_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"it has no job\.yaml.*Name the directory"):
        RunFiles(tmp_path, DEFAULT_LIMITS)
    (tmp_path / "job.yaml").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        RunFiles(tmp_path, DEFAULT_LIMITS)


def test_each_file_changes_what_shows_it_and_nothing_else(run_dir: Path) -> None:
    files = RunFiles(run_dir, DEFAULT_LIMITS)
    assert files.look() == {"rows", "events", "spans", "samples"} and files.anew
    assert files.look() == set()
    write_lines(run_dir / "metrics.jsonl", [row(STEPS), row(STEPS + 1)])
    assert files.look() == {"rows"} and not files.anew and files.new_values == 2
    write_lines(run_dir / "samples.jsonl", [sample(12)])
    assert files.look() == {"samples"} and list(files.samples) == [0, 11, 12]
    write_lines(run_dir / "events.jsonl", [event(30, "job_state", state="paused", reason="")])
    assert files.look() == {"events"} and files.state == "paused"
    write_lines(run_dir / "metrics.jsonl", [row(3, reward_mean=9.0)])
    assert files.look() == {"rows"} and files.anew, "a step that was there: the page begins anew"
    assert files.values[3][COLUMNS.index("reward_mean")] == 9.0 and len(files.values) == STEPS + 2


def test_equal_events_in_a_row_are_one_with_a_count(run_dir: Path) -> None:
    files = RunFiles(run_dir, DEFAULT_LIMITS)
    files.look()
    dropped = [entry for entry in files.told if entry["text"].startswith("samples dropped")]
    assert [(entry["count"], "step 7" in entry["text"]) for entry in dropped] == [(3, True)]


def test_what_is_kept_is_bounded(run_dir: Path) -> None:
    limits = Limits(console_steps=5, console_spans=10, console_events=2, console_sample_steps=1, console_text_chars=3)
    files = RunFiles(run_dir, limits)
    files.look()
    assert [values[0] for values in files.values] == [7, 8, 9, 10, 11]
    assert len(files.spans) == 10 and len(files.told) == 2 and list(files.samples) == [11]
    assert files.samples[11][0]["turns"][0]["text"].startswith("<sc … ")


# ------------------------------------------------------------ the feed


def test_a_page_gets_everything_and_then_only_what_changes(run_dir: Path) -> None:
    files = RunFiles(run_dir, DEFAULT_LIMITS)
    feed = Feed(files, DEFAULT_LIMITS)
    whole = feed.snapshot()
    assert set(whole) == {"head", "rows", "evaluations", "lanes", "workers", "devices", "samples", "stalls", "events"}
    assert whole["rows"]["reset"] and len(whole["rows"]["rows"]) == STEPS
    assert (whole["head"]["job"], whole["head"]["step"], whole["head"]["steps"]) == ("demo", 12, 12)
    json.dumps(whole, allow_nan=False)
    with feed.open_page() as page:
        write_lines(run_dir / "metrics.jsonl", [row(STEPS)])
        feed.changed(*files.look())
        updates = [page.updates.get_nowait() for _ in range(page.updates.qsize())]
        assert [section for section, _ in updates] == ["rows", "head"]
        assert not updates[0][1]["reset"] and [values[0] for values in updates[0][1]["rows"]] == [12]
    assert feed.pages == 0


def test_a_page_that_is_too_far_behind_is_given_up_and_disturbs_no_other(run_dir: Path) -> None:
    files = RunFiles(run_dir, DEFAULT_LIMITS)
    feed = Feed(files, Limits(console_queue_updates=3))
    with feed.open_page() as slow, feed.open_page() as quick:
        for step in range(STEPS, STEPS + 3):
            write_lines(run_dir / "metrics.jsonl", [row(step)])
            feed.changed(*files.look())
            while not quick.updates.empty():
                quick.updates.get_nowait()
        assert slow.behind and slow.updates.qsize() == 3 and not quick.behind


def test_a_run_that_is_over_needs_no_feed_and_one_that_does_not_answer_says_so(tmp_path: Path) -> None:
    over = Feed(RunFiles(record(tmp_path / "a"), DEFAULT_LIMITS), DEFAULT_LIMITS)
    assert over.snapshot()["head"]["feed"] == "over"
    lost = Feed(RunFiles(record(tmp_path / "b", state="running"), DEFAULT_LIMITS), DEFAULT_LIMITS)
    lost.live = live = LiveRun(lambda: "ipc:///nowhere", "demo", None, DEFAULT_LIMITS, lost.changed)
    lost.changed("live")
    head = lost.snapshot()["head"]
    assert head["feed"] == "lost" and "has not answered" in head["feed_why"]
    live.reachable = True
    live.hear({"kind": "state", "job": "demo", "state": "paused", "waiting_for": "an operator"})
    head = lost.snapshot()["head"]
    assert (head["feed"], head["state"], head["waiting_for"]) == ("live", "paused", "an operator")


def test_a_step_that_files_and_socket_tell_of_is_shown_once(run_dir: Path) -> None:
    feed = Feed(RunFiles(run_dir, DEFAULT_LIMITS), DEFAULT_LIMITS)
    feed.live = live = LiveRun(lambda: "ipc:///nowhere", "demo", None, DEFAULT_LIMITS, feed.heard)
    with feed.open_page() as page:
        for step in (STEPS, STEPS + 1):
            write_lines(run_dir / "metrics.jsonl", [row(step)])
            for _ in range(2):
                live.hear({"kind": "step", "job": "demo", **row(step), "step": step + 1})
        updates = [page.updates.get_nowait() for _ in range(page.updates.qsize())]
    assert [values[0] for name, data in updates if name == "rows" for values in data["rows"]] == [STEPS, STEPS + 1]


def test_a_run_elsewhere_is_drawn_from_what_its_socket_says() -> None:
    feed = Feed(None, DEFAULT_LIMITS)
    feed.live = live = LiveRun(lambda: "tcp://10.0.0.1:7000", "demo", None, DEFAULT_LIMITS, feed.changed)
    live.reachable, live.status = True, {"job": "demo", "state": "running", "steps": 100}
    live.tree = [{"name": "rollout-0", "role": "rollout", "state": "running", "pid": 1, "node": "n", "restarts": 2}]
    live.stalls = [{"process": "p", "waiter": "a", "waits_for": "b", "kind": "ask", "what": "Score", "since_s": 4.0}]
    live.hear({"kind": "step", "job": "demo", **row(4), "step": 5})
    whole = feed.snapshot()
    assert whole["rows"]["rows"][0][0] == 4 and whole["head"]["step"] == 5 and not whole["head"]["files"]
    assert whole["workers"][0]["restarts"] == 2 and whole["stalls"]["rows"][0]["waiter"] == "a"
    assert whole["lanes"]["lanes"] == [] and whole["samples"] == {"steps": []}


@pytest.mark.parametrize(("mode", "bound"), [("sync", None), ("async", 2), ("one_step_barrier", 1)])
def test_staleness_is_shown_beside_the_bound_of_the_mode_if_it_has_one(
    tmp_path: Path, mode: str, bound: int | None
) -> None:
    (tmp_path / "job.yaml").write_text(f"name: demo\nsync: {{mode: {mode}, max_staleness: 2}}\n")
    assert Feed(RunFiles(tmp_path, DEFAULT_LIMITS), DEFAULT_LIMITS).snapshot()["head"]["staleness_bound"] == bound


def test_a_column_that_comes_later_is_sent_with_all_rows(run_dir: Path) -> None:
    files = RunFiles(run_dir, DEFAULT_LIMITS)
    feed = Feed(files, DEFAULT_LIMITS)
    with feed.open_page() as page:
        write_lines(run_dir / "metrics.jsonl", [row(STEPS, own_metric=1.5)])
        feed.changed(*files.look())
        rows = dict(page.updates.get_nowait() for _ in range(page.updates.qsize()))["rows"]
    assert rows["reset"] and rows["columns"][-1] == "own_metric" and len(rows["rows"]) == STEPS + 1
    assert [values[-1] for values in rows["rows"]][-2:] == [None, 1.5]
