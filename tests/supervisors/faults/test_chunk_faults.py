"""A spoilt chunk is found by its hash, harms nobody who has mapped it before, and is mended."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from actors.protocol.weights import Manifest
from actors.weights import segments
from actors.weights.holding import mapped_holding
from actors.weights.manifest import hash_chunks, layout
from configs.fault_plan import ChunkTarget
from supervisors.faults.chunk_faults import mend_all, mend_chunk, spoil_chunk
from supervisors.tree.errors import FaultNotPossible

CHUNK = 64


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(segments, "segment_directory", lambda: tmp_path)
    return tmp_path / "run"


def publish(run_dir: Path, version: int) -> tuple[Path, Manifest]:
    entries, total = layout([("w", "float32", (100,))])
    data = np.full(total // 4, version + 0.5, "<f4").tobytes()
    segment = segments.segment_path(run_dir, version)
    segment.write_bytes(data)
    manifest = Manifest(
        job="j", policy_version=version, parent=-1, tensors=entries, total_bytes=total, chunk_bytes=CHUNK,
        chunk_hashes=hash_chunks(data, CHUNK),
    )  # fmt: skip
    segments.write_manifest(segment, manifest)
    return segment, manifest


def test_a_spoilt_chunk_is_never_mapped_and_the_mended_one_is(run_dir: Path) -> None:
    segment, manifest = publish(run_dir, 3)
    before = mapped_holding(manifest, segment)
    assert before is not None
    intact = bytes(before.view)

    spoilt = spoil_chunk(run_dir, ChunkTarget(index=2), random.Random(5))
    assert (spoilt.version, spoilt.index) == (3, 2)
    now = segment.read_bytes()
    differing = [at for at in range(len(now)) if now[at] != intact[at]]
    assert len(differing) == 1
    assert 2 * CHUNK <= differing[0] < 3 * CHUNK
    assert (now[differing[0]] ^ intact[differing[0]]).bit_count() == 1
    assert mapped_holding(manifest, segment) is None, "wrong weights must not be used"
    assert bytes(before.view) == intact, "who has verified it keeps what was verified"

    assert mend_chunk(spoilt) == "the intact file is back"
    after = mapped_holding(manifest, segment)
    assert after is not None
    assert bytes(after.view) == intact
    assert sorted(path.name for path in segment.parent.glob("*spoilt*")) == []


def test_the_newest_version_is_meant_unless_one_is_named_and_the_seed_draws_the_chunk(run_dir: Path) -> None:
    publish(run_dir, 3)
    publish(run_dir, 4)
    assert spoil_chunk(run_dir, ChunkTarget(version=3, index=10**6), random.Random(1)).version == 3
    drawn = {spoil_chunk(run_dir, ChunkTarget(), random.Random(seed)).index for seed in range(8)}
    assert len(drawn) > 2
    with pytest.raises(FaultNotPossible, match="no segment of version 9 lies here; there are: 3, 4"):
        spoil_chunk(run_dir, ChunkTarget(version=9), random.Random(1))


def test_a_version_that_was_retired_or_published_anew_is_not_brought_back(run_dir: Path) -> None:
    segment, _ = publish(run_dir, 3)
    spoilt = spoil_chunk(run_dir, ChunkTarget(), random.Random(1))
    segments.remove_segment(segment)
    assert mend_chunk(spoilt) == "the version had been retired by then"
    assert not list(segment.parent.glob("headrace-*"))

    segment, manifest = publish(run_dir, 4)
    spoilt = spoil_chunk(run_dir, ChunkTarget(), random.Random(1))
    new = segment.with_name("new")
    new.write_bytes(b"\1" * manifest.total_bytes)
    new.replace(segment)
    assert mend_chunk(spoilt) == "the version had been retired by then"
    assert segment.read_bytes() == b"\1" * manifest.total_bytes


def test_what_a_killed_head_left_spoilt_is_mended_by_the_next(run_dir: Path) -> None:
    segment, manifest = publish(run_dir, 3)
    gone, _ = publish(run_dir, 4)
    for version in (3, 4):
        spoil_chunk(run_dir, ChunkTarget(version=version), random.Random(1))
    segments.remove_segment(gone)
    assert mend_all(run_dir) == 1
    assert mapped_holding(manifest, segment) is not None
    assert {path.name for path in segment.parent.glob("headrace-*")} == {
        segment.name,
        segments.manifest_path(segment).name,
    }
