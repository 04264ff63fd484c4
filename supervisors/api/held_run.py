"""The process of a run that a program has started; it ends when that program lets go of it, or ends.

    stdin:  one line, the HeldOrder ─▶ locked ─▶ run_head ─▶ stdout: one line, the summary
            a further word, the end of the stream, or another parent
                ─▶ SIGINT to ourselves: a checkpoint, then the end ─▶ after limits.held_end_s: SIGKILL

Invariants
- The holder lets go by a word, since whatever the program has forked may keep the stream open; its death is another
  parent of ours.
- The last line of stdout is the summary. If the run fails before it has one, ``error`` says why.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from actors.core.strict_json import strict_json
from actors.host.open_files import check_enough_for
from configs.limits import DEFAULT_LIMITS
from configs.schema import JobConfig
from supervisors.machine.devices import find_devices
from supervisors.machine.processes.logs import new_loop
from supervisors.machine.run_directory import RunLock
from supervisors.trees import run_head
from transport.errors import HeadraceError

_READ_BYTES = 1 << 16
_LOOK_S: Final = 0.5
"""Pause between looks at whether the holder lives."""


class HeldOrder(msgspec.Struct, frozen=True):
    """Says what to run; whoever sends the order has made and checked the directory."""

    job: str
    """The job as JSON."""
    run_dir: str
    resume: bool = False
    holder: int = msgspec.field(default_factory=os.getpid)
    """Process id of the program that starts the run."""


def run_held() -> None:
    """Run as the process of a run; ``main.py held`` calls this."""
    order = msgspec.json.decode(_first_line(), type=HeldOrder)
    threading.Thread(target=end_with_holder, args=[order.holder], name="holder", daemon=True).start()
    summary = _run(order)
    print(strict_json(summary), flush=True)
    raise SystemExit(0 if summary.get("state") == "finished" else 1)


def _run(order: HeldOrder) -> Mapping[str, Any]:
    job, run_dir = JobConfig.model_validate_json(order.job), Path(order.run_dir)
    known = {"job": job.name, "steps": 0}
    try:
        check_enough_for(job.rollout.workers)
        devices = find_devices(None)
        with RunLock.take(run_dir), asyncio.Runner(loop_factory=new_loop) as runner:
            run = run_head(run_dir, {run_dir: job}, resume=order.resume, on_progress=_said_elsewhere, devices=devices)
            return runner.run(run)[job.name]
    except (KeyboardInterrupt, asyncio.CancelledError):
        return known | {"state": "interrupted"}
    except (HeadraceError, OSError) as error:
        return known | {"state": "failed", "error": f"{type(error).__name__}: {error}"}


def _said_elsewhere(progress: Mapping[str, Any]) -> None:
    """Ignore progress: followers of the run listen to its control socket."""


def _first_line() -> bytes:
    """Read from the descriptor itself: nothing may wait in a buffer when the stream is watched for its end."""
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(sys.stdin.fileno(), _READ_BYTES)
        if not part:
            raise SystemExit("headrace: this command is for programs that start runs; see docs/guides/python.md")
        line += part
    return line


def end_with_holder(holder: int) -> None:
    """Interrupt this process once its ``holder``, which is its parent, lets go or is gone; later kill it."""
    while os.getppid() == holder and not select.select([0], [], [], _LOOK_S)[0]:
        pass
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait(DEFAULT_LIMITS.held_end_s)
    os.kill(os.getpid(), signal.SIGKILL)  # its processes end with it (``parent_death``)
