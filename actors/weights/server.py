"""The weight server: holds the newest versions, tells the scheduler of each, and serves whoever pulls.

    trainer ──Publish(manifest, segment)──▶ adopt: check, keep the manifest beside the segment
                                              │ VersionAvailable
                                              ▼
                                          scheduler ──PullVersion──▶ worker ──GetManifest──▶ map the segment, or
                                                                        └──GetChunks──▶ a credit stream of chunks

Pullers on other machines are told of one another (``relay_tree.py``), so that what leaves this machine does not grow
with their number; chunks come as deltas to those that hold another version (``delta_source.py``). What the trainer
prepares for the next version is mapped before that is published (``mapped.py``).

It computes nothing and holds no bytes of its own, so it can die at any moment: the next one adopts the segments that
its predecessor left in shared memory and announces the newest. A segment that turns out to be damaged is let go, and
its publisher, told that it has a server to look at, publishes what it holds again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import numpy as np

from actors.core.actor import Actor, concurrent, handles
from actors.core.errors import AskError, ReplyError
from actors.core.registered import RegisteredActor
from actors.host.room import no_space
from actors.protocol.failures import Acknowledged
from actors.protocol.services import LookupService, RegisterService, ServiceChanged, ServiceFound
from actors.protocol.weights import (
    Chunk,
    GetChunks,
    GetManifest,
    Manifest,
    ManifestReply,
    Publish,
    Published,
    QueryVersions,
    SegmentDamaged,
    VersionAvailable,
    Versions,
)
from actors.roles import RoleArgs
from actors.weights.delta_source import DeltaSource
from actors.weights.errors import MalformedManifest
from actors.weights.manifest import check_manifest, same_layout, whole_chunk, wrong_chunks
from actors.weights.mapped import Mapped, MappedVersions
from actors.weights.memory import PARALLEL_BYTES, STEP_BYTES, damaged_chunks, map_segment, warm, warm_chunks
from actors.weights.pace import Pace
from actors.weights.relay_tree import RelayTree, nodes_of
from actors.weights.segments import host_id, own_site, read_manifests, remove_segment, write_manifest

_AHEAD_CHUNKS: Final = 4
"""Made ready together, while the ones before them are sent."""


class RefusedPublish(ReplyError):
    """The manifest or its segment is not as described; the publisher's bug, do not retry."""


class NotHeld(ReplyError):
    """The version is not held here, or has no such chunks; ask for the newest."""


