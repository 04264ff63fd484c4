"""Segments in memory: written whole with or without a spare one, and what is not needed is given back."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash

from actors.weights import memory
from actors.weights.holding import mapped_holding
from actors.weights.memory import SegmentWriter
from actors.weights.messages import Manifest

NO_PID = 1 << 30
"""More than any kernel gives."""


def test_a_spare_segment_of_a_writer_that_is_dead_is_removed_and_that_of_a_living_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "PARALLEL_BYTES", 1)
    for name in (f"headrace-ab-{NO_PID}-spare", f"headrace-ab-{os.getppid()}-spare", f"headrace-cd-{NO_PID}-spare"):
        (tmp_path / name).touch()
    writer = SegmentWriter()
    writer.prepare(tmp_path / "headrace-ab-v3@rollout-v2-0", 4096)
    ours, theirs = f"headrace-ab-{os.getpid()}-spare", f"headrace-ab-{os.getppid()}-spare"
    assert {file.name for file in tmp_path.iterdir()} == {ours, theirs, f"headrace-cd-{NO_PID}-spare"}
    writer.close()
    assert not (tmp_path / ours).exists()


@pytest.mark.parametrize("spare", [False, True], ids=["through the file", "into the spare"])
def test_what_is_written_is_there_under_its_final_name_and_hashed_chunk_by_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spare: bool
) -> None:
    monkeypatch.setattr(memory, "PARALLEL_BYTES", 1)
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
