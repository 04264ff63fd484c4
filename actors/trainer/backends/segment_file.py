"""Writes one version as a segment file: whole under its final name, or not there at all."""

from __future__ import annotations

from pathlib import Path

from actors.protocol.weights import Manifest, TensorEntry
from actors.weights.memory import SegmentWriter


def write_segment(
    path: Path,
    data: memoryview,
    *,
    job: str,
    policy_version: int,
    chunk_bytes: int,
    tensors: tuple[TensorEntry, ...],
    writer: SegmentWriter | None = None,
    adapter_of: str = "",
) -> Manifest:
    """Copy ``data`` (uint8) to ``path``, the one copy there is, and describe it.

    Hashes are those of ``data``, so a torn write is noticed. ``writer``: of the versions before this one.
    ``adapter_of``: see ``Manifest``.
    """
    return described(
        (writer or SegmentWriter()).write(path, data, chunk_bytes),
        job=job,
        policy_version=policy_version,
        total_bytes=len(data),
        chunk_bytes=chunk_bytes,
        tensors=tensors,
        adapter_of=adapter_of,
    )


def described(
    hashes: tuple[bytes, ...],
    *,
    job: str,
    policy_version: int,
    total_bytes: int,
    chunk_bytes: int,
    tensors: tuple[TensorEntry, ...],
    adapter_of: str = "",
) -> Manifest:
    """What is said of the segment whose chunks have these hashes."""
    return Manifest(
        job=job,
        policy_version=policy_version,
        parent=policy_version - 1,
        total_bytes=total_bytes,
        chunk_bytes=chunk_bytes,
        chunk_hashes=hashes,
        tensors=tensors,
        adapter_of=adapter_of,
    )
