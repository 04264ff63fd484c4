"""``headrace plot``: what is read from a run directory, and that each picture shows what is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from actors.ledger.journal import SqliteJournal
from actors.metrics.trace import TraceFile
from actors.protocol.metrics import TraceSpan
from configs.run_files import JOBS_FILE
from supervisors.cli.app import app
from supervisors.cli.plot.figures import FIGURES, learning, lengths, occupancy, reward, throughput
from supervisors.cli.plot.run_data import Bar, RunData, busy_fraction, presence, read_run, read_services


def spans(*bars: tuple[str, float, float]) -> list[TraceSpan]:
    return [TraceSpan(name=name, start_s=1000.0 + a, end_s=1000.0 + b) for name, a, b in bars]


def row(step: int, **more: float) -> dict[str, float]:
    return {
        "step": step, "seconds": 2.0, "reward_mean": step / 10, "samples": 64, "tokens_generated": 640,
        "rollout_idle_fraction": 0.25, "trainer_idle_fraction": 0.5, "loss": 0.1, "entropy": 1.5, "kl": 0.0,
        "grad_norm": 0.7, "staleness_max": 1, "reward_std": 0.25,
    } | more  # fmt: skip


EVALUATED: dict[str, Any] = {"version": 5, "k": 4, "avg_at_k": 0.25, "pass_at_k": {"1": 0.2, "2": None, "4": 0.5}}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "demo"
    folder.mkdir()
    (folder / "job.yaml").write_text(
        "name: demo\nsteps: 20\nmodel: {path: /models/qwen}\nsync: {mode: async}\ntrainer: {lr: 0.001}\n"
    )
    lines = [json.dumps(row(step, length_recall_20=0.5)) for step in range(6)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "eval.jsonl").write_text(json.dumps(EVALUATED) + "\n")
    trace = TraceFile(folder / "trace.json", "demo")
    trace.add("rollout-10", spans(("generate", 0.5, 2.0)))
    trace.add("rollout-2", spans(("generate", 0.0, 1.0), ("idle", 1.0, 2.0), ("pull", 1.2, 1.4)))
    trace.add("trainer", spans(("wait", 0.0, 1.5), ("train", 1.5, 2.0)))
    trace.close()
    journal = SqliteJournal(folder / "journal.db", "demo")
    rows = [
        ("demo", step, p, 0, state, "", 5 + p, 0.5, "stop", 0, 0, 1, "")
        for step in range(6)
        for p, state in ((1, "committed"), (9, "committed"), (30, "dropped"))
    ]
    journal._db.executemany("INSERT INTO samples VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
    journal._db.close()
    journal._writer.shutdown()
    return folder


def test_lanes_are_the_trainer_and_then_workers_by_number_in_seconds_since_the_start(run_dir: Path) -> None:
    data = read_run(run_dir)
    assert list(data.lanes) == ["trainer", "rollout-2", "rollout-10"]
    assert data.lanes["rollout-10"] == [Bar("generate", 0.5, 2.0)]
    assert data.end_s == 2.0


def test_lengths_are_those_of_committed_samples(run_dir: Path) -> None:
    assert read_run(run_dir).lengths[3].tolist() == [6, 14]


def test_a_lane_is_busy_while_it_does_something_that_keeps_it_from_waiting(run_dir: Path) -> None:
    lanes = read_run(run_dir).lanes
    assert busy_fraction(lanes["rollout-2"], 0.0, 2.0) == pytest.approx(0.5), "a pull runs beside"
    assert busy_fraction(lanes["trainer"], 0.0, 2.0) == pytest.approx(0.25)
    assert busy_fraction(lanes["rollout-10"], 0.0, 1.0) == pytest.approx(0.5)
    assert busy_fraction([], 1.0, 1.0) == 0.0


def test_making_a_backend_is_no_work() -> None:
    assert busy_fraction([Bar("load", 0.0, 5.0), Bar("burst", 5.0, 10.0)], 0.0, 10.0) == 0.5


def test_a_lane_that_is_silent_for_long_was_not_there() -> None:
    bars = [Bar("idle", 0, 3), Bar("generate", 4, 5), Bar("generate", 20, 21)]
    assert presence(bars) == [(0, 5), (20, 21)]


def test_the_pictures_show_what_was_measured(run_dir: Path) -> None:
    data = read_run(run_dir)
    shares, close = (axes for axes in occupancy(data).axes if axes.get_title(loc="left"))
    assert [label.get_text() for label in shares.get_yticklabels()] == [
        "trainer  25%",
        "rollout-2  50%",
        "rollout-10  100%",
    ]
    assert [label.get_text() for label in close.get_yticklabels()] == ["trainer", "rollout-2", "rollout-10"]
    histogram, tail = lengths(data).axes
    assert [text.get_text() for text in histogram.get_legend().get_texts()] == ["steps 0 to 1", "steps 4 to 5"]
    assert tail.get_lines()[0].get_ydata().tolist() == [10.0] * 6
    assert len(reward(data).axes) == 2, "with a ranking, its recall beside"
    shown = {axes.get_title(loc="left"): axes for axes in learning(data).axes if axes.get_visible()}
    assert list(shown) == [
        "Loss", "Entropy of the policy", "Gradient norm", "Staleness, greatest", "Spread of the rewards"
    ]  # no KL term, no picture of it  # fmt: skip
    assert shown["Spread of the rewards"].get_lines()[0].get_ydata().tolist() == [0.25] * 6
    samples = throughput(data).axes[0].get_lines()[0].get_ydata()
    assert samples.tolist() == [32.0] * 6


def test_time_before_a_worker_joined_and_after_it_left_is_not_idle_time() -> None:
    lanes = {"trainer": [Bar("train", 0, 100)], "rollout-1": [Bar("generate", 50, 60), Bar("idle", 60, 70)]}
    shares = occupancy(RunData(name="x", lanes=lanes)).axes[0].get_images()[0].get_array()
    late = np.ma.filled(shares, np.nan)[1]
    assert np.isnan(late[:79]).all() and np.isnan(late[113:]).all()
    assert (late[81:95] == 1).all() and (late[97:111] == 0).all()


def test_what_is_not_there_is_not_drawn() -> None:
    empty = RunData(name="x", rows=[{"step": 0}])
    assert [make(empty) for make in FIGURES.values()] == [None] * 6
    only_rows = RunData(name="x", rows=[{"step": 0, "reward_mean": 0.5, "seconds": 1.0, "samples": 4}])
    assert reward(only_rows) is not None
    assert len(reward(only_rows).axes) == 1


def test_one_step_is_enough(tmp_path: Path) -> None:
    data = RunData(
        name="x",
        lanes={"trainer": [Bar("train", 0, 1)]},
        rows=[dict(row(0))],
        lengths={0: np.array([3, 4], np.int32)},
        evaluations=[EVALUATED],
    )
    for name, make in FIGURES.items():
        make(data).savefig(tmp_path / f"{name}.png")


def invoke(*args: str) -> Any:
    return CliRunner().invoke(app, ["plot", *args])


def test_the_command_writes_pictures_and_a_page_that_stands_alone(run_dir: Path) -> None:
    result = invoke(str(run_dir), "--json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout.splitlines()[-1])
    assert [Path(path).name for path in said["pictures"]] == [f"{name}.png" for name in FIGURES]
    assert all(Path(path).read_bytes().startswith(b"\x89PNG") for path in said["pictures"])
    page = Path(said["page"]).read_text()
    assert page.count("data:image/png;base64,") == 6
    assert 'src="http' not in page
    assert "<dd>0.200 → 0.300</dd>" in page
    for fact in ("<dd>qwen</dd>", "<dd>6 of 20</dd>", "<dd>async</dd>", "<dt>begun</dt>", "trainer: {lr: 0.001}"):
        assert fact in page
    for word in ("A bubble, pale, is time", "need not add up to 100 %", "Strong: the running mean"):
        assert word in page
    shown = json.loads(page.partition('id="exported">')[2].partition("</script>")[0])
    assert [values[0] for values in shown["rows"]["rows"]] == [0, 1, 2, 3, 4, 5], "the console's page holds its data"
    assert 'src="app.js"' not in page and 'href="style.css"' not in page
    other = invoke(str(run_dir), "--out", str(run_dir / "elsewhere"))
    assert (run_dir / "elsewhere" / "index.html").exists()
    assert "6 pictures" in other.stdout


def test_what_is_no_run_is_said_with_what_to_do(tmp_path: Path) -> None:
    none = invoke(str(tmp_path))
    assert (none.exit_code, "it has no job.yaml" in none.stderr) == (2, True)
    (tmp_path / "job.yaml").write_text("name: x\n")
    early = invoke(str(tmp_path))
    assert (early.exit_code, "Wait until its first step" in early.stderr) == (2, True)
    (tmp_path / "trace.json").write_text("[")
    damaged = invoke(str(tmp_path))
    assert (damaged.exit_code, "is no trace" in damaged.stderr) == (2, True)


def several(folder: Path, *traces: tuple[str, str, list[TraceSpan]]) -> Path:
    """Directory of several jobs, whose services have these spans."""
    folder.mkdir()
    (folder / JOBS_FILE).write_text("{}")
    for service, job, bars in traces:
        (folder / "services" / service).mkdir(parents=True, exist_ok=True)
        trace = TraceFile(folder / "services" / service / "trace.json", f"service.{service}")
        trace.add(job, bars)
        trace.close()
    return folder


def test_services_that_several_jobs_share_are_drawn_with_a_lane_a_job(tmp_path: Path) -> None:
    folder = several(
        tmp_path / "first+second",
        ("train-0", "first", spans(("burst", 1.0, 2.0), ("burst", 8.0, 9.0))),
        (
            "train-0",
            "second",
            spans(("wait", 1.0, 2.0), ("prefetch", 1.2, 1.8), ("switch", 2.0, 2.5), ("burst", 2.5, 4.0)),
        ),
        ("train-1", "third", spans(("burst", 5.0, 6.0))),
    )
    data = read_services(folder)
    assert list(data.lanes) == ["train-0: first", "train-0: second", "train-1: third"]
    assert data.lanes["train-0: first"] == [Bar("burst", 0.0, 1.0), Bar("idle", 1.0, 7.0), Bar("burst", 7.0, 8.0)]
    assert presence(data.lanes["train-0: first"]) == [(0.0, 8.0)], "a job without a call has not gone"
    assert [bar.name for bar in data.lanes["train-0: second"]] == ["wait", "prefetch", "switch", "burst"]
    assert busy_fraction(data.lanes["train-0: second"], 0.0, 3.0) == pytest.approx(2 / 3)
    result = invoke(str(folder), "--json")
    told = json.loads(result.stdout.splitlines()[-1])
    assert [Path(path).name for path in told["pictures"]] == ["services.png"], (
        "with --out in one place they replace no picture of a job"
    )
    page = Path(told["page"]).read_text()
    assert "first+second" in page and "<script" not in page, "what is no run has pictures alone"


def test_several_jobs_that_share_nothing_have_nothing_to_draw_together(tmp_path: Path) -> None:
    result = invoke(str(several(tmp_path / "both")))
    assert result.exit_code == 2
    assert "have no trace of a training service" in " ".join(result.stderr.split())
