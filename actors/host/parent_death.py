"""A child process never outlives its parent, however the parent ends; nor do processes that a group's leader started.

    parent ──▶ guard ──▶ leader ──▶ whatever it starts          leader and what it starts: one process group
      └ ends ────▶│         └ ends ──▶ guard ──▶ SIGKILL to the group
                  └──▶ SIGKILL to the group

A process that leaves the group (a server that begins its own session, say) and loses its parent becomes the guard's
child on Linux (PR_SET_CHILD_SUBREAPER), and is killed after the group.

On Linux the kernel sends SIGKILL to the child when the thread that started it ends (PR_SET_PDEATHSIG), so the parent
must start its children from a thread that lives as long as it does: the loop's. On other systems a thread looks at the
parent id twice a second. A parent that died before this call is noticed by comparing its id with the expected one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Final, NoReturn

PARENT_PID_VARIABLE: Final = "HEADRACE_PARENT_PID"
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_SWEEPS_MAX: Final = 100
"""Number of times that a guard looks for adopted processes; each look finds those that the last one has orphaned."""
_POLL_S: Final = 0.5
_GROUP_ENDS: Final = (signal.SIGTERM, signal.SIGCHLD)
"""Signals that the guard of a group waits for: a request to end the group, or the end of its leader."""


def die_with_parent(parent_pid: int | None = None) -> None:
    """Bind this process's life to its parent's. Call it first of all; helpers that a role starts may call it too.

    Args:
        parent_pid: process id that the parent must have; default: the one in the environment, else the present one.
    """
    if parent_pid is None:
        parent_pid = int(os.environ.get(PARENT_PID_VARIABLE) or os.getppid())
    _when_parent_ends(parent_pid, signal.SIGKILL)
    if os.getppid() != parent_pid:
        _end()


def lead_group(parent_pid: int) -> None:
    """Return in a child that leads a process group of its own, which ends as soon as that child or ``parent_pid`` does.

    This process stays behind as the group's guard. It must have no threads yet, since the child would lack them.
    SIGTERM to it ends the group; once nothing of the group is left, it exits as the child did (128 + n for signal n).
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _GROUP_ENDS)
    guard = os.getpid()
    if sys.platform == "linux":
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    leader = os.fork()
    if leader > 0:
        _guard(leader, parent_pid)
    os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _GROUP_ENDS)
    die_with_parent(guard)


def _guard(leader: int, parent_pid: int) -> NoReturn:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # both set it, so neither acts before it is set
        os.setpgid(leader, leader)
    for inherited in range(3):
        os.close(inherited)  # readers of the leader's output must see its end
    _when_parent_ends(parent_pid, signal.SIGTERM)
    while os.getppid() == parent_pid and not _has_ended(leader):
        if signal.sigwait(_GROUP_ENDS) is signal.SIGTERM:
            break
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)  # not reaped yet: its id cannot be another group's
    code = os.waitstatus_to_exitcode(os.waitpid(leader, 0)[1])
    _kill_adopted()
    os._exit(code if code >= 0 else 128 - code)


def _has_ended(leader: int) -> bool:
    """Whether ``leader`` waits to be reaped; reaps others. SIGCHLD also comes for stopped and adopted children."""
    while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
        if ended.si_pid == leader:
            return True
        os.waitpid(ended.si_pid, 0)
    return False


def _kill_adopted() -> None:
    """Kill adopted processes until none is left: each one that dies may leave this process its own children."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    for _ in range(_SWEEPS_MAX):
        try:
            adopted = [int(pid) for pid in children.read_text().split()]
        except OSError:  # another system, or one that does not tell
            return
        if not adopted:
            return
        for pid in adopted:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for pid in adopted:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _when_parent_ends(parent_pid: int, number: signal.Signals) -> None:
    """Have ``number`` sent to this process when its parent ends. A parent that ended before is not noticed."""
    if sys.platform == "linux":
        _prctl(_PR_SET_PDEATHSIG, number)
    else:
        threading.Thread(target=_poll_parent, args=(parent_pid, number), name="parent-death", daemon=True).start()


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def _poll_parent(parent_pid: int, number: signal.Signals) -> None:
    pause = threading.Event()
    while os.getppid() == parent_pid:
        pause.wait(_POLL_S)
    os.kill(os.getpid(), number)


def _end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
