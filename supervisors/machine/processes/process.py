"""One child process: started by exec, its exit seen at once, stopped with a deadline.

Invariants
- Never fork without exec: contexts, IO threads and CUDA do not survive it.
- The child leads its own process group. When it ends, what is left of the group is killed *before* the child is
  reaped, so the group id cannot have been reused.
- The exit is seen through a pidfd on the loop (a waiting thread where there is none); nobody polls.
- ``stop`` ends within its deadline plus ``kill_timeout_s``: a process that the kernel does not let go by then, stuck in
  a driver or a dead disk, is reported as gone and left to the kernel.
- The spec reaches the child as its stdin, from an unnamed file: no size limit, nothing in the process table.

    launch ─ exec ─▶ running ─ SIGTERM ─ deadline ─ SIGKILL ─▶ zombie ─ pidfd ─▶ group killed, reaped, ``exited`` set

A child that may stay when its work is over (``tenancy``) reports that work's end as its exit, and waits for other work:

    running ─ its work is over ─▶ ``exited`` set, ``stays`` ─ serve(other work) ─▶ running, as another Child
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import structlog

from actors.core.reason import Reason
from actors.host.helper_process import command
from actors.host.parent_death import PARENT_PID_VARIABLE
from configs.limits import DEFAULT_LIMITS
from configs.python_path import python_path
from supervisors.machine.membership import tenancy
from supervisors.machine.processes import exit_note
from supervisors.machine.processes.process_log import open_log
from supervisors.tree.restart_budget import ExitCause

log = structlog.get_logger("headrace.process")

EXIT_OK: Final = 0
EXIT_CRASHED: Final = 70
"""A hosted actor crashed (sysexits.h: internal software error)."""
EXIT_START_FAILED: Final = 71
"""The process never became ready."""
EXIT_PREEMPTED: Final = 75
"""The machine goes away, or what the process needs has gone, by no fault of its own (sysexits.h: temporary failure)."""

OWN_FAULTS: Final = frozenset(
    {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS}
)
"""Signals that a process brings upon itself; any other signal comes from somebody else."""


def role_command() -> list[str]:
    """The command line of a role process."""
    return command("main", "actor")


def head_command() -> list[str]:
    """The command line of the head's process."""
    return command("main", "lead")


@dataclass(frozen=True)
class Launch:
    """A process to start."""

    command: Sequence[str]
    log_path: Path
    """File that receives stdout and stderr."""
    stdin: bytes = b""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    """Variables that are added to our own environment."""
    may_stay: bool = False
    """True if the process may stay when its work is over, and be given other work."""
    devices: tuple[str, ...] | None = None
    """Devices that the process is to see; None: all of its machine's."""
    inherited: tuple[int, ...] = ()
    """Descriptors of ours that the process gets, with the same numbers."""


@dataclass(frozen=True)
class ProcessExit:
    """How a process ended. ``code`` is -n when signal n ended it."""

    pid: int
    code: int
    cause: ExitCause
    reason: Reason | None = None
    """Error that the process has named as the cause of its end; None if it named none."""

    def __str__(self) -> str:
        how = f"exit code {self.code}" if self.code >= 0 else f"signal {_signal_name(-self.code)}"
        why = f": {self.reason}" if self.reason is not None else ""
        return f"{self.cause}: process {self.pid} ended with {how}{why}"


def exit_cause(code: int, *, asked: ExitCause | None) -> ExitCause:
    """What an exit code means.

    Args:
        code: as of ``subprocess``: negative for a signal.
        asked: why we had asked it to stop; None if we had not. A SIGTERM that is not ours is a preemption: batch
            systems and cloud agents announce it so.
    """
    if asked is not None:
        return asked
    if code == EXIT_OK:
        return ExitCause.COMPLETED
    if code in (-signal.SIGTERM, 128 + signal.SIGTERM, EXIT_PREEMPTED):
        return ExitCause.PREEMPTED
    if code < 0 and -code not in OWN_FAULTS:
        return ExitCause.KILLED
    return ExitCause.CRASHED


