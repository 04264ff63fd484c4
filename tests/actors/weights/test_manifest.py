"""A version's layout and its checks."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.protocol.weights import Manifest, TensorEntry
from actors.weights.errors import MalformedManifest
from actors.weights.manifest import ALIGNMENT_BYTES, check_manifest, chunk_is_intact, hash_chunks, layout, tensor_views
from actors.weights.segments import SIMULATED_HOST, Host, manifest_path, read_manifests, segment_path, write_manifest

shapes = st.lists(
    st.tuples(st.sampled_from(["float32", "bfloat16", "uint8"]), st.lists(st.integers(0, 5), max_size=3)), max_size=6
)


def version_of(
    tensors: list[tuple[str, str, tuple[int, ...]]], data: bytes | None = None, chunk_bytes: int = 96
) -> tuple[Manifest, bytes]:
    entries, total = layout(tensors)
    data = data if data is not None else bytes(i % 251 for i in range(total))
    manifest = Manifest(
        job="j",
        policy_version=3,
        parent=2,
        total_bytes=total,
        chunk_bytes=chunk_bytes,
        chunk_hashes=hash_chunks(data, chunk_bytes),
        tensors=entries,
    )
    return manifest, data


@given(shapes)
def test_every_layout_is_aligned_accepted_and_read_back(drawn: list[tuple[str, list[int]]]) -> None:
    """Whatever the shapes, tensors start aligned, do not overlap, and views show exactly their bytes."""
    manifest, data = version_of([(f"t{i}", dtype, tuple(shape)) for i, (dtype, shape) in enumerate(drawn)])
    check_manifest(manifest)
    views = tensor_views(manifest, data)
    for entry in manifest.tensors:
        assert entry.offset_bytes % ALIGNMENT_BYTES == 0
        assert views[entry.name].tobytes() == data[entry.offset_bytes : entry.offset_bytes + entry.length_bytes]
        assert not views[entry.name].flags.writeable


def test_one_flipped_bit_is_seen_in_its_chunk_and_in_no_other() -> None:
    """The hash of a chunk covers each of its bits."""
    manifest, data = version_of([("a", "float32", (64,))])
    broken = bytearray(data)
    broken[100] ^= 1
    intact = [
        chunk_is_intact(manifest, i, bytes(broken[i * 96 : (i + 1) * 96])) for i in range(len(manifest.chunk_hashes))
    ]
    assert intact == [True, False, True]


def altered(entry: TensorEntry, **changes: object) -> TensorEntry:
    return msgspec.structs.replace(entry, **changes)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"offset_bytes": 10_000}, "leave the segment"),
        ({"offset_bytes": -64}, "leave the segment"),
        ({"length_bytes": 4}, "needs 256 bytes"),
        ({"shape": (-64,)}, "needs"),
        ({"dtype": "complex64"}, "dtype"),
    ],
)
def test_a_manifest_that_would_reach_outside_its_segment_is_refused(changes: dict[str, object], complaint: str) -> None:
    """No manifest from the wire can make a view read beyond the bytes that were verified."""
    manifest, _ = version_of([("a", "float32", (64,))])
    bad = msgspec.structs.replace(manifest, tensors=(altered(manifest.tensors[0], **changes),))
    with pytest.raises(MalformedManifest, match=complaint):
        check_manifest(bad)


def test_a_manifest_with_a_missing_hash_is_refused() -> None:
    """A chunk without a hash could not be verified."""
    manifest, _ = version_of([("a", "float32", (64,))])
    with pytest.raises(MalformedManifest, match="hashes"):
        check_manifest(msgspec.structs.replace(manifest, chunk_hashes=manifest.chunk_hashes[:-1]))


def test_bfloat16_travels_as_its_raw_sixteen_bits() -> None:
    """numpy has no bfloat16; the view is uint16 and the manifest keeps the name."""
    manifest, data = version_of([("a", "bfloat16", (3,))])
    assert tensor_views(manifest, data)["a"].dtype == np.uint16
    assert manifest.tensors[0].dtype == "bfloat16"


@pytest.mark.parametrize(
    "damage", [b"", b"\xff", b"\x81\xa3job\xa1\xec", b"\x91" * 5000, b"\x81\xa1a" + b"\x91" * 5000]
)
def test_a_damaged_manifest_file_is_left_out_by_a_server_that_looks_for_what_there_is(
    damage: bytes, tmp_path: Path
) -> None:
    """Text that is no UTF-8 is no DecodeError, and would end each life of the server."""
    token = SIMULATED_HOST.set(Host("here", tmp_path))
    try:
        manifest, data = version_of([("a", "float32", (4,))])
        good, bad = segment_path(tmp_path, 3), segment_path(tmp_path, 4)
        for segment in (good, bad):
            segment.write_bytes(data)
            write_manifest(segment, manifest)
        manifest_path(bad).write_bytes(damage)
        assert read_manifests(tmp_path) == [(good, manifest)]
    finally:
        SIMULATED_HOST.reset(token)
