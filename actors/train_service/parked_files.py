"""The files of stored copies, in shared memory and on disk, and the bytes that they take.

    shared memory   /dev/shm/headrace-<id>/headrace-<id>-parked-<job>-<random>      a part; 0600, the directory 0700
                                           headrace-<id>-parked-<job>.manifest      names the parts of a whole copy
    disk            DIRECTORY/parked/parked-<job>-<random>, …                       the same

    make ─▶ part, mapped ─ written, hashed ─▶ commit (manifest renamed into its place) ─▶ a copy that a next life finds

<id> is the service's own, drawn at random and kept in its directory (``segments.run_id``); <job> is a digest of the
job's name. Files that no manifest names are half-written, or of an older copy: ``open`` removes them. One process has
the directory at a time, by a lock that ends with the process.

A file's pages are allocated before they are written, so that full memory is an error and not a signal.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, Literal

import msgspec
import xxhash

from actors.host.whole_file import replacing
from actors.train_service.errors import DirectoryInUse
from actors.train_service.parked_manifest import ParkedManifest, decode, encode
from actors.trainer.errors import ParkedStateDamaged
from actors.trainer.parking import StoredPart
from actors.weights.memory import copy_and_hash, on_all_cores
from actors.weights.segments import (
    SIMULATED_HOST,
    file_in_memory,
    files_in_memory,
    open_ours,
    private_directory,
    remove_segments,
)

Tier = Literal["host", "disk"]
TIERS: Final[tuple[Tier, Tier]] = ("host", "disk")
CHUNK_BYTES: Final = 4 << 20
"""Bytes that one hash covers: few enough to stay in a core's cache between being copied and being hashed."""
_DISK: Final = "parked"
_LOCK: Final = "parked.lock"
_MANIFEST: Final = ".manifest"


