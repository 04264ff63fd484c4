"""Real runs that a program has started: the guide's cells as written, and how a run ends with whoever started it."""

from __future__ import annotations

import ast
import asyncio
import gc
import inspect
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from small_job import simulated_job

from actors.control.errors import ControlError
from configs.python_path import python_path
from headrace import Run, connect, start
from supervisors.checkers.checks import check
from supervisors.checkers.history import RunState
from supervisors.checkers.run_directory import read_history

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "python.md"
PATIENCE_S = 60
PROGRAM = """
import sys
from headrace import run_job
run_job(sys.argv[1], {"steps": 10_000}, run_dir=sys.argv[2], on_event=lambda event: print(event, flush=True))
"""


async def run_cell(cell: str, names: dict[str, Any]) -> None:
    """As IPython does: a cell may await at its top level, and may be one that is written to a file."""
    if (file := re.match(r"%%writefile (\S+)\n", cell)) is not None:
        Path(file[1]).write_text(cell[file.end() :])
        return
    code = compile(cell, "cell", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    done = eval(code, names)
    if inspect.isawaitable(done):
        await done


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_the_cells_of_the_guide_run_as_written_in_a_loop_that_runs_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``quickstart`` is a file of a smaller job here, which comes before the preset."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("quickstart").write_text(yaml.safe_dump(simulated_job(small_model, name="quickstart")))
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    try:
        for cell in cells:
            await run_cell(cell, names)
    finally:
        sys.modules.pop("rewards", None)
    said = capsys.readouterr().out
    assert "step 1 (2 of 2)  reward" in said
    assert [int(step) for step in re.findall(r"^step (\d+)/20 ", said, re.MULTILINE)] == list(range(1, 21))
    assert (names["run"].run_dir.name, names["other"].run_dir) == ("quickstart", names["run"].run_dir)
    assert len(names["table"]) == 20
    assert [row["step"] for row in names["more"].metrics()] == list(range(22))
    rewarded = read_history(Path("runs/quickstart-2"))
    assert rewarded.job.reward.function == "rewards:short"
    assert 0 < names["summary"]["reward_last"] <= 1
    for run_dir in ("runs/quickstart", "runs/quickstart-2"):
        assert check(read_history(Path(run_dir)), must_finish=True).clean


def settle(what: str, probe: Callable[[], Any]) -> Any:
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        try:
            if found := probe():
                return found
        except (ControlError, OSError):
            pass  # it is still beginning
        time.sleep(0.1)
    raise AssertionError(f"no {what} within {PATIENCE_S} s")


def processes_of(run: Run, *further: int) -> list[psutil.Process]:
    """Every process of a run that goes on."""
    pids = {int(row["pid"]) for row in run.call("tree")} - {0}
    assert len(pids) >= 5
    return [psutil.Process(pid) for pid in sorted(pids | set(further))]


def gone(processes: list[psutil.Process]) -> bool:
    return not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)


def check_ended_in_good_order(run_dir: Path, processes: list[psutil.Process]) -> None:
    settle("end of all processes", lambda: gone(processes))
    history = read_history(run_dir)
    assert history.state is RunState.INTERRUPTED
    assert check(history).clean
    committed = len({row["step"] for row in history.rows})
    assert (run_dir / "checkpoints" / f"step_{committed:06}").is_dir()


async def test_a_run_ends_with_a_checkpoint_when_nobody_holds_it_any_more(tmp_path: Path, small_model: Path) -> None:
    run = start(simulated_job(small_model, steps=10_000), run_dir=tmp_path / "run")
    async for event in run.events():
        if event.kind == "step":
            break
    other = connect(tmp_path / "run")
    assert other.status()["state"] == "running"
    assert run.metrics()[0]["step"] == 0
    assert {row["step"] for row in run.samples(0)} == {0}
    with pytest.raises(TimeoutError):
        run.wait(0.1)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await run.result()
    processes = processes_of(other)
    del run, other, event
    await asyncio.sleep(0)  # a loop lets go of a wait that was cut short in its next turn
    gc.collect()
    await asyncio.to_thread(check_ended_in_good_order, tmp_path / "run", processes)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_run_ends_with_a_checkpoint_when_its_program_is_interrupted_or_killed(
    number: signal.Signals, tmp_path: Path, small_model: Path
) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(simulated_job(small_model)))
    run_dir = tmp_path / "run"
    with (tmp_path / "said").open("w") as said:
        program = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(tmp_path / "job.yaml"), str(run_dir)],
            stdout=said, stderr=said, start_new_session=True, env={**os.environ, "PYTHONPATH": python_path()},
        )  # fmt: skip
    try:
        settle("second step", lambda: "step 1 (2 of 10000)  reward" in (tmp_path / "said").read_text())
        processes = processes_of(connect(run_dir))
        os.killpg(program.pid, number)  # as a notebook's server does: the kernel, and whatever is in its group
        code = program.wait(PATIENCE_S)
    finally:
        program.kill()
    assert code == -number, (tmp_path / "said").read_text()
    check_ended_in_good_order(run_dir, processes)
