"""A run as a program sees it, without one that goes on: from its files, and from a socket that tells too little."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from actors.control.errors import BadArgs, NotFound, NotSupported, Unreachable
from actors.control.server import ControlServer
from actors.control.socket import open_control_socket
from configs.limits import DEFAULT_LIMITS
from configs.python_path import python_path
from supervisors.api import Event, Events, NoRun, Run, RunFailed, connect, held_process, loop_thread
from supervisors.api.held_process import HeldProcess
from supervisors.api.held_run import HeldOrder
from supervisors.machine.run_directory import RunLock
from tests.actors.control.control_fakes import FakeBackend
from tests.smallest_job import smallest_job

PATIENCE_S = 60


def write_run(run_dir: Path, *, steps: int, state: str, reason: str = "") -> Path:
    run_dir.mkdir()
    (run_dir / "job.yaml").write_text(json.dumps({"name": "demo", "steps": 20}))
    rows = [{"step": step, "reward_mean": step / 20, "seconds": 2.0, "samples": 8} for step in range(steps)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run_dir / "events.jsonl").write_text(json.dumps({"event": "job_state", "state": state, "reason": reason}) + "\n")
    turns = {step: [{"role": "model", "text": f"answer of {step}", "tokens": 3}] for step in (0, 3)}
    samples = [{"step": step, "prompt": 1, "sibling": 0, "turns": turns[step]} for step in (0, 0, 3)]
    (run_dir / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
    return run_dir


@contextmanager
def served(endpoint: str, backend: FakeBackend) -> Iterator[None]:
    """A control server on a thread of its own, as it is in another process."""
    ready, over = threading.Event(), threading.Event()

    async def serve() -> None:
        server = ControlServer(backend, open_control_socket(endpoint, DEFAULT_LIMITS), limits=DEFAULT_LIMITS)
        await server.start()
        ready.set()
        await asyncio.to_thread(over.wait, PATIENCE_S)
        await server.stop()

    thread = threading.Thread(target=asyncio.run, args=[serve()])
    thread.start()
    assert ready.wait(PATIENCE_S)
    try:
        yield
    finally:
        over.set()
        thread.join(PATIENCE_S)


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    return write_run(tmp_path / "finished", steps=5, state="finished")


def check_finished(run: Run) -> None:
    assert [row["step"] for row in run.metrics()] == [0, 1, 2, 3, 4]
    assert [row["turns"][0]["text"] for row in run.samples()] == ["answer of 3"]
    assert len(run.samples(2)) == 2
    status = run.status()
    assert (status["state"], status["step"], status["steps"]) == ("finished", 5, 20)
    told = list(run.events())
    assert [event.kind for event in told] == ["step"] * 5 + ["state"]
    assert told[0].fields["step"] == 0
    assert str(told[0]).startswith("step 0 (1 of 20)  reward 0.000")
    assert str(told[-1]) == "finished"
    summary = run.wait(PATIENCE_S)
    assert (summary["job"], summary["state"], summary["steps"], summary["seconds"]) == ("demo", "finished", 5, 10.0)


def test_a_run_that_is_over_is_looked_at_where_no_loop_runs(finished: Path) -> None:
    check_finished(connect(finished))


async def test_a_run_that_is_over_is_looked_at_where_a_loop_runs_as_in_a_notebook(finished: Path) -> None:
    run = connect(str(finished))
    check_finished(run)
    assert [event.kind async for event in run.events()] == ["step"] * 5 + ["state"]
    assert (await run.result())["state"] == "finished"


async def test_a_run_that_has_failed_says_so_and_why(tmp_path: Path) -> None:
    run = connect(write_run(tmp_path / "failed", steps=2, state="failed", reason="the trainer gave up"))
    with pytest.raises(RunFailed, match="the trainer gave up") as failed:
        await run.result()
    assert failed.value.summary["steps"] == 2
    with pytest.raises(RunFailed, match="the trainer gave up"):
        run.wait(PATIENCE_S)


def test_what_is_no_run_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(NoRun, match=r"it has no job\.yaml"):
        connect(tmp_path)
    with pytest.raises(Unreachable, match="no control server answers at ipc:"):
        connect(f"ipc://{tmp_path}/nobody")
    with pytest.raises(ValueError, match="nonsense"):
        connect("nonsense://")


def test_a_run_that_is_over_has_nobody_to_be_asked(finished: Path) -> None:
    run = connect(finished)
    with pytest.raises(Unreachable, match="has no control socket"):
        run.cancel()
    with pytest.raises(BadArgs, match="is a stream") as refused:
        run.call("watch")
    assert refused.value.__notes__ == ["Use run.events()"]


class Forgetful(FakeBackend):
    """Its watch tells of steps 2 and 4 only, as that of a head that was away; the metrics have all four."""

    async def watch(self, job: str | None) -> AsyncGenerator[dict[str, Any], None]:
        yield {"kind": "state", "job": "demo", "state": "running"}
        yield {"kind": "step", "job": "demo", "step": 2, "reward_mean": 0.1}
        yield {"kind": "message", "job": "demo", "message": "every process is ready"}
        yield {"kind": "step", "job": "demo", "step": 2, "reward_mean": 0.1}
        yield {"kind": "step", "job": "demo", "step": 4, "reward_mean": 0.3}
        yield {"kind": "message", "job": "demo", "waiting_for": "a rollout worker"}
        yield {"kind": "message", "job": "demo", "core": "ready"}
        yield {"kind": "state", "job": "demo", "state": "finished"}

    async def metrics(self, job: str | None, last: int) -> list[dict[str, Any]]:
        return [{"step": step, "reward_mean": step / 10} for step in range(4)]


async def test_every_step_is_told_once_and_in_order_whatever_the_watch_has_missed(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/control"
    with served(endpoint, Forgetful()):
        run = connect(endpoint)
        told = [event async for event in run.events()]
        assert [event.fields["step"] for event in told if event.kind == "step"] == [0, 1, 2, 3]
        assert [str(event) for event in told if event.kind != "step"] == [
            "running", "every process is ready", "waiting for a rollout worker", "finished"
        ]  # fmt: skip
        assert len(run.metrics()) == 4


def test_a_run_at_an_endpoint_is_steered_by_name_and_its_files_may_be_elsewhere(tmp_path: Path) -> None:
    endpoint, backend = f"ipc://{tmp_path}/control", FakeBackend()
    backend.states = {"demo": "running", "other": "running"}
    with served(endpoint, backend):
        with pytest.raises(NotFound, match=r"the jobs at .* are demo, other"):
            connect(endpoint)
        run = connect(endpoint, job="other")
        assert run.call("scale", workers=3) == {"job": "other", "workers": 3}
        run.cancel()
        assert (backend.states["other"], backend.states["demo"]) == ("cancelled", "running")
        assert run.status()["state"] == "cancelled"
        with pytest.raises(NotSupported, match="another machine"):
            run.samples()


async def test_a_wait_that_was_cut_short_loses_no_event() -> None:
    gate = asyncio.Event()

    async def source() -> AsyncGenerator[Event, None]:
        yield Event("message", {}, "first")
        await gate.wait()
        yield Event("message", {}, "second")

    events = Events(source())
    assert str(await anext(events)) == "first"
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await anext(events)
    assert loop_thread._loop is not None
    loop_thread._loop.call_soon_threadsafe(gate.set)
    assert str(await anext(events)) == "second"
    with pytest.raises(StopAsyncIteration):
        await anext(events)


def test_the_process_of_a_run_that_cannot_begin_says_why(tmp_path: Path) -> None:
    order = HeldOrder(job=smallest_job().model_dump_json(), run_dir=str(tmp_path))
    with RunLock.take(tmp_path):
        process = HeldProcess(order, None)
        summary = process.ended.result(PATIENCE_S)
    assert (summary["state"], summary["error"][:14]) == ("failed", "DirectoryInUse")
    with pytest.raises(RunFailed, match="is in use by process"):
        Run("j", run_dir=tmp_path, process=process).wait(PATIENCE_S)


def test_the_process_of_a_run_ends_with_whoever_holds_it(tmp_path: Path) -> None:
    """Its directory cannot be had for a while, so it is still at its beginning."""
    process = HeldProcess(HeldOrder(job=smallest_job().model_dump_json(), run_dir=str(tmp_path)), None)
    ended = process.ended
    del process
    gc.collect()
    assert ended.result(PATIENCE_S)["state"] in ("interrupted", "failed")


A_RUN = """
import json, sys
sys.stdin.readline()
sys.stdin.read(1)
print(json.dumps({"state": "interrupted"}))
"""
"""Stands for the process of a run that goes on until its holder lets go."""


@pytest.fixture
def going_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HeldProcess:
    monkeypatch.setattr(held_process, "command", lambda *_: [sys.executable, "-c", A_RUN])
    return HeldProcess(HeldOrder(job=smallest_job().model_dump_json(), run_dir=str(tmp_path)), None)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_that_the_program_forks_neither_keeps_its_run_alive_nor_ends_it(
    going_on: HeldProcess, tmp_path: Path
) -> None:
    """The child does all that would end the run, and lives on."""
    run = Run("j", run_dir=tmp_path, process=going_on)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            run.close()
            run.kill()
            going_on.release()
            os.write(write, b"done")
        finally:
            threading.Event().wait(PATIENCE_S)
            os._exit(0)
    try:
        assert os.read(read, 4) == b"done"
        assert not going_on.ended.done()
        run.cancel()
        assert run.wait(PATIENCE_S / 4)["state"] == "interrupted"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(read)
        os.close(write)


@pytest.mark.skipif(sys.platform != "linux", reason="open files are looked up in /proc")
def test_a_run_that_is_let_go_of_ends_though_another_program_has_the_pipe_to_it(going_on: HeldProcess) -> None:
    """As a child has it that a library has forked below Python."""
    pipe = Path(f"/proc/{going_on.pid}/fd/0").readlink()
    (ours,) = [int(end.name) for end in Path("/proc/self/fd").iterdir() if end.is_symlink() and end.readlink() == pipe]
    with subprocess.Popen(["sleep", str(PATIENCE_S)], pass_fds=[ours]) as other:
        going_on.release()
        assert going_on.ended.result(PATIENCE_S / 4)["state"] == "interrupted"
        other.kill()


DIES = """
import os, subprocess, sys
ours, theirs = os.pipe()
subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())], stdin=ours)
other = subprocess.Popen(["sleep", "60"], pass_fds=[theirs], stdout=subprocess.DEVNULL)
print(other.pid, flush=True)
os._exit(0)
"""
INTERRUPTED = """
import os, signal, sys
signal.signal(signal.SIGINT, lambda *_: (print("interrupted", flush=True), os._exit(0)))
from supervisors.api.held_run import end_with_holder
end_with_holder(int(sys.argv[1]))
"""


def test_a_run_ends_when_its_program_dies_though_another_program_has_the_pipe_to_it() -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", DIES, INTERRUPTED], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": python_path()},
    )  # fmt: skip
    assert program.stdout is not None
    with program.stdout:
        other = int(program.stdout.readline())
        try:
            assert program.wait(PATIENCE_S) == 0
            assert program.stdout.readline() == "interrupted\n"
        finally:
            os.kill(other, signal.SIGKILL)


def test_the_command_of_such_a_process_is_for_programs() -> None:
    command = [sys.executable, "-P", "-m", "main", "held"]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=PATIENCE_S,
        env={**os.environ, "PYTHONPATH": python_path()},
    )  # fmt: skip
    assert (done.returncode, "docs/guides/python.md" in done.stderr) == (1, True)
