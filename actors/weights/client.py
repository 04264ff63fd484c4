"""Pulling a version: map it when it lies on this machine, else fetch its chunks; verify all of it either way.

    manifest ──same host?──▶ map the segment ──▶ verify every chunk ──▶ views
        └── else ──▶ stream the missing chunks ─▶ verify each as it comes ─┐
                          ▲────────── what is missing or corrupt ──────────┘

A pull that breaks off keeps the chunks that it has: the next call for the same version fetches only the rest. A server
whose chunks stay corrupt is told so: the damage may lie in its segment.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from actors.core.context import Context
from actors.weights.errors import CorruptSegment, VersionNotHeld
from actors.weights.manifest import check_manifest, chunk_bounds, chunk_is_intact, tensor_views
from actors.weights.messages import Chunk, GetChunks, GetManifest, Manifest, ManifestReply, SegmentDamaged
from actors.weights.segments import host_id
from transport.address import ActorAddress
from transport.transport import Lane


@dataclass(frozen=True, slots=True)
class PulledWeights:
    """A whole, verified version. ``tensors`` are read-only views; bfloat16 appears as uint16, named in ``dtypes``."""

    policy_version: int
    tensors: dict[str, np.ndarray]
    dtypes: dict[str, str]
    bytes: int
    seconds: float
    mapped: bool

    def close(self) -> None:
        """Let go of the views; the memory goes with the last of them."""
        self.tensors.clear()


@dataclass(slots=True)
class _Partial:
    manifest: Manifest
    buffer: bytearray
    missing: set[int]


class WeightClient:
    """Pulls versions on behalf of one actor; one pull at a time."""

    def __init__(self, ctx: Context, job: str) -> None:
        self._ctx = ctx
        self._job = job
        self._partial: _Partial | None = None

    async def pull(self, weights: ActorAddress, policy_version: int) -> PulledWeights:
        """Fetch and verify ``policy_version`` (-1: the newest) from the server at ``weights``.

        Raises:
            VersionNotHeld: the server has retired it; ask for the newest.
            CorruptSegment: bytes do not match their hashes after every retry.
            AskError: the server could not be reached in time; a later call resumes.
        """
        started_s = self._ctx.now()
        server = self._ctx.ref(weights)
        reply = await server.ask(GetManifest(job=self._job, policy_version=policy_version), ManifestReply)
        manifest = reply.manifest
        if manifest is None:
            raise VersionNotHeld(f"the weight server does not hold version {policy_version}")
        check_manifest(manifest)
        data = await self._map(manifest, reply)
        mapped = data is not None
        if data is None:
            data = await self._fetch(weights, manifest)
        return PulledWeights(
            policy_version=manifest.policy_version,
            tensors=tensor_views(manifest, data),
            dtypes={entry.name: entry.dtype for entry in manifest.tensors},
            bytes=manifest.total_bytes,
            seconds=self._ctx.now() - started_s,
            mapped=mapped,
        )

    async def _map(self, manifest: Manifest, reply: ManifestReply) -> memoryview | None:
        """The mapped segment if it is on this host, whole and intact; None to fetch it instead."""
        if reply.host != host_id():
            return None
        return await self._ctx.run_blocking(_map_verified, manifest, Path(reply.path))

    async def _fetch(self, weights: ActorAddress, manifest: Manifest) -> bytearray:
        partial = self._partial
        if partial is None or partial.manifest != manifest:
            partial = _Partial(manifest, bytearray(manifest.total_bytes), set(range(len(manifest.chunk_hashes))))
            self._partial = partial
        for _ in range(self._ctx.limits.chunk_retries):
            await self._fetch_missing(weights, partial)
            if not partial.missing:
                self._partial = None
                return partial.buffer
        self._ctx.ref(weights).tell(SegmentDamaged(job=self._job, policy_version=manifest.policy_version))
        raise CorruptSegment(f"version {manifest.policy_version}: chunks {sorted(partial.missing)[:8]} stay corrupt")

    async def _fetch_missing(self, weights: ActorAddress, partial: _Partial) -> None:
        wanted = np.array(sorted(partial.missing), dtype=np.int32)
        request = GetChunks(job=self._job, policy_version=partial.manifest.policy_version, chunks=wanted)
        stream = self._ctx.ref(weights).stream(
            request, Chunk, timeout_s=self._ctx.limits.pull_timeout_s, credit_items=8, lane=Lane.BULK
        )
        async with stream as chunks:
            async for chunk in chunks:
                if chunk.index in partial.missing and chunk_is_intact(partial.manifest, chunk.index, chunk.data.data):
                    start, end = chunk_bounds(partial.manifest, chunk.index)
                    partial.buffer[start:end] = chunk.data.data
                    partial.missing.discard(chunk.index)


def _map_verified(manifest: Manifest, path: Path) -> memoryview | None:
    try:
        with path.open("rb") as file:
            view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError):
        return None
    if len(view) != manifest.total_bytes:
        return None
    for index in range(len(manifest.chunk_hashes)):
        start, end = chunk_bounds(manifest, index)
        if not chunk_is_intact(manifest, index, view[start:end]):
            return None
    return view