class Child(ABC):
    """A process that we have started, real or simulated. ``exited`` is set once, when it is gone."""

    def __init__(self, pid: int, loop: asyncio.AbstractEventLoop) -> None:
        self.pid = pid
        self.exited: asyncio.Future[ProcessExit] = loop.create_future()
        self._asked: ExitCause | None = None

    @abstractmethod
    def send_signal(self, number: int) -> None:
        """Signal the child alone, as an outsider would. If the child is gone, nothing happens."""

    @abstractmethod
    def _signal_group(self, number: int) -> None:
        """Signal the child and whatever it has started."""

    @property
    def running(self) -> bool:
        return not self.exited.done()

    @property
    def stays(self) -> bool:
        """Whether its work is over, and it waits for other work."""
        return False

    def serve(self, spec: Launch) -> Child | None:
        """Give a process that stays other work; None: it cannot take the work, and is to be dismissed."""
        return None

    def dismiss(self) -> None:
        """End a process that stays."""
        self._signal_group(signal.SIGKILL)

    async def reaped(self) -> None:
        """Wait until a dismissed process is gone."""
        await self.gone()

    def kill(self, cause: ExitCause = ExitCause.KILLED) -> None:
        """SIGKILL to the whole group; the exit is reported as ``cause``."""
        if self.running:
            self._asked = self._asked or cause
            self._signal_group(signal.SIGKILL)

    async def wait(self, timeout_s: float) -> ProcessExit:
        """Wait for the exit.

        Raises:
            TimeoutError: it still runs after ``timeout_s``.
        """
        async with asyncio.timeout(timeout_s):
            return await asyncio.shield(self.exited)

    async def gone(self, timeout_s: float = DEFAULT_LIMITS.kill_timeout_s) -> ProcessExit:
        """Wait for the exit after a kill; a process that outlasts ``timeout_s`` is given up, and said to be gone."""
        try:
            return await self.wait(timeout_s)
        except TimeoutError:
            log.error("the kernel does not let a killed process go; it is left behind", pid=self.pid)
            self._ended(-signal.SIGKILL)
            return self.exited.result()

    async def stop(self, deadline_s: float, cause: ExitCause = ExitCause.STOPPED) -> ProcessExit:
        """SIGTERM, then SIGKILL after ``deadline_s``; returns once it is gone."""
        if self.running:
            self._asked = self._asked or cause
            self.send_signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                return await self.wait(deadline_s)
            self._signal_group(signal.SIGKILL)
        return await self.gone()

    def _ended(self, code: int) -> None:
        if not self.exited.done():
            cause = exit_cause(code, asked=self._asked)
            self.exited.set_result(ProcessExit(self.pid, code, cause, self._last_words()))

    def _last_words(self) -> Reason | None:
        """The error that it has named as its end. Called once, when it is gone."""
        return None


