"""A whole run under random frames on every socket that it listens on."""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from supervisors.testing.run_under_test import HeadraceRun

FRAMES = 10_000
STEPS = 10_000


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the run puts its Unix sockets; the path has to be short."""
    directory = Path(tempfile.mkdtemp(prefix="hr-", dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(directory))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.mark.timeout(300)
def test_random_frames_on_every_socket_leave_a_run_unharmed_and_are_counted(
    start_run: Callable[..., HeadraceRun], sockets: Path
) -> None:
    run = start_run("bombarded", steps=STEPS)
    run.wait_for_step(1)
    files = [path for path in sockets.glob("headrace-*/*") if path.is_socket()]
    assert len(files) >= 3 * 6, f"three lanes of the head and of five processes or more: {sorted(map(str, files))}"
    for number, path in enumerate(sorted(files)):
        bombard(f"ipc://{path}", seed=number)
    run.wait_for_step(len(run.rows()) + 5)
    run.interrupt()
    summary = run.finish(state="interrupted")
    assert (summary["restarts"], summary["prompts_lost"], summary["samples_trained_twice"]) == (0, 0, 0)
    counted = malformed_by_process(run.run_dir)
    assert len(counted) >= 5 and sum(count > 0 for count in counted.values()) >= 5, counted


def bombard(endpoint: str, seed: int) -> None:
    """Random frames, some of them MessagePack, from a stranger."""
    draw = random.Random(seed)
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 500)
    socket.setsockopt(zmq.SNDTIMEO, 500)
    socket.connect(endpoint)
    try:
        for _ in range(FRAMES):
            frames = [os.urandom(draw.randrange(60)) for _ in range(draw.randrange(1, 4))]
            socket.send_multipart([*frames, json.dumps({"op": "tree"}).encode()] if draw.random() < 0.1 else frames)
    except zmq.Again:
        pass  # it has closed the connection, or takes no more: its right
    finally:
        socket.close()
        context.term()


def malformed_by_process(run_dir: Path) -> dict[str, int]:
    """What each process says in its log, at its end, about messages that it could not read."""
    counts: dict[str, int] = {}
    for file in (run_dir / "logs").glob("*.log"):
        for line in file.read_text(errors="replace").splitlines():
            if '"transport closed"' in line:
                counts[file.stem] = int(json.loads(line)["malformed"])
    return counts
