"""Segments as memory: mapped to be read, opened to be written, copied and hashed chunk by chunk on all cores.

    begin ─▶ <path>.partial, mapped ─ write ─▶ finish ─▶ <path>        whole under its final name, or not there at all
      ▲                                          │ beside further work
      └──── with its pages already there ◀─── prepare ─▶ <…>-spare

A fresh page of shared memory costs several times its copy: it is found, zeroed, entered in a page table. So a writer of
version after version prepares the next segment's pages while nobody waits. That takes no more memory than is taken at
the moment of a publication, before the oldest version retires. Of a run's pullers on one machine one fetches and the
others map its file: they share one spare, which the one that fetches takes. Small segments, and the first one, are
written through the file: the system then copies into pages that it neither zeroes nor enters anywhere, in half the
time.

Pages are always allocated before they are written through a mapping: full memory then raises OSError, instead of a
signal that ends the process.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Final

import numpy as np
import psutil
import xxhash

from actors.protocol.weights import Manifest
from actors.weights.manifest import chunk_bounds, chunk_is_intact
from actors.weights.segments import hold, open_ours

PARALLEL_BYTES: Final = 32 << 20
"""Size below which a second thread costs more than it gains, and no spare segment is kept."""
_THREADS_MAX: Final = 4
STEP_BYTES: Final = 16 << 20
"""Bytes entered into page tables in one step, during which Python holds its lock."""
_POPULATE_READ: Final = 22
_POPULATE_WRITE: Final = 23


def map_segment(path: Path, *, own: bool = False) -> memoryview:
    """The bytes of ``path``, read-only. The mapping goes with its last view. ``own``: mark the file as held by us.

    Raises:
        OSError, ValueError: the file cannot be opened, or is empty.
    """
    with open_ours(path, "rb") as file:
        if own:
            hold(file)
        return map_file(file)


def map_file(file: IO[bytes]) -> memoryview:
    """Map an open file, as ``map_segment`` does, whatever its name is by now."""
    return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def partial_path(path: Path) -> Path:
    """Path of a segment until it is whole."""
    return path.with_name(f"{path.name}.partial")


class SegmentWriter:
    """Writes one segment after another; calls come from one thread at a time, ``prepare`` may come from another."""

    def __init__(self) -> None:
        self._spare: tuple[Path, mmap.mmap] | None = None
        self._lock = threading.Lock()
        self._closed = False

    def begin(self, path: Path, size: int) -> tuple[mmap.mmap, bool]:
        """``<path>.partial``, mapped for writing, and whether it was left there by a writer that did not finish.

        Raises:
            OSError: there is no room for ``size`` bytes.
        """
        partial = partial_path(path)
        with contextlib.suppress(OSError):
            if partial.stat().st_size == size:
                return _writable(partial, size), True
        return self._take_spare(partial, size) or _take_anothers(path, size) or _writable(partial, size), False

    def write(self, path: Path, source: memoryview, chunk_bytes: int) -> tuple[bytes, ...]:
        """Copy ``source`` to ``path``; returns the xxh3-128 digests of its chunks, of what was read.

        Raises:
            OSError: there is no room for it.
        """
        partial = partial_path(path)
        memory = self._take_spare(partial, len(source))
        if memory is None:
            hashes = _write_and_hash(partial, source, chunk_bytes)
        else:
            with memoryview(memory) as place:
                hashes = copy_and_hash(source, place, chunk_bytes)
        self.finish(path)
        return hashes

    def _take_spare(self, partial: Path, size: int) -> mmap.mmap | None:
        with self._lock:
            if self._spare is None or len(self._spare[1]) != size or self._spare[0].parent != partial.parent:
                return None
            (spare, memory), self._spare = self._spare, None
            with contextlib.suppress(FileNotFoundError):  # its file was removed
                spare.rename(partial)
                return memory
        return None

    def finish(self, path: Path) -> None:
        """Give the segment that was begun for ``path`` its final name. Idempotent."""
        with contextlib.suppress(FileNotFoundError):
            partial_path(path).rename(path)

    def prepare(self, path: Path, size: int) -> None:
        """Make a spare segment of ``size`` bytes beside ``path``, with its pages ready, if there is room."""
        if size < PARALLEL_BYTES:
            return
        with self._lock, contextlib.suppress(OSError):
            if self._closed:
                return
            _remove_spares_of_the_dead(path)
            if self._spare is not None and len(self._spare[1]) != size:
                self._drop_spare()
            if any(_has_size(spare, size) for spare, _ in _spares(path)):
                return
            self._spare = None  # its file is gone, if there was one
            spare = path.with_name(f"{_spare_prefix(path)}{os.getpid()}-spare")
            try:
                memory = _writable(spare, size)
            except OSError:
                spare.unlink(missing_ok=True)
                return
            _populate(memory, size, _POPULATE_WRITE)
            self._spare = spare, memory

    def forget_taken(self) -> None:
        """Unmap the spare if a neighbour has taken it: its pages would stay for as long as we map them."""
        with self._lock:
            if self._spare is not None and not self._spare[0].exists():
                self._spare = None

    def close(self) -> None:
        """Give the spare back; later calls of ``prepare``, queued ones included, make none."""
        with self._lock:
            self._closed = True
            self._drop_spare()

    def _drop_spare(self) -> None:
        if self._spare is not None:
            self._spare[0].unlink(missing_ok=True)
            self._spare = None


def _spare_prefix(path: Path) -> str:
    """Prefix of the spares' names for such segments: a publisher has its own, a run's pullers share theirs."""
    segment, pulled, _ = path.name.partition("@")
    return f"{segment.rpartition('-v')[0] or segment}-{'pulled-' if pulled else ''}"


def _spares(path: Path) -> list[tuple[Path, int]]:
    """Spares for segments such as ``path``, each with the id of the process that made it."""
    prefix = _spare_prefix(path)
    found = [(spare, spare.name[len(prefix) : -len("-spare")]) for spare in path.parent.glob(f"{prefix}*-spare")]
    return [(spare, int(pid)) for spare, pid in found if pid.isdecimal()]


def publishers_spare(segment: Path) -> Path | None:
    """The spare that the publisher of ``segment`` has ready for its next one, if that is as large."""
    with contextlib.suppress(OSError):
        size = segment.stat().st_size
        return next((spare for spare, _ in _spares(segment) if _has_size(spare, size)), None)
    return None


def _has_size(spare: Path, size: int) -> bool:
    with contextlib.suppress(OSError):
        return spare.stat().st_size == size
    return False


def _remove_spares_of_the_dead(path: Path) -> None:
    """Remove spares of killed processes, each as large as a segment. One removed by mistake is made anew."""
    for spare, pid in _spares(path):
        if not psutil.pid_exists(pid):
            spare.unlink(missing_ok=True)


def _take_anothers(path: Path, size: int) -> mmap.mmap | None:
    """Take another puller's spare on this machine: its pages need only be entered, in half the time of new ones."""
    partial = partial_path(path)
    for spare, _ in _spares(path) if "@" in path.name else ():
        with contextlib.suppress(FileNotFoundError):  # another puller was quicker
            if _has_size(spare, size):
                spare.rename(partial)
                return _writable(partial, size)
    return None