class WeightServer(RegisteredActor):
    """Serves the newest ``limits.versions_held`` versions of one job."""

    def __init__(self, args: RoleArgs) -> None:
        self._args = args
        self._job = args.name_of_job
        self._run_dir = Path(args.run_dir)
        self._job_weights = args.job_config.weights
        self._held: dict[int, tuple[Path, Manifest]] = {}
        self._trees: dict[int, RelayTree] = {}
        self._apart: set[frozenset[str]] = set()
        """Pairs of nodes of which one could not feed the other; see ``RelayTree``."""
        self._forget_s = 0.0
        """Time at which they are tried again."""
        self._sources: dict[tuple[int, int], DeltaSource] = {}
        """Deltas of the newest version against those that pullers hold."""
        self._mapped = MappedVersions()
        self._sent_bytes = 0
        self._pace = Pace(self._job_weights.send_bytes_per_s)

    async def on_start(self) -> None:
        for segment, manifest in read_manifests(self._run_dir):
            self._held[manifest.policy_version] = (segment, manifest)
        service = RegisterService(job=self._job, role="weights", address=self.ctx.self_address)
        await self.keep_registered(self._args.scheduler, service, Acknowledged)

    async def registered(self) -> None:
        if self._held:
            self._announce()

    @property
    def newest(self) -> int:
        return max(self._held, default=-1)

    @handles(Publish)
    async def publish(self, message: Publish) -> Published:
        manifest, segment = message.manifest, Path(message.path)
        if manifest.policy_version not in self._held:
            self._adopt(manifest, segment)
        return Published(policy_version=manifest.policy_version, newest=self.newest)

    def _adopt(self, manifest: Manifest, segment: Path) -> None:
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
        newest_before = self.newest
        self._held[manifest.policy_version] = (segment, manifest)
        self._mapped.adopt(manifest.policy_version, found.st_ino)
        self._retire()
        if manifest.policy_version > newest_before:
            self._announce()
            if found.st_size >= PARALLEL_BYTES:
                self.ctx.start_task(
                    self._enter_next(manifest.policy_version, segment), "enter the next version's pages"
                )

    def _retire(self) -> None:
        retired = sorted(self._held)[: -self.ctx.limits.versions_held]
        segments = [self._held.pop(version)[0] for version in retired]
        self._trees = {version: tree for version, tree in self._trees.items() if version in self._held}
        mapped: list[object] = [*self._mapped.let_go(self._held)]
        mapped += [self._sources.pop(pair) for pair in list(self._sources) if pair[0] != self.newest]
        if segments or mapped:
            self.ctx.start_task(self._give_back(segments, mapped), "give memory back")

    async def _give_back(self, segments: list[Path], mapped: list[object]) -> None:
        """Away from the loop, and behind who fetches the newest: the system takes 100 ms for a large one."""
        await self.ctx.run_blocking(_remove, segments)
        await self.ctx.sleep(self.ctx.limits.weights_settle_s)
        await self.ctx.run_blocking(mapped.clear)  # the last references

    async def _enter_next(self, version: int, segment: Path) -> None:
        """What the trainer will write the version after this one to: it prepares that some time after it."""
        while version == self.newest:
            await self.ctx.sleep(self.ctx.limits.weights_settle_s)
            if version == self.newest and (coming := self._mapped.coming(segment)) is not None:
                await self._enter(coming)
                return

    async def _enter(self, mapped: Mapped) -> None:
        """Step by step, for whoever needs the thread meanwhile."""
        size = len(mapped.view)
        for start in range(0, size, STEP_BYTES):
            await self.ctx.run_blocking(warm, mapped.view, start, min(size, start + STEP_BYTES))
        mapped.entered = True

    def _announce(self) -> None:
        available = VersionAvailable(
            job=self._job, policy_version=self.newest, weights=self.ctx.self_address, oldest=min(self._held)
        )
        self.ctx.ref(self.hub.address).tell(available)

    @handles(QueryVersions)
    async def query_versions(self, message: QueryVersions) -> Versions:
        return Versions(held=tuple(sorted(self._held)), sent_bytes=self._sent_bytes)

    @handles(GetManifest)
    async def get_manifest(self, message: GetManifest) -> ManifestReply:
        version = self.newest if message.policy_version < 0 else message.policy_version
        segment, manifest = self._held.get(version, (Path(), None))
        place = None
        if message.puller is not None and message.avoid is not None:  # of this version, or of one that is retired now
            self._apart.add(nodes_of(message.puller, message.avoid))
        if manifest is not None and message.puller is not None and message.host != host_id():
            place = self._tree(version).place(message.puller, message.host, message.site, message.avoid)
        return ManifestReply(
            manifest=manifest,
            host=host_id(),
            path=str(segment) if manifest else "",
            feed=place.feed if place else None,
            feed_maps=place.maps if place else False,
            relay=self._job_weights.relay,
            delta=self._job_weights.delta,
        )

    def _tree(self, version: int) -> RelayTree:
        if version not in self._trees:
            if self.ctx.now() >= self._forget_s:
                self._apart.clear()
                self._forget_s = self.ctx.now() + self.ctx.limits.relay_retry_s
            self._trees[version] = RelayTree(self.ctx.limits.relay_children, own_site(), self._apart)
        return self._trees[version]

    @handles(SegmentDamaged)
    @concurrent
    async def segment_damaged(self, message: SegmentDamaged) -> None:
        """If the segment itself is damaged, let go of it, and have the trainer publish what it holds again."""
        version = message.policy_version
        held = self._held.get(version)
        if held is None or await self.ctx.run_blocking(_is_intact, *held):
            return
        try:
            scheduler = self.ctx.ref(self.hub.address)
            found = await scheduler.ask(LookupService(job=self._job, role="trainer"), ServiceFound)
        except AskError as error:
            self.ctx.log.warning("a segment is damaged; its publisher is not known", version=version, error=str(error))
            return  # the next puller will complain as well
        if self._held.get(version) is not held:
            return
        self.ctx.log.error("a segment is damaged and let go", version=version, segment=held[0].name)
        del self._held[version]
        self._mapped.let_go(self._held)
        self._sources = {pair: source for pair, source in self._sources.items() if version not in pair}
        remove_segment(held[0])
        if found.address is not None:
            changed = ServiceChanged(job=self._job, role="weights", address=self.ctx.self_address)
            self.ctx.ref(found.address).tell(changed)

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
                    await self._pace.turn(self.ctx, chunk.data.nbytes)
                    self._sent_bytes += chunk.data.nbytes
                    yield chunk
            mapped.entered = mapped.entered or (source is None and len(wanted) == len(manifest.chunk_hashes))
        finally:
            ready.cancel()
            async with asyncio.timeout(self.ctx.limits.blocking_call_s):
                await asyncio.gather(ready, return_exceptions=True)  # heard: whoever asked may have gone

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
        """One that is held; its pages stay in reach, also as a base of the next one."""
        return self._mapped.of(version, self._held[version][0])

    async def _ready(
        self, manifest: Manifest, mapped: Mapped, source: DeltaSource | None, chunks: list[int]
    ) -> dict[int, bytes]:
        """Have ``chunks`` ready to be sent: as deltas, else with their pages in reach."""
        if source is not None:
            return await self.ctx.run_blocking(source.make, chunks)
        if not mapped.entered:
            await self.ctx.run_blocking(warm_chunks, manifest, mapped.view, chunks)
        return {}


def _chunk(manifest: Manifest, view: memoryview, index: int, base: int, delta: bytes | None) -> Chunk:
    """A chunk as it lies in the segment, not copied, or as its delta against ``base``."""
    if delta is None:
        return whole_chunk(manifest, view, index)
    return Chunk(policy_version=manifest.policy_version, index=index, data=np.frombuffer(delta, np.uint8), base=base)


def _remove(segments: list[Path]) -> None:
    for segment in segments:
        remove_segment(segment)


def _is_intact(segment: Path, manifest: Manifest) -> bool:
    """Whether every chunk fits its hash; a segment that is gone has none."""
    try:
        view = map_segment(segment)
    except (OSError, ValueError):
        return False
    return len(view) == manifest.total_bytes and not damaged_chunks(manifest, view)


def build(args: RoleArgs) -> dict[str, Actor]:
    """The weight server's process hosts one actor."""
    return {args.name: WeightServer(args)}