class ChildProcess(Child):
    """A process of the operating system. Create it with ``launch`` on the loop's thread."""

    def __init__(
        self,
        popen: subprocess.Popen[bytes],
        loop: asyncio.AbstractEventLoop,
        note: int,
        ends: tenancy.LauncherEnds | None = None,
    ) -> None:
        """``note``: our end of its exit note's pipe. ``ends``: our ends of the pipes of a process that may stay."""
        super().__init__(popen.pid, loop)
        self._popen = popen
        self._note: int | None = note
        self._ends = ends
        self._loop = loop
        self._pidfd: int | None = None
        self._reaped = asyncio.Event()
        self._see_exit()
        if ends is not None:
            loop.add_reader(ends.news, self._on_news)

    def send_signal(self, number: int) -> None:
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _see_exit(self) -> None:
        if hasattr(os, "pidfd_open"):
            self._pidfd = os.pidfd_open(self.pid)
            self._loop.add_reader(self._pidfd, self._on_exit)
        else:
            threading.Thread(target=self._wait_in_thread, name=f"wait-{self.pid}", daemon=True).start()

    def _wait_in_thread(self) -> None:
        self._popen.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(self._on_exit)

    def _on_exit(self) -> None:
        self._look_no_more()
        if self._ends is not None:
            self._loop.remove_reader(self._ends.news)
            self._ends.close()
            self._ends = None
        self._signal_group(signal.SIGKILL)
        self._ended(self._popen.wait())
        self._last_words()  # closes the pipe of a process that stayed
        self._reaped.set()

    def _look_no_more(self) -> None:
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None

    # ------------------------------------------------------------ one that stays

    def _on_news(self) -> None:
        """Report the end of its work as the exit of this child."""
        assert self._ends is not None, "the reader goes with the pipe"
        self._loop.remove_reader(self._ends.news)
        code = self._ends.parked()
        if code is not None and not self.exited.done():
            self.exited.set_result(ProcessExit(self.pid, code, exit_cause(code, asked=self._asked)))

    @property
    def stays(self) -> bool:
        return self.exited.done() and self._ends is not None

    def serve(self, spec: Launch) -> Child | None:
        ends, note = self._ends, self._note
        if not self.stays or ends is None or note is None or _is_over(self.pid):
            return None
        if not ends.send(tenancy.Order(spec.stdin, str(spec.log_path))):
            return None
        self._look_no_more()
        self._ends = self._note = None
        return ChildProcess(self._popen, self._loop, note, ends)

    def dismiss(self) -> None:
        if self.stays:
            self._signal_group(signal.SIGKILL)

    async def reaped(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DEFAULT_LIMITS.kill_timeout_s):
                await self._reaped.wait()

    def _last_words(self) -> Reason | None:
        note, self._note = self._note, None
        return None if note is None else exit_note.read_note(note)

    def _signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


def launch(spec: Launch) -> ChildProcess:
    """Start a process. Call it on the thread of the running loop: when that ends, the child ends (``parent_death``).

    Raises:
        OSError: the executable cannot be started or the log cannot be opened.
    """
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as ours:
        log = open_log(spec.log_path)
        ours.callback(os.close, log)
        note, childs_note = exit_note.make_pipe()
        ours.callback(os.close, childs_note)
        with contextlib.ExitStack() as failed:
            failed.callback(os.close, note)
            stdin = ours.enter_context(tempfile.TemporaryFile())
            stdin.write(spec.stdin)
            stdin.seek(0)
            environment = {**_environment(spec.env), exit_note.VARIABLE: str(childs_note)}
            inherited, ends = (childs_note, *spec.inherited), None
            if spec.may_stay:
                ends, childs_ends = tenancy.make_pipes()
                failed.callback(ends.close)
                for end in childs_ends:
                    ours.callback(os.close, end)
                inherited += childs_ends
                environment[tenancy.VARIABLE] = ",".join(map(str, childs_ends))
            popen = subprocess.Popen(
                list(spec.command), stdin=stdin, stdout=log, stderr=log, env=environment, process_group=0,
                pass_fds=inherited,
            )  # fmt: skip
            failed.pop_all()
    return ChildProcess(popen, loop, note, ends)


def is_stopped_by_signal(pid: int) -> bool:
    """Whether the operating system shows the process in SIGSTOP's state. False when it is gone."""
    if sys.platform == "linux":
        try:
            return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1] == b"T"
        except (FileNotFoundError, ProcessLookupError):
            return False
    import psutil  # 30 ms that a role process on Linux need not spend

    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False


def _is_over(pid: int) -> bool:
    """Whether our child has ended, even if its end has not been handled yet; this does not reap it."""
    if not hasattr(os, "waitid"):
        return False
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _environment(added: Mapping[str, str]) -> dict[str, str]:
    """Our environment, with a path to our own code first and the working directory last (jobs name functions there)."""
    own = {
        "PYTHONPATH": python_path(),
        "PYTHONUNBUFFERED": "1",
        PARENT_PID_VARIABLE: str(os.getpid()),
    }
    return {**os.environ, **own, **added}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