@dataclass(slots=True, eq=False)
class PartFile:
    """Describes one part's file, which is mapped on first use."""

    path: Path
    tier: Tier
    size_bytes: int
    mapped: memoryview | None = None

    @property
    def memory(self) -> memoryview:
        """The part's bytes, writable.

        Raises:
            OSError, ValueError: the file is gone, or has another size.
        """
        if self.mapped is None:
            with open_ours(self.path, "r+b") as file:
                self.mapped = memoryview(mmap.mmap(file.fileno(), self.size_bytes))
        return self.mapped

    @property
    def taken_bytes(self) -> int:
        """Bytes that the file takes: whole pages."""
        return -(-self.size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


@dataclass(frozen=True, slots=True)
class StoredCopy:
    """Describes a complete copy of a job's state, whose files all lie in one tier."""

    manifest: ParkedManifest
    tier: Tier
    files: dict[str, PartFile]

    @property
    def taken_bytes(self) -> int:
        return sum(file.taken_bytes for file in self.files.values())

    def part(self, name: str) -> StoredPart:
        """The part ``name``, to restore from.

        Raises:
            ParkedStateDamaged: its file is gone, or has another size.
        """
        (described,) = (part for part in self.manifest.parts if part.name == name)
        try:
            memory = self.files[name].memory
        except (OSError, ValueError) as error:
            raise ParkedStateDamaged(f"parked state of job {self.manifest.job!r}: {error}") from error
        return StoredPart(
            blocks=described.blocks,
            memory=memory,
            hashes=described.hashes,
            chunk_bytes=self.manifest.chunk_bytes,
            path=self.files[name].path,
        )

    def parts(self) -> dict[str, StoredPart]:
        return {name: self.part(name) for name in self.files}


class ParkedFiles:
    """Makes, describes and removes the files of one service. Calls come from one thread at a time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock: IO[bytes] | None = None
        self.used_bytes: dict[Tier, int] = {"host": 0, "disk": 0}

    def open(self) -> dict[str, StoredCopy]:
        """Lock the directory; returns the complete copies of earlier lives, by job. All other files are removed.

        Raises:
            DirectoryInUse: another process has it.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        private_directory(self._directory / _DISK)
        if SIMULATED_HOST.get() is None:  # in a simulation a dead life's lock may still be open
            self._lock = open_ours(file_in_memory(self._directory, _LOCK), "ab")
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                self.close()
                raise DirectoryInUse(
                    f"{self._directory}: another process of this service has not ended; start it again when it has"
                ) from error
        return self._recover()

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _recover(self) -> dict[str, StoredCopy]:
        copies: dict[str, StoredCopy] = {}
        for tier in TIERS:
            for path in self._found(tier, f"parked-*{_MANIFEST}"):
                copy = self._read(path, tier)
                if copy is None:
                    continue
                known = copies.get(copy.manifest.job)
                if known is None or known.manifest.generation < copy.manifest.generation:
                    copies[copy.manifest.job] = copy
        named = {file.path for copy in copies.values() for file in copy.files.values()}
        named |= {self._manifest(copy.manifest.job, copy.tier) for copy in copies.values()}
        for tier in TIERS:
            for path in self._found(tier, "parked-*"):
                if path not in named:
                    path.unlink(missing_ok=True)
        for copy in copies.values():
            self.used_bytes[copy.tier] += copy.taken_bytes
        return copies

    def _read(self, path: Path, tier: Tier) -> StoredCopy | None:
        """The copy that the manifest at ``path`` describes; None: it is not complete."""
        try:
            with open_ours(path, "rb") as file:
                manifest = decode(file.read())
            files = {part.name: PartFile(path.with_name(part.file), tier, part.size_bytes) for part in manifest.parts}
            whole = all(file.path.lstat().st_size == file.size_bytes for file in files.values())
        except (OSError, ParkedStateDamaged):
            return None
        ours = path == self._manifest(manifest.job, tier)
        return StoredCopy(manifest, tier, files) if whole and ours else None

    def _found(self, tier: Tier, pattern: str) -> list[Path]:
        if tier == "host":
            return [path for path in files_in_memory(self._directory, pattern) if not path.name.endswith(_LOCK)]
        return sorted((self._directory / _DISK).glob(pattern))

    def _path(self, tier: Tier, name: str) -> Path:
        return file_in_memory(self._directory, name) if tier == "host" else self._directory / _DISK / name

    def _manifest(self, job: str, tier: Tier) -> Path:
        return self._path(tier, f"parked-{_tag(job)}{_MANIFEST}")

    # ------------------------------------------------------------ one file, one copy

    def fresh_name(self) -> str:
        """The unique part of a new file's name; simulations, where nothing is random, override this."""
        return secrets.token_hex(8)

    def make(self, tier: Tier, job: str, size_bytes: int) -> PartFile:
        """Make a new file with all of its pages allocated.

        Raises:
            OSError: there is no room.
        """
        file = PartFile(self._path(tier, f"parked-{_tag(job)}-{self.fresh_name()}"), tier, size_bytes)
        try:
            with open_ours(file.path, "x+b") as opened:
                os.truncate(opened.fileno(), size_bytes)
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(opened.fileno(), 0, size_bytes)
                file.mapped = memoryview(mmap.mmap(opened.fileno(), size_bytes))
        except OSError:
            file.path.unlink(missing_ok=True)
            raise
        self.used_bytes[tier] += file.taken_bytes
        return file

    def remove(self, file: PartFile) -> None:
        """Remove a file that nobody copies to or from any more."""
        file.path.unlink(missing_ok=True)
        file.mapped = None
        self.used_bytes[file.tier] -= file.taken_bytes

    def commit(self, manifest: ParkedManifest, tier: Tier, files: dict[str, PartFile]) -> StoredCopy:
        """Make a complete copy of the files that were written; it replaces the job's older one in this tier.

        Raises:
            OSError: there is no room for the manifest; the older copy is as it was.
        """
        with replacing(self._manifest(manifest.job, tier)) as partial, open_ours(partial, "wb") as file:
            file.write(encode(manifest))
        return StoredCopy(manifest, tier, files)

    def forget(self, copy: StoredCopy) -> None:
        """Remove a copy's files, and its manifest unless that describes another copy by now."""
        self.withdraw(copy)
        for file in copy.files.values():
            self.remove(file)

    def withdraw(self, copy: StoredCopy) -> None:
        """Remove the manifest, so that no next life finds this copy. Its files stay."""
        path = self._manifest(copy.manifest.job, copy.tier)
        with contextlib.suppress(OSError, ParkedStateDamaged):
            if decode(path.read_bytes()).generation == copy.manifest.generation:
                path.unlink(missing_ok=True)

    def moved(self, copy: StoredCopy, tier: Tier) -> StoredCopy:
        """Copy ``copy`` to another tier, checking every byte; the old one stays. The caller makes sure of room.

        Raises:
            OSError: there is no room; nothing was changed.
            ParkedStateDamaged: a byte does not fit its hash; nothing was changed.
        """
        made: dict[str, PartFile] = {}
        try:
            for name, stored in copy.parts().items():
                made[name] = self.make(tier, copy.manifest.job, copy.files[name].size_bytes)
                if _copied(stored, made[name].memory) != stored.hashes:
                    raise ParkedStateDamaged(f"parked state of job {copy.manifest.job!r} was altered: it is not used")
            return self.commit(_in_other_files(copy.manifest, made), tier, made)
        except BaseException:
            for file in made.values():
                self.remove(file)
            raise


def _in_other_files(manifest: ParkedManifest, files: dict[str, PartFile]) -> ParkedManifest:
    """The next generation of ``manifest``, with the names of ``files``."""
    parts = tuple(msgspec.structs.replace(part, file=files[part.name].path.name) for part in manifest.parts)
    return msgspec.structs.replace(manifest, generation=manifest.generation + 1, parts=parts)


def _copied(stored: StoredPart, place: memoryview) -> tuple[bytes, ...]:
    """Copy the blocks of a part to ``place``; returns the digests of the bytes that were read."""
    copied = (
        copy_and_hash(stored.block(block.name), place[block.offset_bytes :][: block.length_bytes], stored.chunk_bytes)
        for block in stored.blocks
    )
    return tuple(digest for of_block in copied for digest in of_block)


def is_intact(copy: StoredCopy) -> bool:
    """Whether every byte fits its hash."""
    try:
        return all(_digests(stored) == stored.hashes for stored in copy.parts().values())
    except ParkedStateDamaged:
        return False


def _digests(stored: StoredPart) -> tuple[bytes, ...]:
    chunks = [
        stored.block(block.name)[start : start + stored.chunk_bytes]
        for block in stored.blocks
        for start in range(0, block.length_bytes, stored.chunk_bytes)
    ]
    digests = [b""] * len(chunks)

    def digest(index: int) -> None:
        digests[index] = xxhash.xxh3_128_digest(chunks[index])

    on_all_cores(digest, list(range(len(chunks))), sum(map(len, chunks)))
    return tuple(digests)


def _tag(job: str) -> str:
    """A digest that stands for a job in file names, since a job's name may hold characters that they may not."""
    return hashlib.blake2b(job.encode(), digest_size=8).hexdigest()


def remove_parked(directory: Path) -> int:
    """Remove all files of a service in shared memory and on disk; returns their number.

    For the service's owner, while no process of it runs: when it is removed, when the head ends, at the next start.
    """
    disk = directory / _DISK
    count = len(list(disk.iterdir())) if disk.is_dir() and not disk.is_symlink() else 0
    shutil.rmtree(disk, ignore_errors=True)
    return count + remove_segments(directory)
