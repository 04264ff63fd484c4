"""Versions as segment files: each whole under its final name, or not there at all."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from actors.protocol.weights import Manifest, TensorEntry
from actors.weights.memory import SegmentWriter


class VersionWriter(SegmentWriter):
    """Writes version after version, and makes room for the next one while this one is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self._helper: ThreadPoolExecutor | None = None
        self._published: tuple[Path, int] | None = None

    def published(self, path: Path, size: int) -> None:
        """Note that a version of ``size`` bytes lies at ``path``: the next one will be as large."""
        self._published = path, size

    def make_room(self) -> None:
        """Reserve the next version's room. Called when training goes on, so that pulls go first after a publication."""
        if self._published is not None:
            self._helper = self._helper or ThreadPoolExecutor(1, "segments")
            self._helper.submit(self.prepare, *self._published)
            self._published = None

    def end(self) -> None:
        """Give the room back, and stop making any."""
        helper, self._helper, self._published = self._helper, None, None
        if helper is None:
            self.close()
        else:
            helper.submit(self.close)
            helper.shutdown(wait=False)


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
    """Copy ``data`` (uint8) once, to ``path``, and describe it.

    Hashes are those of ``data``, so a torn write is noticed. ``writer``: the one of earlier versions.
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
    """The manifest of a segment whose chunks have these hashes."""
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
