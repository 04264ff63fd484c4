"""A program's end of a run's process (``held_run.py``): it starts it, holds it, hears how it ended, and lets go.

HeldProcess ─▶ exec ─▶ the run        pipe to its stdin: as long as it is open, the run is wanted
     └─ collected, released, or the program ends ─▶ pipe closed ─▶ checkpoint, end
thread ── reads stdout to its end, reaps ─▶ ``ended``: the summary
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Any, Final

import msgspec

from actors.host.python_path import python_path
from actors.weights.segments import remove_segments
from configs.limits import DEFAULT_LIMITS
from supervisors.api.held_run import HeldOrder
from supervisors.machine.file_end import whole_lines

_COMMAND: Final = ("-P", "-m", "main", "held")

Summary = dict[str, Any]
"""What ``headrace run --json`` ends with."""


class HeldProcess:
    """A held process is a run that lives as long as this object, or until it is over. It leads a session of its own, so
    that an interrupt of a notebook's kernel, or Ctrl-C in a terminal, is not for it.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, order: HeldOrder, folder: str | None) -> None:
        """``folder``: a further one in which modules are found."""
        self._log = Path(order.run_dir) / "logs" / "run.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self.ended: Future[Summary] = Future()
        """Future of the summary, set when the process is gone. Nobody can cancel it."""
        self.ended.set_running_or_notify_cancel()
        path = os.pathsep.join(filter(None, [python_path(), folder]))
        theirs, ours = os.pipe()
        self._release = weakref.finalize(self, os.close, ours)
        try:
            with self._log.open("ab") as log:
                self._popen = subprocess.Popen(
                    [sys.executable, *_COMMAND],
                    stdin=theirs,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env={**os.environ, "PYTHONPATH": path},
                    start_new_session=True,
                )
        except BaseException:
            self._release()
            raise
        finally:
            os.close(theirs)
        with contextlib.suppress(BrokenPipeError):  # it has ended already, and its log says why
            os.write(ours, msgspec.json.encode(order) + b"\n")
        follow = (self._popen, self.ended, self._log, order)
        threading.Thread(target=_follow, args=follow, name="headrace-run", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._popen.pid

    def release(self) -> None:
        """Let go: the run takes its checkpoint and ends. Idempotent."""
        self._release()

    def kill(self) -> None:
        """End it and all its processes at once."""
        self._release()
        self._popen.kill()


def _follow(popen: subprocess.Popen[bytes], ended: Future[Summary], log: Path, order: HeldOrder) -> None:
    """It knows nothing of the object that holds the process, which is to be collected."""
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
    """It was killed, or could not begin."""
    job: Summary = json.loads(order.job)
    remove_segments(Path(order.run_dir))
    if code == -signal.SIGINT:
        return {"job": job["name"], "steps": 0, "state": "interrupted"}
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    last = whole_lines(log, 1, DEFAULT_LIMITS.error_text_chars)
    why = f"the process of the run ended with {how}{f': {last[-1]}' if last and code >= 0 else ''}"
    return {"job": job["name"], "state": "failed", "error": why}
