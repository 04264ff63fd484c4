"""A real run as a child process, for tests that look at it from outside and do it harm."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import yaml

T = TypeVar("T")

SMALL_JOB: dict[str, Any] = {
    "name": "small",
    "seed": 7,
    "steps": 8,
    "model": {"source": "tiny", "hidden": 48, "layers": 2, "warm_start_steps": 20},
    "data": {"source": "reasoning_gym", "task": "spell_backward"},
    "reward": {"kind": "reasoning_gym"},
    "algorithm": {"group_size": 4, "prompts_per_step": 6},
    "rollout": {"workers": 2, "max_tokens": 12, "threads": 1, "max_running": 16},
    "trainer": {"lr": 1e-3, "threads": 1},
    "checkpoint": {"every": 3},
    "metrics": {"tensorboard": False},
}


def simulated_rollout(model: Path, **changes: Any) -> dict[str, Any]:
    """SMALL_JOB's ``rollout`` on engines that take 30 ms a step on any machine, with tokens that ``model`` knows.

    For tests that need a run to be at a certain point at a certain time: real engines are as fast as the machine.
    """
    vocab = int(json.loads((model / "config.json").read_text())["vocab_size"])
    options = {"base_s": 0.03, "mean_tokens": 12, "vocab": vocab}
    rollout = {name: value for name, value in SMALL_JOB["rollout"].items() if name != "threads"}
    return rollout | {"engine": "simulated", "engine_options": options} | changes


class RunOfHeadrace:
    """``headrace run`` of a job in ``run_dir``."""

    def __init__(self, run_dir: Path, job: dict[str, Any], *more: str, model: Path | None = None) -> None:
        self.run_dir = run_dir
        job = json.loads(json.dumps(job))
        if model is not None:
            job["model"] = {"source": "hf", "path": str(model)}
        job_file = run_dir.parent / f"{run_dir.name}.yaml"
        job_file.write_text(yaml.safe_dump(job))
        self._start(["run", str(job_file), "--dir", str(run_dir), *more])

    def _start(self, arguments: list[str]) -> None:
        command = [sys.executable, "-m", "main", *arguments, "--json"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def resume(self, *more: str) -> None:
        """Start ``headrace run --resume`` for the same run directory."""
        self._start(["run", "--resume", str(self.run_dir), *more])

    def steps(self) -> list[dict[str, Any]]:
        """Rows of metrics.jsonl."""
        file = self.run_dir / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def events(self, name: str) -> list[dict[str, Any]]:
        file = self.run_dir / "events.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return [row for row in rows if row["event"] == name]

    def wait_for(self, what: str, probe: Callable[[], T | None], timeout_s: float = 120.0) -> T:
        """Poll ``probe`` until it returns something true."""
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            if found := probe():
                return found
            assert self.process.poll() is None, f"the run ended before {what}: {self.process.communicate()[1][-3000:]}"
            time.sleep(0.02)
        raise AssertionError(f"no {what} within {timeout_s} s; last events: {self.tail()}")

    def wait_for_step(self, step: int) -> None:
        self.wait_for(f"step {step}", lambda: any(row["step"] >= step for row in self.steps()))

    def tail(self) -> str:
        file = self.run_dir / "events.jsonl"
        return "\n".join(file.read_text().splitlines()[-15:]) if file.exists() else ""

    def ctl(self, *arguments: str) -> Any:
        """The JSON answer of ``headrace ctl``."""
        endpoint = (self.run_dir / "control.endpoint").read_text().strip()
        command = [sys.executable, "-m", "main", "ctl", "--control", endpoint, "--json", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def pid_of(self, name: str) -> int:
        return next(row["pid"] for row in self.ctl("tree") if row["name"] == name and row["state"] == "running")

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> int:
        pid = self.pid_of(name)
        os.kill(pid, number)
        return pid

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def finish(self, timeout_s: float = 240.0) -> tuple[int, dict[str, Any]]:
        """Exit code and the summary."""
        out, err = self.process.communicate(timeout=timeout_s)
        lines = [line for line in out.splitlines() if line.startswith("{")]
        assert lines, f"no summary; stderr: {err[-3000:]}"
        return self.process.returncode, json.loads(lines[-1])

    def close(self) -> None:
        """End whatever still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate(timeout=30)
