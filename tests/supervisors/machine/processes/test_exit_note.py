"""The last words of a process: they need no disk and no link, block nobody, and are believed only if they are some."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from actors.core.reason import Reason
from supervisors.machine.processes import exit_note
from supervisors.machine.processes.process import EXIT_CRASHED, Launch, ProcessExit, launch
from supervisors.tree.restart_budget import ExitCause

NO_SPACE = Reason(error="OSError", message="[Errno 28] No space left on device", permanent=False)


def test_what_was_left_is_read_and_the_pipe_is_closed() -> None:
    ours, childs = exit_note.make_pipe()
    exit_note.leave(childs, NO_SPACE)
    os.close(childs)
    assert exit_note.read_note(ours) == NO_SPACE
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(ours)


@pytest.mark.parametrize("said", [b"", b"Segmentation fault", b'{"error": 5}', b'{"error": "E", "mess', b"\xff" * 9000])
def test_what_is_no_note_is_no_reason(said: bytes) -> None:
    ours, childs = exit_note.make_pipe()
    os.write(childs, said)
    assert exit_note.read_note(ours) is None, "also while somebody could still write"
    os.close(childs)


def test_a_note_that_does_not_fit_is_cut_and_a_full_pipe_blocks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, childs = exit_note.make_pipe()
    monkeypatch.setenv(exit_note.VARIABLE, str(childs))
    pipe = exit_note.take_pipe()
    assert exit_note.VARIABLE not in os.environ, "who is started from here has no part in it"
    exit_note.leave(pipe, Reason(error="E", message="\N{SNOWMAN}" * 5000))
    for _ in range(100):
        exit_note.leave(pipe, NO_SPACE)
    note = exit_note.read_note(ours)
    os.close(childs)
    assert note is None or note.message.startswith("\N{SNOWMAN}")


PROGRAM = """
import sys
from actors.core.reason import Reason
from supervisors.machine.processes import exit_note
pipe = exit_note.take_pipe()
exit_note.leave(pipe, Reason(error="NoSuchModel", message="model.path: gone", permanent=True))
sys.exit(70)
"""


async def test_the_exit_of_a_process_carries_its_last_words(tmp_path: Path) -> None:
    child = launch(Launch([sys.executable, "-c", PROGRAM], tmp_path / "log"))
    end = await child.wait(30)
    assert end == ProcessExit(
        child.pid,
        EXIT_CRASHED,
        ExitCause.CRASHED,
        Reason(error="NoSuchModel", message="model.path: gone", permanent=True),
    )
    assert str(end).endswith("ended with exit code 70: NoSuchModel: model.path: gone")


async def test_a_process_that_does_not_start_leaves_no_descriptor_behind(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(OSError):
            launch(Launch([str(tmp_path / "no such program")], tmp_path / "log"))
    child = launch(Launch([sys.executable, "-c", ""], tmp_path / "log"))
    await child.wait(30)
    await asyncio.sleep(0)
    assert len(os.listdir("/proc/self/fd")) <= before + 1, "asyncio may have opened its own"
