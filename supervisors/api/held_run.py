"""The process of a run that a program has started; it lives no longer than somebody holds the other end of its stdin.

    stdin:  one line, the HeldOrder ─▶ locked ─▶ run_job ─▶ stdout: one line, the summary
            end of the stream ─▶ SIGINT to ourselves: a checkpoint, then the end ─▶ after limits.held_end_s: SIGKILL

Invariants
- The stream ends however its holder does: it lets go, is collected, or its process is killed. Nobody else inherits it.
- The last line of stdout is the summary. What goes wrong before there is one stands in it as ``error``.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from actors.host.open_files import check_enough_for
from configs.limits import DEFAULT_LIMITS
from configs.schema import JobConfig
from supervisors.machine.devices import find_devices
from supervisors.machine.logs import new_loop
from supervisors.machine.run_directory import RunLock
from supervisors.trees import run_job
from transport.errors import HeadraceError

_READ_BYTES = 1 << 16


class HeldOrder(msgspec.Struct, frozen=True):
    """An order says what to run; its directory has been made and checked by whoever gives it."""

    job: str
    """The job as JSON."""
    run_dir: str
    resume: bool = False


def run_held() -> None:
    """Be the process of a run; what ``main.py held`` calls."""
    order = msgspec.json.decode(_first_line(), type=HeldOrder)
    threading.Thread(target=_end_with_holder, name="holder", daemon=True).start()
    summary = _run(order)
    print(json.dumps(summary), flush=True)
    raise SystemExit(0 if summary.get("state") == "finished" else 1)


def _run(order: HeldOrder) -> Mapping[str, Any]:
    job, run_dir = JobConfig.model_validate_json(order.job), Path(order.run_dir)
    known = {"job": job.name, "steps": 0}
    try:
        check_enough_for(job.rollout.workers)
        devices = find_devices(None)
        with RunLock.take(run_dir), asyncio.Runner(loop_factory=new_loop) as runner:
            run = run_job(job, run_dir, resume=order.resume, control=None, on_progress=_said_elsewhere, devices=devices)
            return runner.run(run)
    except (KeyboardInterrupt, asyncio.CancelledError):
        return known | {"state": "interrupted"}
    except (HeadraceError, OSError) as error:
        return known | {"state": "failed", "error": f"{type(error).__name__}: {error}"}


def _said_elsewhere(progress: Mapping[str, Any]) -> None:
    """Whoever follows the run listens to its control socket."""


def _first_line() -> bytes:
    """Read from the descriptor itself: nothing may wait in a buffer when the stream is watched for its end."""
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(sys.stdin.fileno(), _READ_BYTES)
        if not part:
            raise SystemExit("headrace: this command is for programs that start runs; see docs/guides/python.md")
        line += part
    return line


def _end_with_holder() -> None:
    while os.read(0, _READ_BYTES):
        pass  # there is nothing more to be told
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait(DEFAULT_LIMITS.held_end_s)
    os.kill(os.getpid(), signal.SIGKILL)  # and its processes with it (``parent_death``)
