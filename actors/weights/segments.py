"""Segment files: a version's bytes in shared memory, named so that a run can find and remove its own.

    /dev/shm/headrace-<id>/                     0700, made by us; <id> is random, a run's own (RUN_DIR/memory.id, 0600)
        headrace-<id>-v7  …-v7.manifest  …-v7.partial  …-spare  …-v7@rollout-0

Shared memory is open to all users of a machine, who could place a link or a file of theirs where ours will be. So all
files of a run lie in a directory that nobody else can enter, whose name nobody can guess; a directory that is a link
or another user's is refused, and files are opened only if they are ours and no links.

A publisher writes ``<path>.partial`` and renames it, so that a file with the final name is always whole. The weight
server keeps the manifest beside it (``<path>.manifest``), so that the next server can go on with what it held.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import re
import secrets
import stat
import tempfile
from collections.abc import Iterable
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import IO, Final, NamedTuple

import msgspec

from actors.host.whole_file import replacing, write_once
from actors.protocol.weights import Manifest
from configs.run_files import MEMORY_ID

SITE_VARIABLE: Final = "HEADRACE_SITE"
"""Set by ``headrace node --site`` for itself and its processes."""


class Host(NamedTuple):
    """Identifies a machine for the transfer of weights."""

    name: str
    memory: Path
    """Directory of the machine's shared memory."""
    site: str = ""
    """Site of the machine, as ``own_site`` names it."""


SIMULATED_HOST: ContextVar[Host | None] = ContextVar("SIMULATED_HOST", default=None)
"""Machine on which a simulated process believes to run. None: this one."""

_ID_BYTES: Final = 16
_ID: Final = re.compile(r"[0-9a-f]{32}")
_ID_OF_DIRECTORY: Final = re.compile(r"headrace-[0-9a-f]{32}")
_ID_OF_NAME: Final = re.compile(r"headrace-([0-9a-f]+)-v\d+")

UNREADABLE: Final = (OSError, msgspec.DecodeError, ValueError, RecursionError)
"""Errors of reading a manifest file: it is gone, is no manifest, no UTF-8, or nested too deeply."""


def segment_directory() -> Path:
    """Shared memory where the system has it, else the temporary directory."""
    if (simulated := SIMULATED_HOST.get()) is not None:
        return simulated.memory
    shared = Path("/dev/shm")  # noqa: S108 (shared memory itself; what is ours lies in a private directory there)
    return shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def run_id(run_dir: Path) -> str:
    """The id of a run's memory, the same in each of its processes and lives; drawn at random when first asked for.

    Raises:
        OSError: the run directory cannot be written.
    """
    if (known := known_run_id(run_dir)) is not None:
        return known
    return keep_run_id(run_dir, secrets.token_hex(_ID_BYTES))


def known_run_id(run_dir: Path) -> str | None:
    """The id of a run's memory, None if none was drawn. In simulations nothing is drawn: ``simulated_id``."""
    if SIMULATED_HOST.get() is not None:
        return simulated_id(run_dir)
    with contextlib.suppress(OSError):
        text = (run_dir / MEMORY_ID).read_text("ascii", "replace").strip()
        if _ID.fullmatch(text):
            return text
    return None


def keep_run_id(run_dir: Path, own: str) -> str:
    """Keep ``own`` as the id of this run's memory unless one is kept; returns the kept one. Nodes get it from the head.

    Raises:
        OSError: the run directory cannot be written.
    """
    if (known := known_run_id(run_dir)) is not None:
        return known
    run_dir.mkdir(parents=True, exist_ok=True)
    if not write_once(run_dir / MEMORY_ID, own + "\n") and known_run_id(run_dir) is None:  # the file holds no id
        (run_dir / MEMORY_ID).unlink(missing_ok=True)
        write_once(run_dir / MEMORY_ID, own + "\n")
    return known_run_id(run_dir) or own


def path_id(run_dir: Path) -> str:
    """Id that follows from a run's path, by which older versions named their files, some of which may be left."""
    return hashlib.blake2b(str(run_dir.absolute()).encode(), digest_size=6).hexdigest()


def simulated_id(run_dir: Path) -> str:
    """The id of a simulated run's memory. It is sent in messages, so it must be the same for equal seeds.

    It follows from the job's name alone, since a simulation keeps its files in another place each time.
    """
    return hashlib.blake2b(run_dir.name.encode(), digest_size=6).hexdigest()


def memory_of(run: str) -> Path:
    """Directory for files of the run with the id ``run`` on this machine; it may not exist."""
    directory = segment_directory()
    return directory if SIMULATED_HOST.get() is not None else directory / f"headrace-{run}"


def file_in_memory(run_dir: Path, name: str) -> Path:
    """Path of this run's own file called ``name`` in shared memory, in a directory that exists.

    Raises:
        OSError: the directory cannot be made, or is not ours alone.
    """
    run = run_id(run_dir)
    return _memory(run) / f"headrace-{run}-{name}"


def files_in_memory(run_dir: Path, pattern: str) -> list[Path]:
    """This run's files whose names, as ``file_in_memory`` has them, match ``pattern``."""
    return sorted(_files(run_dir, f"-{pattern}"))


def _memory(run: str) -> Path:
    """``memory_of``, made if it is missing. A simulated machine's memory is private as a whole."""
    return memory_of(run) if SIMULATED_HOST.get() is not None else private_directory(memory_of(run))


def private_directory(directory: Path) -> Path:
    """Make ``directory``, for its owner only, if it is not there.

    Raises:
        OSError: it cannot be made, or is not ours alone.
    """
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(f"{directory} is a link, another user's, or open to others: it is not used")
    return directory


