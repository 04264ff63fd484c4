"""Segment files: a version's bytes in shared memory, named so that a run can find and remove its own.

A publisher writes ``<path>.partial`` and renames it, so that a file with the final name is always whole. The weight
server keeps the manifest beside it (``<path>.manifest``) and can so be killed and go on with what it held.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import tempfile
from collections.abc import Iterable
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import IO, Final, NamedTuple

import msgspec

from actors.protocol.weights import Manifest

SITE_VARIABLE: Final = "HEADRACE_SITE"
"""Set by ``headrace node --site`` for itself and its processes."""


class Host(NamedTuple):
    """Names a machine, as far as weights are concerned."""

    name: str
    memory: Path
    """Directory of its shared memory."""
    site: str = ""
    """Site of the machine, as ``own_site`` names it."""


SIMULATED_HOST: ContextVar[Host | None] = ContextVar("SIMULATED_HOST", default=None)
"""Where simulations say on which machine a process believes to be. None: on this one."""

UNREADABLE: Final = (OSError, msgspec.DecodeError, ValueError, RecursionError)
"""Errors of a file with a manifest: gone, none, with text that is no UTF-8, nested without end."""


def segment_directory() -> Path:
    """Shared memory where the system has it, else the temporary directory."""
    if (simulated := SIMULATED_HOST.get()) is not None:
        return simulated.memory
    shared = Path("/dev/shm")  # noqa: S108 (shared memory itself; names are per run and files hold public weights)
    return shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def run_id(run_dir: Path) -> str:
    """Short name of a run, the same in each of its processes, on machines with other links too."""
    return hashlib.blake2b(str(run_dir.absolute()).encode(), digest_size=6).hexdigest()


def segment_path(run_dir: Path, policy_version: int) -> Path:
    return segment_directory() / f"headrace-{run_id(run_dir)}-v{policy_version}"


def manifest_path(segment: Path) -> Path:
    return segment.with_name(segment.name + ".manifest")


def write_manifest(segment: Path, manifest: Manifest) -> None:
    partial = segment.with_name(segment.name + ".manifest.partial")
    partial.write_bytes(msgspec.msgpack.encode(manifest))
    partial.rename(manifest_path(segment))


def read_manifests(run_dir: Path) -> list[tuple[Path, Manifest]]:
    """Segments of this run that a former server had adopted, oldest version first; unreadable ones are left out."""
    found: list[tuple[Path, Manifest]] = []
    for path in segment_directory().glob(f"headrace-{run_id(run_dir)}-v*.manifest"):
        segment = path.with_suffix("")
        try:
            manifest = msgspec.msgpack.decode(path.read_bytes(), type=Manifest)
            whole = segment.stat().st_size == manifest.total_bytes
        except UNREADABLE:
            continue
        if whole:
            found.append((segment, manifest))
    return sorted(found, key=lambda pair: pair[1].policy_version)


def remove_segment(segment: Path) -> None:
    segment.unlink(missing_ok=True)
    manifest_path(segment).unlink(missing_ok=True)


def remove_segments(run_dir: Path) -> int:
    """Remove everything that this run left in shared memory; returns how many files."""
    paths = list(segment_directory().glob(f"headrace-{run_id(run_dir)}-*"))
    for path in paths:
        path.unlink(missing_ok=True)
    return len(paths)


def held_path(segment: Path, holder: str) -> Path:
    """Where the puller called ``holder`` keeps what it pulls of ``segment``; each of its lives on this machine."""
    return segment_directory() / f"{segment.name}@{holder}"


def hold(file: IO[bytes]) -> None:
    """Mark ``file`` as somebody's for as long as it, or a mapping of it, is open in this process."""
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)


def _is_held(path: Path) -> bool:
    """Whether a living process holds it. In simulations nobody is one, and the killed may not be collected yet."""
    if SIMULATED_HOST.get() is not None:
        return False
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def remove_held_by(run_dir: Path, holders: Iterable[str], pid: int) -> int:
    """Remove what dead pullers called ``holders`` have of this run, and the process ``pid`` of spare; how many files.

    What a living process holds stays: one of the same name may run here in the dead one's place.
    """
    ends = tuple(f"@{holder}" for holder in holders)
    removed = 0
    for path in segment_directory().glob(f"headrace-{run_id(run_dir)}-*"):
        name = path.name.removesuffix(".partial")
        if name.endswith(f"-{pid}-spare") or (name.endswith(ends) and not _is_held(path)):
            path.unlink(missing_ok=True)
            removed += 1
    return removed


def own_site() -> str:
    """Where this machine stands, by name: those of one site share a fast network. Empty: where the head is."""
    simulated = SIMULATED_HOST.get()
    return os.environ.get(SITE_VARIABLE, "") if simulated is None else simulated.site


def host_id() -> str:
    """Names this machine's memory: two processes with equal ids may map each other's segments."""
    simulated = SIMULATED_HOST.get()
    return _own_host_id() if simulated is None else simulated.name


@cache
def _own_host_id() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{platform.node()}/{boot.read_text().strip() if boot.exists() else ''}"
