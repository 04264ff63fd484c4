"""A run on a machine with two devices, of which nvidia-smi says so: who is given which, and who has it after a kill."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_job import TORCH, simulated_job

from supervisors.testing.run_under_test import HeadraceRun
from tests.supervisors.machine.fake_driver import fake_nvidia_smi

pytestmark = [pytest.mark.long]


def variable(pid: int, name: str) -> str | None:
    """What a process was started with."""
    variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return next((text.partition("=")[2] for text in variables if text.startswith(f"{name}=")), None)


def given(run: HeadraceRun) -> dict[str, list[str]]:
    """Processes by device, as the head says."""
    (node,) = run.call("nodes")
    return node["given"]


def test_each_process_has_the_device_that_the_head_says_also_after_a_kill_of_it_and_of_the_head(
    tmp_path: Path,
    small_model: Path,
    headrace_run: Callable[..., HeadraceRun],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch finds no such device, and computes on the CPU, as it does where a driver is broken."""
    monkeypatch.setenv("PATH", fake_nvidia_smi(tmp_path / "bin", [0, 0, 0]) + ":" + os.environ["PATH"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    job: dict[str, Any] = simulated_job(small_model, **TORCH, steps=1000)
    run = headrace_run(job, arguments=["--devices", "2"])
    run.wait_for_step(1)
    pids = run.processes()
    seen = {name: variable(pid, "CUDA_VISIBLE_DEVICES") for name, pid in pids.items()}
    by_head = given(run)
    assert sorted(map(len, by_head.values())) == [1, 2]
    for device, processes in by_head.items():
        assert {seen[process.removeprefix("small.")] for process in processes} == {device}
    assert seen["weights"] == "" and seen["rewards"] == ""
    assert variable(pids["trainer"], "CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    os.kill(pids["rollout-0"], signal.SIGKILL)
    os.kill(pids["head"], signal.SIGKILL)
    run.wait_until("a new rollout-0", lambda: len(run.events("devices_given")) > 3)
    run.wait_until("all to run again", lambda: {"rollout-0", "rollout-1", "trainer"} <= run.processes().keys())
    after = given(run)
    assert sorted(map(len, after.values())) == [1, 2]
    for device, processes in after.items():
        names = [process.removeprefix("small.") for process in processes]
        assert {variable(run.processes()[name], "CUDA_VISIBLE_DEVICES") for name in names} == {device}
    run.interrupt()
    run.finish(state="interrupted")
    assert {row["child"] for row in run.events("devices_given")} == {"trainer", "rollout-0", "rollout-1"}