def open_ours(path: Path, mode: str) -> IO[bytes]:
    """Open a file of shared memory, unless it is a link. A new file is made for its owner only.

    Raises:
        OSError: it cannot be opened, is no file, or is another user's.
    """
    if "r" not in mode and _ID_OF_DIRECTORY.fullmatch(path.parent.name):
        private_directory(path.parent)  # it may have been removed when it was empty
    file = open(path, mode, opener=_unfollowed)  # noqa: SIM115  it is handed out
    found = os.fstat(file.fileno())
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        file.close()
        raise PermissionError(f"{path} is no file of ours: it is not used")
    return file


def _unfollowed(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)


def segment_path(run_dir: Path, policy_version: int) -> Path:
    """Path of a version's segment, in a directory that exists.

    Raises:
        OSError: the directory cannot be made, or is not ours alone.
    """
    run = run_id(run_dir)
    return _memory(run) / f"headrace-{run}-v{policy_version}"


def manifest_path(segment: Path) -> Path:
    return segment.with_name(segment.name + ".manifest")


def write_manifest(segment: Path, manifest: Manifest) -> None:
    with replacing(manifest_path(segment)) as partial, open_ours(partial, "wb") as file:
        file.write(msgspec.msgpack.encode(manifest))


def read_manifests(run_dir: Path, holder: str = "") -> list[tuple[Path, Manifest]]:
    """Segments of this run that a former server had adopted, oldest version first; unreadable ones are left out.

    ``holder``: the rank beside which that server served its share; empty: it was the weight server.
    """
    found: list[tuple[Path, Manifest]] = []
    for path in _files(run_dir, "-v*.manifest"):
        segment = path.with_name(path.name.removesuffix(".manifest"))
        if segment.name.partition("@")[2] != holder:
            continue
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


def bytes_in_memory(run_dir: Path) -> int:
    """Bytes of this run's files in this machine's shared memory."""
    total = 0
    for path in _files(run_dir, "-*"):
        with contextlib.suppress(FileNotFoundError):  # retired meanwhile
            total += min(path.stat().st_size, path.stat().st_blocks * 512)  # a share has holes
    return total


def remove_segments(run_dir: Path) -> int:
    """Remove everything that this run left in shared memory; returns how many files."""
    removed = 0
    for path in [*_files(run_dir, "-*"), *segment_directory().glob(f"headrace-{path_id(run_dir)}-*")]:
        with contextlib.suppress(PermissionError):  # another user's file of that name
            path.unlink(missing_ok=True)
            removed += 1
    _leave(run_dir)
    return removed


def _files(run_dir: Path, pattern: str) -> list[Path]:
    """Files of this run; none if it never had any."""
    run = known_run_id(run_dir)
    return [] if run is None else list(memory_of(run).glob(f"headrace-{run}{pattern}"))


def _leave(run_dir: Path) -> None:
    """Remove the run's directory if nothing is in it."""
    run = known_run_id(run_dir)
    if run is not None and SIMULATED_HOST.get() is None:
        with contextlib.suppress(OSError):
            memory_of(run).rmdir()


def held_path(segment: Path, holder: str) -> Path:
    """Path at which each life of the puller ``holder`` on this machine keeps what it pulls of ``segment``.

    ``segment`` may lie on another machine: its name says to which run it belongs.

    Raises:
        OSError: ``segment`` has no segment's name, or the run's directory cannot be made or is not ours alone.
    """
    name = _ID_OF_NAME.match(segment.name)
    if name is None:
        raise PermissionError(f"{segment.name!r} is not the name of a segment")
    return _memory(name[1]) / f"{segment.name}@{holder}"


def hold(file: IO[bytes]) -> None:
    """Mark ``file`` as held for as long as it, or a mapping of it, is open in this process."""
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)


def _is_held(path: Path) -> bool:
    """Whether a living process holds the file. Not in simulations, whose killed actors may not be collected yet."""
    if SIMULATED_HOST.get() is not None:
        return False
    try:
        with open_ours(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def remove_held_by(run_dir: Path, holders: Iterable[str], pid: int) -> int:
    """Remove this run's files of dead pullers called ``holders``, and spares of the process ``pid``; returns how many.

    Files that a living process holds stay: a puller of the same name may run here in the dead one's place.
    """
    ends = tuple(f"@{holder}" for holder in holders)
    removed = 0
    for path in _files(run_dir, "-*"):
        name = path.name.removesuffix(".partial").removesuffix(".manifest")
        if name.endswith(f"-{pid}-spare") or (name.endswith(ends) and not _is_held(path)):
            path.unlink(missing_ok=True)
            removed += 1
    _leave(run_dir)
    return removed


def own_site() -> str:
    """Name of this machine's site, whose machines share a fast network. Empty: the head's site."""
    simulated = SIMULATED_HOST.get()
    return os.environ.get(SITE_VARIABLE, "") if simulated is None else simulated.site


def host_id() -> str:
    """Id of this machine's memory: two processes with equal ids may map each other's segments.

    It is made of the host's name, the kernel's boot id and the device of shared memory's file system. So containers of
    one machine that have a /dev/shm each have different ids, even if they share its network and its name.
    """
    simulated = SIMULATED_HOST.get()
    return _own_host_id() if simulated is None else simulated.name


@cache
def _own_host_id() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    return (
        f"{platform.node()}/{boot.read_text().strip() if boot.exists() else ''}/{segment_directory().stat().st_dev:x}"
    )
