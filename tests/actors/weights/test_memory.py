"""Segments in memory: written whole with or without a spare one, and what is not needed is given back."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import xxhash

from actors.protocol.weights import Manifest
from actors.weights import memory
from actors.weights.errors import NoRoom
from actors.weights.holding import mapped_holding, open_holding
from actors.weights.manifest import hash_chunks, layout
from actors.weights.memory import SegmentWriter

NO_PID = 1 << 30
"""More than any kernel gives."""


PULLED = "headrace-ab-v3@rollout-0"
"""A segment as a puller writes it; the publisher's have no ``@``."""


@pytest.fixture(autouse=True)
def small_segments_have_spares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "PARALLEL_BYTES", 1)


def neighbours_spare(directory: Path, size: int) -> Path:
    """Of a puller that lives: who runs the tests."""
    spare = directory / f"headrace-ab-pulled-{os.getppid()}-spare"
    spare.write_bytes(bytes(size))
    return spare


def mapped_files(directory: Path) -> set[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {Path(line.split(maxsplit=5)[5]).name for line in lines if str(directory) in line}


def test_a_spare_segment_of_a_writer_that_is_dead_is_removed_and_that_of_a_living_one_stays(tmp_path: Path) -> None:
    dead, other_run = f"headrace-ab-pulled-{NO_PID}-spare", f"headrace-cd-pulled-{NO_PID}-spare"
    publishers = f"headrace-ab-{NO_PID}-spare"
    for name in (dead, other_run, publishers):
        (tmp_path / name).touch()
    theirs = neighbours_spare(tmp_path, 0).name
    writer = SegmentWriter()
    writer.prepare(tmp_path / PULLED, 4096)
    ours = f"headrace-ab-pulled-{os.getpid()}-spare"
    assert {file.name for file in tmp_path.iterdir()} == {ours, theirs, other_run, publishers}
    writer.close()
    assert not (tmp_path / ours).exists()


def test_whoever_fetches_first_takes_the_spare_that_a_neighbour_has_prepared(tmp_path: Path) -> None:
    spare = neighbours_spare(tmp_path, 4096)
    pages = spare.stat().st_ino
    mapped, resumed = SegmentWriter().begin(tmp_path / PULLED, 4096)
    assert (len(mapped), resumed) == (4096, False)
    assert (tmp_path / f"{PULLED}.partial").stat().st_ino == pages
    assert not spare.exists()


@pytest.mark.parametrize("size", [4096, 8192], ids=["of this size", "of another size"])
def test_the_pullers_of_a_run_keep_one_spare_on_a_machine_of_the_size_that_they_need(tmp_path: Path, size: int) -> None:
    theirs = neighbours_spare(tmp_path, 4096)
    writer = SegmentWriter()
    writer.prepare(tmp_path / PULLED, size)
    spares = {file.name: file.stat().st_size for file in tmp_path.iterdir()}
    ours = {} if size == 4096 else {f"headrace-ab-pulled-{os.getpid()}-spare": size}
    assert spares == {theirs.name: 4096, **ours}
    mapped, _ = writer.begin(tmp_path / PULLED, size)
    assert len(mapped) == size


def test_a_publisher_and_pullers_do_not_take_each_others_spares(tmp_path: Path) -> None:
    """A publisher without one writes through the file, which is faster than to enter another's pages."""
    spare = neighbours_spare(tmp_path, 4096)
    publisher = SegmentWriter()
    publisher.write(tmp_path / "headrace-ab-v3", memoryview(bytes(4096)), 4096)
    assert spare.exists()
    publisher.prepare(tmp_path / "headrace-ab-v3", 8192)
    SegmentWriter().begin(tmp_path / PULLED, 8192)
    assert (tmp_path / f"headrace-ab-{os.getpid()}-spare").exists()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="mappings are listed in /proc")
def test_a_spare_that_a_neighbour_has_taken_is_unmapped_and_another_one_stays(tmp_path: Path) -> None:
    writer, taken = SegmentWriter(), "headrace-ab-v4@rollout-1.partial"
    writer.prepare(tmp_path / PULLED, 4096)
    own = tmp_path / f"headrace-ab-pulled-{os.getpid()}-spare"
    writer.forget_taken()
    assert mapped_files(tmp_path) == {own.name}
    own.rename(tmp_path / taken)
    assert mapped_files(tmp_path) == {taken}
    writer.forget_taken()
    assert mapped_files(tmp_path) == set()
    writer.prepare(tmp_path / PULLED, 4096)
    assert own.exists()


@pytest.mark.parametrize("spare", [False, True], ids=["through the file", "into the spare"])
def test_what_is_written_is_there_under_its_final_name_and_hashed_chunk_by_chunk(tmp_path: Path, spare: bool) -> None:
    data, writer = os.urandom(10_000), SegmentWriter()
    if spare:
        writer.prepare(tmp_path / "headrace-ab-v0", len(data))
    hashes = writer.write(tmp_path / "headrace-ab-v1", memoryview(data), 4096)
    assert hashes == tuple(xxhash.xxh3_128_digest(data[start : start + 4096]) for start in (0, 4096, 8192))
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {"headrace-ab-v1": data}


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process may grow beyond 6,000 bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_of_a_segment_that_does_not_fit_nothing_stays(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="too large"), full_disk():
        SegmentWriter().write(tmp_path / "headrace-ab-v1", memoryview(bytes(10_000)), 4096)
    assert not list(tmp_path.iterdir())


def test_memory_that_is_full_now_is_told_with_place_need_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(SegmentWriter, "begin", full)
    entries, total = layout([("a", "float32", (64,))])
    manifest = Manifest(
        job="j",
        policy_version=3,
        parent=2,
        total_bytes=total,
        chunk_bytes=total,
        chunk_hashes=hash_chunks(bytes(total), total),
        tensors=entries,
    )
    with pytest.raises(NoRoom, match=r"version 3 of the weights needs 256 bytes at .*, where .* are free: make room"):
        open_holding(manifest, tmp_path / PULLED, SegmentWriter(), first=True)


def test_a_whole_file_that_an_earlier_life_has_left_is_ours_and_has_its_name(tmp_path: Path) -> None:
    """Neighbours that wait for the file need not wait for anything else to happen to it."""
    data, path = os.urandom(10_000), tmp_path / "headrace-ab-v1@rollout-0"
    hashes = SegmentWriter().write(path, memoryview(data), 4096)
    manifest = Manifest(
        job="j", policy_version=1, parent=0, total_bytes=len(data), chunk_bytes=4096, chunk_hashes=hashes, tensors=()
    )
    holding = mapped_holding(manifest, path, own=True)
    assert holding is not None and holding.whole and holding.own and holding.named
    holding.release()
    assert not path.exists()


def test_a_writer_that_is_closed_prepares_nothing_more(tmp_path: Path) -> None:
    """The preparation may have been queued on its owner's thread before; nobody would give that spare back."""
    writer = SegmentWriter()
    writer.close()
    writer.prepare(tmp_path / PULLED, 4096)
    assert not list(tmp_path.iterdir())
