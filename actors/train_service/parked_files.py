"""Files that stored copies lie in, in shared memory and on disk, and how many bytes they take.

    shared memory   /dev/shm/headrace-<id>/headrace-<id>-parked-<job>-<random>      a part; 0600, the directory 0700
                                           headrace-<id>-parked-<job>.manifest      names the parts of a whole copy
    disk            DIRECTORY/parked/parked-<job>-<random>, …                       the same

    make ─▶ part, mapped ─ written, hashed ─▶ commit (manifest renamed into its place) ─▶ a copy that a next life finds

<id> is the service's own, drawn at random and kept in its directory (``segments.run_id``); <job> is a digest of the
job's name. What no manifest names is half-written, or of an older copy: ``open`` removes it. One process has the
directory at a time, by a lock that ends with the process.

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
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, Literal

import xxhash

from actors.train_service.parked_manifest import ManifestPart, ParkedManifest, decode, encode
from actors.train_service.residency_errors import DirectoryInUse
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
"""One hash covers that many bytes: what stays in a core's cache between being copied and being hashed."""
_DISK: Final = "parked"
_LOCK: Final = "parked.lock"
_MANIFEST: Final = ".manifest"


@dataclass(slots=True, eq=False)
class PartFile:
    """Holds one part's file, mapped when it is first looked into."""

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
        """Bytes that it takes: whole pages."""
        return -(-self.size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


@dataclass(frozen=True, slots=True)
class StoredCopy:
    """Holds a whole copy of a job's state; its files all lie in one tier."""

    manifest: ParkedManifest
    tier: Tier
    files: dict[str, PartFile]

    @property
    def taken_bytes(self) -> int:
        return sum(file.taken_bytes for file in self.files.values())

    def part(self, name: str) -> StoredPart:
        """A part, to be restored from.

        Raises:
            ParkedStateDamaged: its file is gone.
        """
        (described,) = (part for part in self.manifest.parts if part.name == name)
        try:
            memory = self.files[name].memory
        except (OSError, ValueError) as error:
            raise ParkedStateDamaged(f"parked state of job {self.manifest.job!r}: {error}") from error
        return StoredPart(
            blocks=described.blocks, memory=memory, hashes=described.hashes, chunk_bytes=self.manifest.chunk_bytes
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
        """Take the directory, and over what is whole of what earlier lives left; the rest is removed.

        Raises:
            DirectoryInUse: another process has it.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        private_directory(self._directory / _DISK)
        if SIMULATED_HOST.get() is None:  # there the dead may not be collected yet
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
        """A whole copy; None: it is not."""
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
        """The part of a new file's name that is no other file's; a simulation, where nothing is random, has its own."""
        return secrets.token_hex(8)

    def make(self, tier: Tier, job: str, size_bytes: int) -> PartFile:
        """A new file, all of its pages allocated.

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
        """Let a file go; nobody copies to or from it any more."""
        file.path.unlink(missing_ok=True)
        file.mapped = None
        self.used_bytes[file.tier] -= file.taken_bytes

    def commit(self, manifest: ParkedManifest, tier: Tier, files: dict[str, PartFile]) -> StoredCopy:
        """Make a whole copy of what has been written, in the place of the job's older one in this tier.

        Raises:
            OSError: there is no room for the manifest; the older copy is as it was.
        """
        path = self._manifest(manifest.job, tier)
        partial = path.with_name(f"{path.name}-{self.fresh_name()}")
        try:
            with open_ours(partial, "xb") as file:
                file.write(encode(manifest))
            partial.rename(path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        return StoredCopy(manifest, tier, files)

    def forget(self, copy: StoredCopy, *, but: Iterable[PartFile] = ()) -> None:
        """Remove a copy's files and its manifest, unless that is another copy's by now. ``but``: files that stay."""
        self.withdraw(copy)
        kept = set(map(id, but))
        for file in copy.files.values():
            if id(file) not in kept:
                self.remove(file)

    def withdraw(self, copy: StoredCopy) -> None:
        """Remove the manifest: no next life finds this copy. Its files stay."""
        path = self._manifest(copy.manifest.job, copy.tier)
        with contextlib.suppress(OSError, ParkedStateDamaged):
            if decode(path.read_bytes()).generation == copy.manifest.generation:
                path.unlink(missing_ok=True)

    def moved(self, copy: StoredCopy, tier: Tier) -> StoredCopy:
        """The same copy in another tier, every byte checked on its way; the old one stays. The caller looks for room.

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
            return self.commit(described_by(copy.manifest, made), tier, made)
        except BaseException:
            for file in made.values():
                self.remove(file)
            raise


def described_by(
    manifest: ParkedManifest, files: dict[str, PartFile], parts: Iterable[ManifestPart] | None = None
) -> ParkedManifest:
    """The next generation of ``manifest``, in other files."""
    return ParkedManifest(
        job=manifest.job,
        fingerprint=manifest.fingerprint,
        steps=manifest.steps,
        generation=manifest.generation + 1,
        chunk_bytes=manifest.chunk_bytes,
        parts=tuple(
            ManifestPart(name=part.name, file=files[part.name].path.name, blocks=part.blocks, hashes=part.hashes)
            for part in (manifest.parts if parts is None else parts)
        ),
    )


def _copied(stored: StoredPart, place: memoryview) -> tuple[bytes, ...]:
    """Copy the blocks of a part; the digests of what was read."""
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
    """The digests of what is stored now."""
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
    """Stands for a job in names of files: a job's own name may hold what a file's may not."""
    return hashlib.blake2b(job.encode(), digest_size=8).hexdigest()


def remove_parked(directory: Path) -> int:
    """Remove everything that lives of a service have left in shared memory and on disk; how many files.

    For whoever owns the service, when no process of it runs: when it is removed, when the head ends, at the next start.
    """
    disk = directory / _DISK
    count = len(list(disk.iterdir())) if disk.is_dir() and not disk.is_symlink() else 0
    shutil.rmtree(disk, ignore_errors=True)
    return count + remove_segments(directory)
