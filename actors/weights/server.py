"""The weight server: holds the newest versions, tells the scheduler of each, and serves whoever pulls.

    trainer ──Publish(manifest, segment)──▶ adopt: check, keep the manifest beside the segment
                                              │ VersionAvailable
                                              ▼
                                          scheduler ──PullVersion──▶ worker ──GetManifest──▶ map the segment, or
                                                                        └──GetChunks──▶ a credit stream of chunks

It computes nothing and holds no bytes of its own, so it can die at any moment: the next one adopts the segments that
its predecessor left in shared memory and announces the newest. A segment that turns out to be damaged is let go, and
its publisher, told that it has a server to look at, publishes what it holds again.
"""

from __future__ import annotations

import mmap
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np

from actors.core.actor import Actor, concurrent, handles, idempotent
from actors.core.errors import AskError, ReplyError
from actors.core.registered import RegisteredActor
from actors.roles import RoleArgs
from actors.scheduler.messages import (
    Acknowledged,
    LookupService,
    RegisterService,
    ServiceChanged,
    ServiceFound,
    VersionAvailable,
)
from actors.weights.errors import MalformedManifest
from actors.weights.manifest import check_manifest, chunk_bounds, chunk_is_intact
from actors.weights.messages import (
    Chunk,
    GetChunks,
    GetManifest,
    Manifest,
    ManifestReply,
    Publish,
    Published,
    QueryVersions,
    SegmentDamaged,
    Versions,
)
from actors.weights.segments import host_id, read_manifests, remove_segment, write_manifest


class RefusedPublish(ReplyError):
    """The manifest or its segment is not as described; the publisher's bug, do not retry."""


class NotHeld(ReplyError):
    """That version is not held here; ask for the newest."""


class WeightServer(RegisteredActor):
    """Serves the newest ``limits.versions_held`` versions of one job."""

    def __init__(self, args: RoleArgs) -> None:
        self._args = args
        self._job = args.name_of_job
        self._run_dir = Path(args.run_dir)
        self._held: dict[int, tuple[Path, Manifest]] = {}

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
    @idempotent
    async def publish(self, message: Publish) -> Published:
        manifest, segment = message.manifest, Path(message.path)
        if manifest.policy_version not in self._held:
            self._adopt(manifest, segment)
        return Published(policy_version=manifest.policy_version, newest=self.newest)

    def _adopt(self, manifest: Manifest, segment: Path) -> None:
        try:
            check_manifest(manifest)
            size = segment.stat().st_size
        except (MalformedManifest, OSError) as error:
            raise RefusedPublish(f"version {manifest.policy_version} at {segment.name}: {error}") from error
        if size != manifest.total_bytes:
            raise RefusedPublish(f"{segment.name} has {size} bytes, its manifest says {manifest.total_bytes}")
        write_manifest(segment, manifest)
        newest_before = self.newest
        self._held[manifest.policy_version] = (segment, manifest)
        self._retire()
        if manifest.policy_version > newest_before:
            self._announce()

    def _retire(self) -> None:
        for version in sorted(self._held)[: -self.ctx.limits.versions_held]:
            remove_segment(self._held.pop(version)[0])

    def _announce(self) -> None:
        available = VersionAvailable(job=self._job, policy_version=self.newest, weights=self.ctx.self_address)
        self.ctx.ref(self.hub.address).tell(available)

    @handles(QueryVersions)
    @idempotent
    async def query_versions(self, message: QueryVersions) -> Versions:
        return Versions(held=tuple(sorted(self._held)))

    @handles(GetManifest)
    @idempotent
    async def get_manifest(self, message: GetManifest) -> ManifestReply:
        version = self.newest if message.policy_version < 0 else message.policy_version
        segment, manifest = self._held.get(version, (Path(), None))
        return ManifestReply(manifest=manifest, host=host_id(), path=str(segment) if manifest else "")

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
        remove_segment(held[0])
        if found.address is not None:
            changed = ServiceChanged(job=self._job, role="weights", address=self.ctx.self_address)
            self.ctx.ref(found.address).tell(changed)

    @handles(GetChunks)
    @concurrent
    async def get_chunks(self, message: GetChunks) -> AsyncIterator[Chunk]:
        if message.policy_version not in self._held:
            raise NotHeld(f"version {message.policy_version} is not held; held: {sorted(self._held)}")
        segment, manifest = self._held[message.policy_version]
        with segment.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            for index in (int(i) for i in message.chunks):
                if not 0 <= index < len(manifest.chunk_hashes):
                    raise NotHeld(
                        f"chunk {index} does not exist: version {manifest.policy_version} has "
                        f"{len(manifest.chunk_hashes)}"
                    )
                start, end = chunk_bounds(manifest, index)
                data = np.frombuffer(
                    mapped[start:end], dtype=np.uint8
                )  # a copy: the mapping may close before it is sent
                yield Chunk(policy_version=manifest.policy_version, index=index, data=data)


def _is_intact(segment: Path, manifest: Manifest) -> bool:
    """Whether every chunk fits its hash; a segment that is gone has none."""
    try:
        with segment.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            bounds = [chunk_bounds(manifest, index) for index in range(len(manifest.chunk_hashes))]
            return all(chunk_is_intact(manifest, index, mapped[start:end]) for index, (start, end) in enumerate(bounds))
    except (OSError, ValueError):
        return False


def build(args: RoleArgs) -> dict[str, Actor]:
    """The weight server's process hosts one actor."""
    return {args.name: WeightServer(args)}
