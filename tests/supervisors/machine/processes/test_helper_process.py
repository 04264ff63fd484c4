"""A helper that somebody kills gets a second chance; one that fails by itself does not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from configs.limits import DEFAULT_LIMITS
from supervisors.machine.processes import helper_process
from supervisors.machine.processes.helper_process import run_helper
from supervisors.tree.restart_budget import ExitCause

HELPER = """
import os, pathlib, signal, sys
tries = pathlib.Path(sys.argv[1])
tries.write_text((tries.read_text() if tries.exists() else "") + sys.stdin.read())
if len(tries.read_text()) <= int(sys.argv[2]):
    os.kill(os.getpid(), int(sys.argv[3]))
"""


@pytest.mark.parametrize(
    ("times", "by", "tries", "cause"),
    [
        (0, 9, 1, ExitCause.COMPLETED),
        (1, 9, 2, ExitCause.COMPLETED),
        (5, 9, 2, ExitCause.KILLED),
        (1, 11, 1, ExitCause.CRASHED),
    ],
    ids=["never killed", "killed once", "killed again and again", "crashed by itself"],
)
async def test_a_helper_that_is_killed_is_started_once_more_with_the_same_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int, by: int, tries: int, cause: ExitCause
) -> None:
    def command(_: str, *words: str) -> list[str]:
        return [sys.executable, "-c", HELPER, *words]

    monkeypatch.setattr(helper_process, "command", command)
    told = tmp_path / "tries"
    end = await run_helper(
        "a.module", tmp_path / "log", DEFAULT_LIMITS, 20.0, words=[str(told), str(times), str(by)], stdin=b"x"
    )
    assert (told.read_text(), end.exit.cause) == ("x" * tries, cause)
