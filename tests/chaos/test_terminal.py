"""A real run whose terminal goes away, and a second one that wants its directory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from small_job import simulated_job

ROOT = Path(__file__).resolve().parents[2]
ENV = {**os.environ, "PYTHONPATH": str(ROOT)}


def headrace(*words: str) -> list[str]:
    return [sys.executable, "-P", "-m", "main", *words]


@pytest.fixture
def hangups_end() -> Iterator[None]:
    """Processes are started as from a terminal; under nohup they would inherit that a hangup is ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("hangups_end")
def test_a_run_outlives_its_readers_keeps_its_directory_and_takes_a_checkpoint_when_its_terminal_closes(
    small_model: Path, tmp_path: Path
) -> None:
    job, run_dir = tmp_path / "job.yaml", tmp_path / "run"
    job.write_text(yaml.safe_dump(simulated_job(small_model, steps=400, checkpoint={"every": 0})))
    run = subprocess.Popen(headrace("run", str(job), "--dir", str(run_dir)), env=ENV, stdout=subprocess.PIPE,
                           stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)  # fmt: skip
    try:
        assert run.stdout is not None
        run.stdout.close()  # from now on every line breaks its pipe
        _wait_for_rows(run_dir, 2, run)
        before = sorted(path.name for path in Path("/dev/shm").glob("headrace-*"))
        yaml_before = (run_dir / "job.yaml").read_bytes()
        for words in (("--resume", str(run_dir)), (str(job), "--dir", str(run_dir))):
            second = subprocess.run(headrace("run", *words), env=ENV, capture_output=True, timeout=60, check=False)
            assert second.returncode == 2
            assert f"is in use by process {run.pid} on" in second.stderr.decode().replace("\n", " ")
        assert (run_dir / "job.yaml").read_bytes() == yaml_before and before
        rows = _rows(run_dir)
        _wait_for_rows(run_dir, rows + 3, run)  # it goes on
        run.send_signal(signal.SIGHUP)
        run.send_signal(signal.SIGHUP)
        assert run.wait(60) == 130
    finally:
        run.kill()
    assert len(list((run_dir / "checkpoints").glob("step_*"))) == 1
    steps = _rows(run_dir)
    again = subprocess.run(headrace("run", "--resume", str(run_dir), "--set", f"steps={steps + 2}", "--json"),
                           env=ENV, capture_output=True, timeout=120, check=True)  # fmt: skip
    summary = json.loads(again.stdout.splitlines()[-1])
    assert (summary["state"], summary["steps"]) == ("finished", steps + 2)
    assert (summary["prompts_lost"], summary["samples_trained_twice"]) == (0, 0)


def _rows(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def _wait_for_rows(run_dir: Path, count: int, run: subprocess.Popen[bytes]) -> None:
    until_s = time.monotonic() + 120
    while time.monotonic() < until_s and run.poll() is None:
        if _rows(run_dir) >= count:
            return
        time.sleep(0.05)
    raise AssertionError(f"the run did not come to {count} steps")
