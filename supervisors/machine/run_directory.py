"""A run directory belongs to one run: made for it alone, and locked for as long as it lives.

    new       mkdir, which fails if it exists ─▶ the next number           no two runs get the same one
    locked    flock on ``run.lock`` ─▶ its owner's process is written in it ─▶ … ─▶ emptied and let go
    refused   another process holds the lock, or the process that is written in it still lives

The system lets go of a lock with its process, however that ends, so nobody has to clean up. The record is for people,
and for one gap: of a head that serves many jobs (``headrace head``) the process that holds their locks may be killed
and started again by its machine process. The record names the latter: as long as it lives, the directory is taken.

Over NFS, locks work between machines where the server supports them (NFS 4, or 3 with lockd); mounted with ``nolock``
or ``local_lock`` they only keep this machine's processes apart.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
from itertools import count
from pathlib import Path
from typing import Any, Protocol, Self, cast

import psutil

from actors.host.room import no_space
from configs.limits import DEFAULT_LIMITS
from configs.run_files import RUN_LOCK
from supervisors.tree.errors import DirectoryInUse


def make_run_directory(root: Path, name: str) -> Path:
    """Make the directory of a new run: ``root/name``, or ``root/name-2`` and so on if that is taken.

    Raises:
        OSError: nothing can be made there.
    """
    root.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        made = root / (name if number == 1 else f"{name}-{number}")
        with contextlib.suppress(FileExistsError):
            made.mkdir()
            return made
    raise AssertionError("there is always a further number")


class DirectoryLock(Protocol):
    """Keeps others out of ``run_dir``."""

    run_dir: Path

    def release(self) -> None:
        """Let go of the lock. Idempotent."""
        ...


class RunLock:
    """Keeps others out of a run directory until ``release``, or the end of this process."""

    def __init__(self, run_dir: Path, descriptor: int) -> None:
        self.run_dir = run_dir
        self._descriptor = descriptor

    @classmethod
    def take(cls, run_dir: Path, owner_pid: int | None = None) -> Self:
        """Lock ``run_dir``, made if need be. ``owner_pid``: the process that starts this one again; default: none.

        Raises:
            DirectoryInUse: a run lives there; nothing was touched.
            NoSpaceLeft, OSError: the lock cannot be written.
        """
        run_dir.mkdir(parents=True, exist_ok=True)
        path, owner = run_dir / RUN_LOCK, owner_pid or os.getpid()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DirectoryInUse(_refusal(run_dir, _record(descriptor))) from None
            except OSError:
                pass  # a file system without locks: the record is all there is
            record = _record(descriptor)
            if _lives(record) and record.get("pid") != owner:
                raise DirectoryInUse(_refusal(run_dir, record))
            _write(descriptor, _of_process(owner))
        except OSError as error:
            os.close(descriptor)
            raise no_space(error, run_dir, "the run's lock") or error from error
        except BaseException:
            os.close(descriptor)
            raise
        return cls(run_dir, descriptor)

    def release(self) -> None:
        """Let go of the lock. Idempotent."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def has_owner(run_dir: Path) -> bool:
    """Whether the run in ``run_dir`` lives, as far as this machine can tell."""
    try:
        descriptor = os.open(run_dir / RUN_LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        return _lives(_record(descriptor))
    finally:
        os.close(descriptor)


def _of_process(pid: int) -> dict[str, Any]:
    try:
        born = psutil.Process(pid).create_time()
    except psutil.Error:
        born = 0.0
    return {"pid": pid, "host": platform.node(), "born": round(born, 2)}


def _write(descriptor: int, record: dict[str, Any]) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(record).encode() + b"\n", 0)


def _record(descriptor: int) -> dict[str, Any]:
    try:
        found: Any = json.loads(os.pread(descriptor, 4096, 0))
    except (OSError, ValueError):
        return {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def _lives(record: dict[str, Any]) -> bool:
    """Whether the process of a record is this machine's, and still the one that it names."""
    pid = record.get("pid")
    if not isinstance(pid, int) or record.get("host") != platform.node():
        return False
    try:
        process = psutil.Process(pid)
        apart_s = abs(process.create_time() - float(record.get("born", 0.0)))
        return process.status() != psutil.STATUS_ZOMBIE and apart_s < DEFAULT_LIMITS.birth_clock_s
    except (psutil.Error, OverflowError, ValueError, TypeError):
        return False


def _refusal(run_dir: Path, record: dict[str, Any]) -> str:
    pid, host = record.get("pid", "?"), record.get("host", "?")
    return (
        f"{run_dir} is in use by process {pid} on {host}: a run or a head goes on there; "
        "look at it with headrace ctl status, end it with Ctrl-C there, or choose another directory"
    )