def _writable(path: Path, size: int) -> mmap.mmap:
    with open_ours(path, "a+b") as file:
        hold(file)
        os.truncate(file.fileno(), size)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        return mmap.mmap(file.fileno(), size)


def _populate(memory: mmap.mmap, size: int, advice: int) -> None:
    with contextlib.suppress(OSError, ValueError):  # an older kernel: pages come one by one as they are touched
        for start in range(0, size, STEP_BYTES):
            memory.madvise(advice, start, min(STEP_BYTES, size - start))


def warm(view: memoryview, start: int, end: int) -> None:
    """Enter the pages of a part of a mapped segment into this process's table, all at once."""
    memory = view.obj
    if isinstance(memory, mmap.mmap) and start < end:
        start -= start % mmap.PAGESIZE
        with contextlib.suppress(OSError, ValueError):
            memory.madvise(_POPULATE_READ, start, end - start)


def warm_chunks(manifest: Manifest, view: memoryview, chunks: Sequence[int]) -> None:
    """``warm`` for all of ``chunks``, those that lie side by side together."""
    start = end = 0
    for index in chunks:
        first, last = chunk_bounds(manifest, index)
        if first != end:
            warm(view, start, end)
            start = first
        end = last
    warm(view, start, end)


def damaged_chunks(manifest: Manifest, view: memoryview, chunks: Iterable[int] | None = None) -> list[int]:
    """Numbers of those ``chunks`` (default: all) in a whole version's bytes that do not fit their hashes."""
    wanted = list(range(len(manifest.chunk_hashes)) if chunks is None else chunks)
    damaged: list[int] = []

    def check(index: int) -> None:
        start, end = chunk_bounds(manifest, index)
        warm(view, start, end)
        if not chunk_is_intact(manifest, index, view[start:end]):
            damaged.append(index)

    on_all_cores(check, wanted, manifest.total_bytes)
    return sorted(damaged)


def _write_and_hash(partial: Path, source: memoryview, chunk_bytes: int) -> tuple[bytes, ...]:
    """Write a new file and hash it, as ``copy_and_hash`` does; remove the file if it does not fit."""
    digests: list[bytes] = []
    try:
        with open_ours(partial, "wb") as file:
            for start in range(0, len(source), chunk_bytes):
                part = source[start : start + chunk_bytes]
                file.write(part)
                digests.append(xxhash.xxh3_128_digest(part))
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    return tuple(digests)


def copy_and_hash(source: memoryview, place: memoryview, chunk_bytes: int) -> tuple[bytes, ...]:
    """Copy ``source`` to ``place``; returns the xxh3-128 digests of its chunks, of what was read, not written."""
    digests: list[bytes] = [b""] * -(-len(source) // chunk_bytes)

    def move(index: int) -> None:
        part = slice(index * chunk_bytes, (index + 1) * chunk_bytes)
        copy(source[part], place[part])
        digests[index] = xxhash.xxh3_128_digest(source[part])

    on_all_cores(move, list(range(len(digests))), len(source))
    return tuple(digests)


def copy(source: memoryview | np.ndarray, place: memoryview) -> None:
    """Copy bytes with numpy, which lets other threads run meanwhile; a memoryview would keep Python's lock."""
    np.copyto(np.frombuffer(place, np.uint8), np.frombuffer(source, np.uint8))


def on_all_cores(work: Callable[[int], None], items: list[int], size: int) -> None:
    """Call ``work`` for every item, of ``size`` bytes in total; its long parts must release Python's lock."""
    threads = min(_THREADS_MAX, os.cpu_count() or 1) if size >= PARALLEL_BYTES else 1
    if threads == 1:
        for item in items:
            work(item)
        return

    def share(first: int) -> None:
        for item in items[first::threads]:
            work(item)

    with ThreadPoolExecutor(threads, thread_name_prefix="weights") as pool:
        list(pool.map(share, range(threads)))
