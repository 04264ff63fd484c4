"""What TensorBoard itself reads from the files of a run, also of one that went back."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from actors.metrics.sinks.sink import SinkSetup
from actors.metrics.sinks.tensorboard_files import TensorBoardSink, tag
from configs.limits import Limits
from configs.schema import MetricsConfig

ROOT = Path(__file__).parents[4]


def live(run_dir: Path, steps: range, reward: float) -> None:
    """One life of a run: it gives the rows of ``steps`` to metrics.jsonl and to the sink."""
    sink = TensorBoardSink(SinkSetup.of("j", run_dir, MetricsConfig(), Limits()))
    with (run_dir / "metrics.jsonl").open("a") as rows, (run_dir / "eval.jsonl").open("a") as evaluations:
        for step in steps:
            row: dict[str, Any] = {"step": step, "reward_mean": reward, "kl": None}
            evaluated = {"version": step + 1, "mean": reward, "pass_at_k": {"1": reward}}
            rows.write(json.dumps(row) + "\n")
            evaluations.write(json.dumps(evaluated) + "\n")
            sink.write(step, row)
            sink.evaluation(evaluated)
    sink.close()


def back_to(run_dir: Path, step: int) -> None:
    """Cut the files as ``doctor --back-to`` does."""
    for name, key, last in (("metrics.jsonl", "step", step - 1), ("eval.jsonl", "version", step)):
        lines = [line for line in (run_dir / name).read_text().splitlines() if json.loads(line)[key] <= last]
        (run_dir / name).write_text("".join(f"{line}\n" for line in lines))


def read(run_dir: Path) -> Any:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = event_accumulator.EventAccumulator(str(run_dir / "tensorboard"))
    return found.Reload()


def curve(found: Any, name: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in found.Scalars(name)]


def test_tensorboard_reads_columns_evaluations_and_the_job_file(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("data: {}\nmax_word_len: 5\n")
    live(tmp_path, range(3), 0.5)
    found = read(tmp_path)
    assert curve(found, "learning/reward_mean") == [(0, 0.5), (1, 0.5), (2, 0.5)]
    assert curve(found, "eval/pass_at_1") == [(1, 0.5), (2, 0.5), (3, 0.5)]
    assert "learning/kl" not in found.Tags()["scalars"], "a mean of nothing is no point"
    (text,) = found.Tensors("job/text_summary")
    assert b"max_word_len: 5" in text.tensor_proto.string_val[0]


def test_a_run_that_went_back_shows_its_second_life_alone(tmp_path: Path) -> None:
    live(tmp_path, range(6), 0.25)
    back_to(tmp_path, 2)
    live(tmp_path, range(2, 4), 0.75)
    found = read(tmp_path)
    assert curve(found, "learning/reward_mean") == [(0, 0.25), (1, 0.25), (2, 0.75), (3, 0.75)]
    assert curve(found, "eval/pass_at_1") == [(1, 0.25), (2, 0.25), (3, 0.75), (4, 0.75)], "version 2 still holds"
    back_to(tmp_path, 0)
    live(tmp_path, range(2), 0.5)
    assert curve(read(tmp_path), "learning/reward_mean") == [(0, 0.5), (1, 0.5)]


def test_a_resumed_run_keeps_all_that_it_had(tmp_path: Path) -> None:
    for steps in (range(3), range(3, 5)):
        live(tmp_path, steps, 0.5)
    found = read(tmp_path)
    assert curve(found, "learning/reward_mean") == [(step, 0.5) for step in range(5)]
    assert curve(found, "eval/pass_at_1") == [(version, 0.5) for version in range(1, 6)]


def test_a_run_that_gets_its_files_late_has_the_rows_before(tmp_path: Path) -> None:
    live(tmp_path, range(3), 0.5)
    for file in (tmp_path / "tensorboard").iterdir():
        file.unlink()
    live(tmp_path, range(3, 5), 0.5)
    assert curve(read(tmp_path), "learning/reward_mean") == [(step, 0.5) for step in range(5)]


def test_every_column_of_the_reference_stands_in_a_group_of_its_section() -> None:
    """What is about learning, time, weights, faults is found together; the sections are those of the reference."""
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
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
