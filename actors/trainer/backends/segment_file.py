"""Writes one version as a segment file: whole under its final name, or not there at all."""

from __future__ import annotations

from pathlib import Path

from actors.weights.manifest import hash_chunks
from actors.weights.messages import Manifest, TensorEntry


def write_segment(
    path: Path, data: memoryview, *, job: str, policy_version: int, chunk_bytes: int, tensors: tuple[TensorEntry, ...]
) -> Manifest:
    """Write ``data`` (uint8) to ``path`` and describe it. Hashes come from memory, so a torn write is noticed."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb", buffering=0) as file:
        written = 0
        while written < len(data):
            written += file.write(data[written:]) or 0
    manifest = Manifest(
        job=job,
        policy_version=policy_version,
        parent=policy_version - 1,
        total_bytes=len(data),
        chunk_bytes=chunk_bytes,
        chunk_hashes=hash_chunks(data, chunk_bytes),
        tensors=tensors,
    )
    partial.rename(path)
    return manifest
