"""The manifest that describes one stored copy, so that another process can read the copy.

    <manifest>   MessagePack of ``ParkedManifest`` · xxh3-128 of it

It is written under another name and renamed once every part is complete: so a copy with a manifest is complete. Of
several copies of a job the one with the highest generation counts. ``decode`` refuses a manifest whose blocks overlap
or do not match its hashes, or whose files lie elsewhere.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec
import xxhash

from actors.trainer.errors import ParkedStateDamaged
from actors.trainer.parking import Block, size_bytes

_DIGEST_BYTES: Final = 16
_FILE: Final = re.compile(r"[A-Za-z0-9-]{1,120}")


class ManifestPart(msgspec.Struct, frozen=True, kw_only=True):
    """Describes one part's file."""

    name: str
    file: str
    """Name of the file beside the manifest."""
    blocks: tuple[Block, ...]
    hashes: tuple[bytes, ...]

    @property
    def size_bytes(self) -> int:
        return size_bytes(self.blocks)


class ParkedManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Describes a job's stored copy."""

    format: int = 1
    job: str
    fingerprint: str
    steps: int
    generation: int
    """Number that grows with each copy of the job's state."""
    chunk_bytes: int
    parts: tuple[ManifestPart, ...]

    @property
    def hash(self) -> str:
        """Hexadecimal digest of the state, whichever files hold it."""
        parts = [(part.name, part.blocks, part.hashes) for part in self.parts]
        return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode((self.fingerprint, self.steps, parts)))

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)


def encode(manifest: ParkedManifest) -> bytes:
    body = msgspec.msgpack.encode(manifest)
    return body + xxhash.xxh3_128_digest(body)


def decode(data: bytes) -> ParkedManifest:
    """Read what ``encode`` has written.

    Raises:
        ParkedStateDamaged: ``data`` is cut off, altered, or not a manifest.
    """
    body, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    if xxhash.xxh3_128_digest(body) != digest:
        raise ParkedStateDamaged("a manifest of parked state is cut off or was altered")
    return decode_unhashed(body)


def decode_unhashed(body: bytes) -> ParkedManifest:
    """As ``decode``, for a body without its digest.

    Raises:
        ParkedStateDamaged: the bytes describe no stored copy.
    """
    try:
        manifest = msgspec.msgpack.decode(body, type=ParkedManifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ParkedStateDamaged(f"a manifest of parked state cannot be read: {error}") from error
    if manifest.format != 1 or manifest.chunk_bytes < 1 or manifest.steps < 0:
        raise ParkedStateDamaged(
            f"a manifest of parked state of job {manifest.job!r} has a form that is not known here"
        )
    if len({part.name for part in manifest.parts}) < len(manifest.parts):
        raise ParkedStateDamaged(f"parked state of job {manifest.job!r} names a part twice")
    for part in manifest.parts:
        _check(manifest, part)
    return manifest


def _check(manifest: ParkedManifest, part: ManifestPart) -> None:
    end = chunks = 0
    for block in part.blocks:
        if block.offset_bytes < end or block.length_bytes < 1:
            raise ParkedStateDamaged(f"parked state of job {manifest.job!r}: block {block.name!r} lies on another")
        end = block.offset_bytes + block.length_bytes
        chunks += -(-block.length_bytes // manifest.chunk_bytes)
    if not part.blocks or chunks != len(part.hashes) or any(len(digest) != _DIGEST_BYTES for digest in part.hashes):
        raise ParkedStateDamaged(f"parked state of job {manifest.job!r}: {part.name!r} has not a hash for each chunk")
    if not _FILE.fullmatch(part.file):
        raise ParkedStateDamaged(f"parked state of job {manifest.job!r}: {part.file!r} is no name of ours")
