"""The weight server: holds the newest versions, tells the scheduler of each, and serves whoever pulls.

    trainer ──Publish(manifest, segment)──▶ adopt: check, keep the manifest beside the segment
                                              │ VersionAvailable
                                              ▼
                                          scheduler ──PullVersion──▶ worker ──GetManifest──▶ map the segment, or
                                                                        └──GetChunks──▶ a credit stream of chunks

It computes nothing and holds no bytes of its own, so it can die at any moment: the next one adopts the segments that
its predecessor left in shared memory and announces the newest.
"""

from __future__ import annotations

import mmap
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np

from actors.core.actor import Actor, concurrent, handles, idempotent
from actors.core.errors import ReplyError
from actors.core.registered import RegisteredActor
from actors.roles import RoleArgs
from actors.scheduler.messages import Acknowledged, RegisterService, VersionAvailable
from actors.weights.errors import MalformedManifest
from actors.weights.manifest import check_manifest, chunk_bounds
from actors.weights.messages import (
    Chunk,
    GetChunks,
    GetManifest,
    Manifest,
    ManifestReply,
    Publish,
    Published,
    QueryVersions,
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


def build(args: RoleArgs) -> dict[str, Actor]:
    """The weight server's process hosts one actor."""
    return {args.name: WeightServer(args)}
