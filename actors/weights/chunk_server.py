"""Holds the newest versions of a job in segment files, and serves their chunks: what a weight server and a share do.

    hold(manifest, segment) ─▶ the manifest is kept beside the file ─▶ the oldest versions retire
    GetChunks ─▶ a credit stream of chunks, whole or as deltas (``delta_source.py``), their pages entered before

It holds no bytes of its own, so it can die at any moment: its next life goes on with the files.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import numpy as np

from actors.core.actor import Actor, concurrent, handles
from actors.core.errors import ReplyError
from actors.host.room import no_space
from actors.protocol.metrics import Event
from actors.protocol.weights import Chunk, GetChunks, Manifest
from actors.roles import RoleArgs
from actors.weights.delta_source import DeltaSource
from actors.weights.errors import MalformedManifest
from actors.weights.manifest import check_manifest, chunks_of, same_layout, whole_chunk, wrong_chunks
from actors.weights.mapped import Mapped, MappedVersions
from actors.weights.memory import damaged_chunks, map_segment, warm_chunks
from actors.weights.pace import Pace
from actors.weights.segments import read_manifests, remove_segment, write_manifest
from transport.address import ActorAddress

_AHEAD_CHUNKS: Final = 4
"""Chunks that are made ready together, while the ones before them are sent."""


class RefusedPublish(ReplyError):
    """The manifest or its segment is not as described; the publisher's bug, do not retry."""


class NotHeld(ReplyError):
    """The version is not held here, or has no such chunks; ask for the newest."""


