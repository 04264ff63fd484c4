"""After a run: ``headrace runs`` lists and compares, and ``headrace ctl`` answers from the files."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from supervisors.cli.app import app


def write_run(root: Path, name: str, *, steps: int, states: list[str], age_s: float, reason: str = "") -> Path:
    run_dir = root / name
    (run_dir / "logs").mkdir(parents=True)
    job = {"name": name, "steps": 20, "model": {"path": "/models/qwen"}, "sync": {"mode": "async"}}
    (run_dir / "job.yaml").write_text(json.dumps(job))
    os.utime(run_dir / "job.yaml", (1e9 - age_s, 1e9 - age_s))
    rows = [{"step": step, "reward_mean": step / 20, "seconds": 2.0} for step in range(steps)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    events = [{"event": "scheduler_opened"}, *({"event": "job_state", "state": s, "reason": reason} for s in states)]
    (run_dir / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (run_dir / "logs" / "trainer.log").write_text("one\ntwo\n")
    return run_dir


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs", "old", steps=20, states=["running", "finished"], age_s=100)
    write_run(tmp_path / "runs", "wrong", steps=0, states=["failed"], age_s=50, reason="the trainer gave up")
    write_run(tmp_path / "runs", "new", steps=10, states=["running"], age_s=0)
    (tmp_path / "runs" / "no run").mkdir()
    return tmp_path / "runs"


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_runs_are_listed_newest_first_with_what_they_came_to(root: Path) -> None:
    rows: list[dict[str, Any]] = json.loads(invoke("runs", "--json").stdout)
    assert [(row["run"], row["state"], row["steps"]) for row in rows] == [
        ("new", "crashed", "10/20"),
        ("wrong", "failed", "0/20"),
        ("old", "finished", "20/20"),
    ]
    old = rows[-1]
    assert (old["reward_first"], old["reward_last"]) == (pytest.approx(0.1), pytest.approx(0.85))
    assert (old["seconds"], old["model"], old["mode"]) == (40.0, "qwen", "async")
    assert rows[1]["reward_last"] is None
    assert "finished" in invoke("runs", str(root)).stdout
    assert [row["run"] for row in json.loads(invoke("runs", str(root / "old"), "--json").stdout)] == ["old"]
    assert invoke("runs", "nowhere").exit_code == 2


def test_a_run_whose_journal_a_process_has_open_goes_on(root: Path) -> None:
    journal = root / "new" / "journal.db"
    sqlite3.connect(journal).close()
    journal.touch()
    program = f"import sys; file = open({str(journal)!r}); print(1, flush=True); sys.stdin.read()"
    holder = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert json.loads(invoke("runs", "--json").stdout)[0]["state"] == "running"
    finally:
        holder.communicate(timeout=10)
    assert json.loads(invoke("runs", "--json").stdout)[0]["state"] == "crashed"


def test_a_torn_or_foreign_file_of_one_run_does_not_hide_the_others(root: Path) -> None:
    (root / "old" / "job.yaml").write_text("name: [")
    (root / "old" / "metrics.jsonl").write_text('{"step": 1, "rew')
    (root / "old" / "events.jsonl").write_bytes(b"\xff\n{\n")
    assert len(json.loads(invoke("runs", "--json").stdout)) == 3


def test_ctl_answers_of_a_run_that_is_over_from_its_files(root: Path) -> None:
    (job,) = json.loads(invoke("ctl", "--control", str(root / "wrong"), "jobs", "--json").stdout)
    assert (job["job"], job["state"], job["error"]) == ("wrong", "failed", "the trainer gave up")
    (row,) = json.loads(invoke("ctl", "--control", str(root / "old"), "metrics", "--json").stdout)
    assert row["step"] == 19
    assert len(json.loads(invoke("ctl", "--control", "runs/old", "metrics", "--last", "3", "--json").stdout)) == 3
    assert invoke("ctl", "--control", "runs/old", "logs", "trainer", "--lines", "1").stdout == "two\n"
    assert json.loads(invoke("ctl", "metrics", "--json").stdout)[0]["step"] == 9  # the newest of runs/
    unknown = invoke("ctl", "--control", "runs/old", "logs", "nobody")
    assert (unknown.exit_code, "there are: trainer" in unknown.stderr) == (2, True)


def test_what_only_a_head_can_do_is_still_asked_of_one(root: Path) -> None:
    for verb in ("tree", "pause"):
        assert invoke("ctl", "--control", "runs/old", verb).exit_code == 2  # it has no endpoint
