"""A child process never outlives its parent, however the parent ends.

On Linux the kernel sends SIGKILL to the child when the thread that started it ends (PR_SET_PDEATHSIG), so the parent
must start its children from a thread that lives as long as it does: the loop's. Elsewhere a thread looks at the
parent id twice a second. A parent that died before this call is noticed by comparing its id with the expected one.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from typing import Final

PARENT_PID_VARIABLE: Final = "HEADRACE_PARENT_PID"
_PR_SET_PDEATHSIG: Final = 1
_POLL_S: Final = 0.5


def die_with_parent(parent_pid: int | None = None) -> None:
    """Bind this process's life to its parent's. Call it first thing; helpers that a role starts may call it too.

    Args:
        parent_pid: who must be the parent; default: what the environment names, else whoever it is now.
    """
    if parent_pid is None:
        parent_pid = int(os.environ.get(PARENT_PID_VARIABLE) or os.getppid())
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    else:
        threading.Thread(target=_poll_parent, args=(parent_pid,), name="fate", daemon=True).start()
    if os.getppid() != parent_pid:
        _end()


def _poll_parent(parent_pid: int) -> None:
    pause = threading.Event()
    while os.getppid() == parent_pid:
        pause.wait(_POLL_S)
    _end()


def _end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
