"""One part of a check: a process that is ended at its limit with all that it has started, and what it made of it.

command ──▶ process ──▶ a file with all that it says ──▶ its result
              └─ over its limit: it and its descendants are killed, and it has failed
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Final, Literal

import psutil

from benchmarks._processes import ROOT

Outcome = Literal["passed", "failed", "skipped"]

_GONE_S: Final = 10.0
"""How long killed processes may take to be gone; on a device they give its memory back first."""
_TAIL_LINES: Final = 25


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one part."""

    outcome: Outcome
    figures: dict[str, object] = field(default_factory=dict[str, object])
    why: str = ""
    """What failed, or why it was skipped."""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Ended:
    """A process that was run."""

    code: int | None
    """None: it was ended at its limit."""
    seconds: float
    out: str
    err: str

    @property
    def tail(self) -> str:
        """The last lines that it said."""
        said = self.err.rstrip() or self.out.rstrip()
        return "\n".join(said.splitlines()[-_TAIL_LINES:])


def run(command: Sequence[str], directory: Path, environment: dict[str, str], limit_s: float) -> Ended:
    """Run ``command`` in the repository's root; what it says is kept in ``directory``.

    Files, and no pipes: a process that outlives its parent would keep a pipe open, and its reader waiting.
    """
    directory.mkdir(parents=True, exist_ok=True)
    out, err = directory / "stdout", directory / "stderr"
    began = perf_counter()
    with out.open("wb") as out_file, err.open("wb") as err_file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=out_file, stderr=err_file,
            start_new_session=True,
        )  # fmt: skip
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.returncode is None:
                _kill(process)
    read = [file.read_text(encoding="utf-8", errors="replace") for file in (out, err)]
    return Ended(code, perf_counter() - began, *read)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill ``process`` and all that it has started, also what has a session of its own."""
    top = psutil.Process(process.pid)
    for victim in [top, *top.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()
    try:
        process.wait(_GONE_S)
    except subprocess.TimeoutExpired:
        print(f"process {process.pid} does not end: the driver may hold it", file=sys.stderr)
