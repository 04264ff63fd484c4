"""The program's side of a run's process (``held_run.py``): starts it, holds it, learns how it ended, and lets go.

HeldProcess ─▶ exec ─▶ the run        pipe to its stdin: as long as it is open and nothing comes, the run is wanted
     └─ collected, released, or the program ends ─▶ a word, pipe closed ─▶ checkpoint, end
thread ── reads stdout to its end, reaps ─▶ ``ended``: the summary

A child that the program forks is not the holder: its copy of the pipe is closed, and nothing there ends the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import weakref
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Any, Final

import msgspec

from actors.host.helper_process import command, environment
from actors.weights.segments import remove_segments
from configs.limits import DEFAULT_LIMITS
from configs.run_files import LOGS
from supervisors.api.held_run import HeldOrder
from supervisors.machine.processes.file_end import whole_lines

Summary = dict[str, Any]
"""Last object that ``headrace run --json`` prints."""

_LET_GO: Final = b"end\n"


class _Line:
    """The holder's end of the pipe to a run."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    def say(self, data: bytes) -> None:
        assert self._descriptor is not None, "it has been let go of"
        with contextlib.suppress(BrokenPipeError):  # the run has ended already, and its log says why
            os.write(self._descriptor, data)

    def let_go(self) -> None:
        """Speak before closing: a copy of the pipe may stay open in a child that was forked below Python."""
        if self._descriptor is not None:
            self.say(_LET_GO)
            self.close()

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


_lines: Final[weakref.WeakSet[_Line]] = weakref.WeakSet()
_making = threading.Lock()
"""Lock that is held while a line is made, and while the program forks: a forked child knows each line that it has."""


def _new_line() -> tuple[int, _Line]:
    """The run's end of a new pipe, and ours."""
    with _making:
        theirs, ours = os.pipe()
        line = _Line(ours)
        _lines.add(line)
    return theirs, line


def _close_copies() -> None:
    global _making
    _making = threading.Lock()
    for line in _lines:
        line.close()


os.register_at_fork(
    before=lambda: _making.acquire(), after_in_parent=lambda: _making.release(), after_in_child=_close_copies
)


class HeldProcess:
    """A run that lives as long as this object, or until it is over. Its process leads a session of its own, so that an
    interrupt of a notebook's kernel, or Ctrl-C in a terminal, does not reach it.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(self, order: HeldOrder, folders: str | None) -> None:
        """``folders``: further ones from which the run can import modules, as in ``PYTHONPATH``."""
        self._log = Path(order.run_dir) / LOGS / "run.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self.ended: Future[Summary] = Future()
        """Future of the summary, set when the process is gone. Nobody can cancel it."""
        self.ended.set_running_or_notify_cancel()
        self._holder = order.holder
        theirs, line = _new_line()
        self._release = weakref.finalize(self, line.let_go)
        try:
            with self._log.open("ab") as log:
                self._popen = subprocess.Popen(
                    command("main", "held"),
                    stdin=theirs,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=environment(folders),
                    start_new_session=True,
                )
        except BaseException:
            self._release()
            raise
        finally:
            os.close(theirs)
        line.say(msgspec.json.encode(order) + b"\n")
        follow = (self._popen, self.ended, self._log, order)
        threading.Thread(target=_follow, args=follow, name="headrace-run", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def is_ours(self) -> bool:
        """Whether this process started the run, and not a program whose fork this process is."""
        return self._holder == os.getpid()

    def release(self) -> None:
        """Let go: the run takes its checkpoint and ends. Idempotent."""
        self._release()

    def kill(self) -> None:
        """End the run and all its processes at once."""
        self._release()
        self._popen.kill()


def _follow(popen: subprocess.Popen[bytes], ended: Future[Summary], log: Path, order: HeldOrder) -> None:
    """Wait for the end. No reference to the HeldProcess is kept here, so that it can be garbage-collected."""
    said: IO[bytes] | None = popen.stdout
    assert said is not None, "a pipe"
    with said:
        lines = said.read().splitlines()
    code = popen.wait()
    try:
        ended.set_result(json.loads(lines[-1]))
    except (ValueError, IndexError):
        ended.set_result(_without_summary(code, log, order))


def _without_summary(code: int, log: Path, order: HeldOrder) -> Summary:
    """The summary of a run that was killed, or could not begin."""
    job: Summary = json.loads(order.job)
    remove_segments(Path(order.run_dir))
    if code == -signal.SIGINT:
        return {"job": job["name"], "steps": 0, "state": "interrupted"}
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    last = whole_lines(log, 1, DEFAULT_LIMITS.error_text_chars)
    why = f"the process of the run ended with {how}{f': {last[-1]}' if last and code >= 0 else ''}"
    return {"job": job["name"], "state": "failed", "error": why}
