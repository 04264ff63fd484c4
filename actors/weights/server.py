"""The weight server: holds the newest versions, tells the scheduler of each, and serves them to pullers.

    trainer ──Publish(manifest, segment)──▶ adopt: check, keep the manifest beside the segment
                                              │ VersionAvailable
                                              ▼
                                          scheduler ──PullVersion──▶ worker ──GetManifest──▶ map the segment, or
                                                                        └──GetChunks──▶ a credit stream of chunks

Pullers on other machines are told of one another (``relay_tree.py``), so that the bytes sent from this machine do not
grow with their number; chunks are sent as deltas to those that hold another version (``delta_source.py``). The spare
that the trainer prepares for the next version is mapped before that version is published (``mapped.py``).

The server holds no bytes of its own, so it can die at any moment: the next one adopts the segments that its predecessor
left in shared memory and announces the newest. A segment that turns out to be damaged is dropped, and its publisher,
told of the server again, publishes its present version once more.

Of a version that lies on several machines (``Manifest.sources``) this is the first one's server. It takes the version
when the shares on all others are sealed (``share_holders.py``), and tells pullers where they are.
"""

from __future__ import annotations

from pathlib import Path

from actors.core.actor import Actor, concurrent, handles
from actors.core.errors import AskError
from actors.core.registered import RegisteredActor
from actors.core.watch import Down
from actors.protocol.failures import Acknowledged
from actors.protocol.services import LookupService, RegisterService, ServiceChanged, ServiceFound
from actors.protocol.weights import (
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
from actors.weights.chunk_server import ChunkServer, NotHeld
from actors.weights.errors import SourceLost
from actors.weights.mapped import Mapped
from actors.weights.memory import PARALLEL_BYTES, STEP_BYTES, warm
from actors.weights.relay_tree import RelayTree, nodes_of
from actors.weights.segments import host_id, own_site
from actors.weights.share_holders import ShareHolders
from transport.address import ActorAddress


class WeightServer(ChunkServer, RegisteredActor):
    """Serves the newest ``limits.versions_held`` versions of one job."""

    def __init__(self, args: RoleArgs) -> None:
        super().__init__(args)
        self._trees: dict[int, RelayTree] = {}
        self._apart: set[frozenset[str]] = set()
        """Pairs of nodes of which one could not feed the other; see ``RelayTree``."""
        self._forget_s = 0.0
        """Time at which pairs in ``_apart`` are tried again."""

    async def on_start(self) -> None:
        self._take_over()
        service = RegisterService(job=self._job, role="weights", address=self.ctx.self_address)
        await self.keep_registered(self._args.scheduler, service, Acknowledged)
        self._shares = ShareHolders(self.ctx, self._job, self.scheduler)

    async def registered(self) -> None:
        if self._held:
            self._announce()

    @property
    def _metrics(self) -> ActorAddress:
        return self.scheduler.beside(self._args.metrics)

    @handles(Down)
    async def down(self, message: Down) -> None:
        self._shares.lost(message)
        await super().down(message)

    @handles(Publish)
    @concurrent
    async def publish(self, message: Publish) -> Published:
        """Raises:
        RefusedPublish: the manifest or the segment is not as described.
        NotHeld: another machine has not sealed its share, or does not answer.
        """
        manifest, segment = message.manifest, Path(message.path)
        if manifest.sources and manifest.policy_version not in self._held:
            try:
                await self._shares.hold(message)
            except (AskError, SourceLost) as error:
                raise NotHeld(f"version {manifest.policy_version} is not whole: {error}") from error
        if manifest.policy_version not in self._held:
            self._adopt(manifest, segment)
        return Published(policy_version=manifest.policy_version, newest=self.newest)

    def _adopt(self, manifest: Manifest, segment: Path) -> None:
        newest_before = self.newest
        self._hold(manifest, segment)
        self._trees = {version: tree for version, tree in self._trees.items() if version in self._held}
        if manifest.policy_version > newest_before:
            self._announce()
            if manifest.total_bytes >= PARALLEL_BYTES and not manifest.sources:
                self.ctx.start_task(
                    self._enter_next(manifest.policy_version, segment), "enter the next version's pages"
                )

    async def _enter_next(self, version: int, segment: Path) -> None:
        """Enter the pages of the next version's spare, which the trainer prepares some time after this version."""
        while version == self.newest:
            await self.ctx.sleep(self.ctx.limits.weights_settle_s)
            if version == self.newest and (coming := self._mapped.coming(segment)) is not None:
                await self._enter(coming)
                return

    async def _enter(self, mapped: Mapped) -> None:
        """Enter all pages, in steps, so that other work gets the thread in between."""
        size = len(mapped.view)
        for start in range(0, size, STEP_BYTES):
            await self.ctx.run_blocking(warm, mapped.view, start, min(size, start + STEP_BYTES))
        mapped.entered = True

    def _announce(self) -> None:
        available = VersionAvailable(
            job=self._job, policy_version=self.newest, weights=self.ctx.self_address, oldest=min(self._held)
        )
        self.ctx.ref(self.scheduler.address).tell(available)

    @handles(QueryVersions)
    @concurrent
    async def query_versions(self, message: QueryVersions) -> Versions:
        """Let go what is not whole any more: a trainer whose ranks are elsewhere now publishes it again."""
        spread = {version: held for version, held in self._held.items() if held[1].sources}
        whole = await self._shares.whole([manifest for _, manifest in spread.values()])
        for version, held in spread.items():
            if version not in whole and self._held.get(version) is held:
                self._let_go(version)
        return Versions(held=tuple(sorted(self._held)), sent_bytes=self._sent_bytes)

    @handles(GetManifest)
    async def get_manifest(self, message: GetManifest) -> ManifestReply:
        version = self.newest if message.policy_version < 0 else message.policy_version
        segment, manifest = self._held.get(version, (Path(), None))
        place = None
        if message.puller is not None and message.avoid is not None:  # whether ``version`` is held or already retired
            self._apart.add(nodes_of(message.puller, message.avoid))
        elsewhere = message.host != host_id() or (manifest is not None and manifest.sources)
        if manifest is not None and message.puller is not None and elsewhere:
            place = self._tree(version).place(message.puller, message.host, message.site, message.avoid)
        return ManifestReply(
            manifest=manifest,
            host=host_id(),
            path=str(segment) if manifest else "",
            feed=place.feed if place else None,
            feed_maps=place.maps if place else False,
            relay=self._job_weights.relay,
            delta=self._job_weights.delta,
            sources=self._shares.addresses(manifest) if manifest else (),
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
        """Drop the segment if it is damaged itself, and have the trainer publish its present version again."""
        version = message.policy_version
        held = self._held.get(version)
        if held is None or not (await self._is_damaged(version) or await self._has_damaged_share(held[1])):
            return
        try:
            scheduler = self.ctx.ref(self.scheduler.address)
            found = await scheduler.ask(LookupService(job=self._job, role="trainer"), ServiceFound)
        except AskError as error:
            self.ctx.log.warning("a segment is damaged; its publisher is not known", version=version, error=str(error))
            return  # the next puller will complain as well
        if self._held.get(version) is not held:
            return
        self.ctx.log.error("a segment is damaged and let go", version=version, segment=held[0].name)
        self._let_go(version)
        if found.address is not None:
            changed = ServiceChanged(job=self._job, role="weights", address=self.ctx.self_address)
            self.ctx.ref(found.address).tell(changed)

    async def _has_damaged_share(self, manifest: Manifest) -> bool:
        """Whether another machine has a share of the version, and finds it damaged or gone."""
        version = manifest.policy_version
        return bool(manifest.sources) and version not in await self._shares.whole([manifest], suspect=version)


def build(args: RoleArgs) -> dict[str, Actor]:
    return {args.name: WeightServer(args)}