class ChunkServer(Actor):
    """Serves the newest ``limits.versions_held`` versions of one job, or its share of them."""

    source = ""
    """Name in the manifests of versions that lie on several machines."""

    def __init__(self, args: RoleArgs) -> None:
        self._args = args
        self._job = args.name_of_job
        self._job_weights = args.job_config.weights
        self._held: dict[int, tuple[Path, Manifest]] = {}
        self._sources: dict[tuple[int, int], DeltaSource] = {}
        """Deltas of the newest version against those that pullers hold."""
        self._mapped = MappedVersions()
        self._sent_bytes = 0
        self._told_bytes = 0
        """Those of ``_sent_bytes`` that stand in the run's record."""
        self._pace = Pace(self._job_weights.send_bytes_per_s)

    def _take_over(self) -> None:
        """Hold what a former life has held."""
        for segment, manifest in read_manifests(Path(self._args.run_dir), self.source):
            self._held[manifest.policy_version] = (segment, manifest)

    @property
    def newest(self) -> int:
        return max(self._held, default=-1)

    @property
    def _metrics(self) -> ActorAddress:
        return self._args.metrics

    async def on_stop(self) -> None:
        self._tell_served()

    def _tell_served(self) -> None:
        """Record how many bytes were sent since the last version came, if versions lie on several machines."""
        sent, self._told_bytes = self._sent_bytes - self._told_bytes, self._sent_bytes
        if sent and self._held and self._held[self.newest][1].sources:
            node = self.ctx.self_address.peer.name.partition(".")[0]
            fields: dict[str, float | int | str] = {"node": node, "version": self.newest, "bytes": sent}
            self.ctx.ref(self._metrics).tell(Event(job=self._job, name="weights_served", fields=fields))

    # ------------------------------------------------------------ versions

    def _hold(self, manifest: Manifest, segment: Path) -> None:
        """Hold a version whose file is ``segment``.

        Raises:
            RefusedPublish: the manifest is malformed, or the file does not fit it.
            NoSpaceLeft, OSError: there is no room for the manifest.
        """
        try:
            check_manifest(manifest)
            found = segment.stat()
        except (MalformedManifest, OSError) as error:
            raise RefusedPublish(f"version {manifest.policy_version} at {segment.name}: {error}") from error
        if found.st_size != manifest.total_bytes:
            raise RefusedPublish(f"{segment.name} has {found.st_size} bytes, its manifest says {manifest.total_bytes}")
        try:
            write_manifest(segment, manifest)
        except OSError as error:
            raise no_space(error, segment, f"the manifest of version {manifest.policy_version}") or error from error
        self._tell_served()
        self._held[manifest.policy_version] = (segment, manifest)
        self._mapped.adopt(manifest.policy_version, found.st_ino)
        self._retire()

    def _retire(self) -> None:
        retired = sorted(self._held)[: -self.ctx.limits.versions_held]
        segments = [self._held.pop(version)[0] for version in retired]
        mapped: list[object] = [*self._mapped.let_go(self._held)]
        mapped += [self._sources.pop(pair) for pair in list(self._sources) if pair[0] != self.newest]
        if segments or mapped:
            self.ctx.start_task(self._give_back(segments, mapped), "give memory back")

    async def _give_back(self, segments: list[Path], mapped: list[object]) -> None:
        """Remove segments and mappings off the loop, the latter after pulls of the newest: a large one takes 100 ms."""
        await self.ctx.run_blocking(_remove, segments)
        await self.ctx.sleep(self.ctx.limits.weights_settle_s)
        await self.ctx.run_blocking(mapped.clear)  # the last references

    async def _is_damaged(self, version: int) -> bool:
        """Whether the version is held here, and its file is gone or does not fit its hashes."""
        held = self._held.get(version)
        intact = held is None or await self.ctx.run_blocking(_is_intact, *held, self.source)
        return not intact and self._held.get(version) is held

    def _let_go(self, version: int) -> None:
        """Hold a version no more, and remove its file."""
        segment, _ = self._held.pop(version)
        self._mapped.let_go(self._held)
        self._sources = {pair: source for pair, source in self._sources.items() if version not in pair}
        remove_segment(segment)

    # ------------------------------------------------------------ chunks

    @handles(GetChunks)
    @concurrent
    async def get_chunks(self, message: GetChunks) -> AsyncIterator[Chunk]:
        version = message.policy_version
        if version not in self._held:
            raise NotHeld(f"version {version} is not held; held: {sorted(self._held)}")
        manifest = self._held[version][1]
        if wrong := wrong_chunks(manifest, message.chunks):
            raise NotHeld(wrong)
        wanted: list[int] = message.chunks.tolist()
        if manifest.sources and not set(wanted) <= set(chunks_of(manifest, self.source)):
            raise NotHeld(f"version {version}: chunks are asked for here that another machine has")
        mapped, source = self._version(version), self._deltas(manifest, message.base)
        batches = [wanted[first : first + _AHEAD_CHUNKS] for first in range(0, len(wanted), _AHEAD_CHUNKS)]
        ready = asyncio.create_task(self._ready(manifest, mapped, source, batches[0] if batches else []), name="ready")
        try:
            for batch, after in zip(batches, [*batches[1:], []], strict=False):
                async with asyncio.timeout(self.ctx.limits.pull_timeout_s):
                    deltas = await ready
                ready = asyncio.create_task(self._ready(manifest, mapped, source, after), name="ready")
                for index in batch:
                    chunk = _chunk(manifest, mapped.view, index, message.base, deltas.get(index))
                    await self._pace.wait_to_send(self.ctx, chunk.data.nbytes)
                    self._sent_bytes += chunk.data.nbytes
                    yield chunk
            mapped.entered = mapped.entered or (source is None and len(wanted) == len(manifest.chunk_hashes))
        finally:
            ready.cancel()
            async with asyncio.timeout(self.ctx.limits.blocking_call_s):
                await asyncio.gather(ready, return_exceptions=True)  # takes its error, too: the puller may be gone

    def _deltas(self, manifest: Manifest, base: int) -> DeltaSource | None:
        """Deltas against ``base``, if the job wants them and the server still holds it."""
        if not self._job_weights.delta or base not in self._held or base == manifest.policy_version:
            return None
        key = (manifest.policy_version, base)
        if key not in self._sources:
            if not same_layout(manifest, self._held[base][1]):
                return None
            try:
                self._sources[key] = DeltaSource(
                    manifest, self._version(manifest.policy_version).view, self._version(base).view
                )
            except (OSError, ValueError):  # just being retired
                return None
        return self._sources[key]

    def _version(self, version: int) -> Mapped:
        """The mapping of a held version; its pages stay mapped, also as a base of the next one."""
        return self._mapped.of(version, self._held[version][0])

    async def _ready(
        self, manifest: Manifest, mapped: Mapped, source: DeltaSource | None, chunks: list[int]
    ) -> dict[int, bytes]:
        """Get ``chunks`` ready to be sent: returns their deltas, or enters their pages."""
        if source is not None:
            return await self.ctx.run_blocking(source.make, chunks)
        if not mapped.entered:
            await self.ctx.run_blocking(warm_chunks, manifest, mapped.view, chunks)
        return {}


def _chunk(manifest: Manifest, view: memoryview, index: int, base: int, delta: bytes | None) -> Chunk:
    """A chunk, whole and not copied, or as its delta against ``base``."""
    if delta is None:
        return whole_chunk(manifest, view, index)
    return Chunk(policy_version=manifest.policy_version, index=index, data=np.frombuffer(delta, np.uint8), base=base)


def _remove(segments: list[Path]) -> None:
    for segment in segments:
        remove_segment(segment)


def _is_intact(segment: Path, manifest: Manifest, source: str) -> bool:
    """Whether the segment is there and every chunk of it that ``source`` has fits its hash."""
    try:
        view = map_segment(segment)
    except (OSError, ValueError):
        return False
    return len(view) == manifest.total_bytes and not damaged_chunks(manifest, view, chunks_of(manifest, source))
