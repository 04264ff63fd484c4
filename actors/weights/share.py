"""Serves a machine's share of each version, in the process of the first rank there of a trainer's copy of the weights.

    weights ──Publish──▶ is the share sealed here? ─▶ held ─▶ Published        pullers ──GetChunks──▶ its chunks

The weight server alone says which versions there are; a share answers it, and pullers that it has sent here. The
scheduler knows it as ``weights.rank<n>``, also its next life, which a rank that follows a leader does without.
"""

from __future__ import annotations

from pathlib import Path

from actors.core.actor import Actor, concurrent, handles
from actors.core.registered import RegisteredActor
from actors.protocol.failures import Acknowledged
from actors.protocol.services import RegisterService
from actors.protocol.weights import Publish, Published, QueryVersions, Versions
from actors.roles import AnyArgs, RoleArgs
from actors.weights.chunk_server import ChunkServer, RefusedPublish
from actors.weights.shares import share_name, share_path
from configs.names import leader_of
from transport.address import ActorAddress


class Share(ChunkServer, RegisteredActor):
    """Holds the bytes that the ranks on this machine have written."""

    def __init__(self, args: RoleArgs) -> None:
        super().__init__(args)
        self.source = share_name(args.rank)

    async def on_start(self) -> None:
        self._take_over()
        offer = RegisterService(job=self._job, role=self.source, address=self.ctx.self_address)
        await self.keep_registered(self._args.scheduler, offer, Acknowledged)

    @property
    def _metrics(self) -> ActorAddress:
        return self.scheduler.beside(self._args.metrics)

    @handles(Publish)
    async def publish(self, message: Publish) -> Published:
        """Raises:
        RefusedPublish: the share has not been written here.
        """
        manifest = message.manifest
        version = manifest.policy_version
        if self.source not in manifest.sources:
            raise RefusedPublish(f"version {version}: {self.source} is none of its sources {manifest.sources}")
        for newer in [held for held in self._held if held > version]:  # of a trainer's life that was lost
            self._let_go(newer)
        if version in self._held and self._held[version][1] != manifest:  # written anew, with other numbers
            del self._held[version]
            self._mapped.let_go(self._held)
            self._sources.clear()
        if version not in self._held:
            try:
                path = share_path(Path(message.path), self.source)
            except OSError as error:
                raise RefusedPublish(f"version {version}: {error}") from error
            self._hold(manifest, path)
        return Published(policy_version=version, newest=self.newest)

    @handles(QueryVersions)
    @concurrent
    async def query_versions(self, message: QueryVersions) -> Versions:
        if await self._is_damaged(message.suspect):
            self.ctx.log.error("a share is damaged and let go", version=message.suspect)
            self._let_go(message.suspect)
        return Versions(held=tuple(sorted(self._held)), sent_bytes=self._sent_bytes)


def beside(args: AnyArgs) -> dict[str, Actor]:
    """The share that a rank's process hosts, by name; none where a copy of the weights lies on one machine."""
    if not isinstance(args, RoleArgs) or leader_of(args.name) != "trainer":
        return {}
    return {share_name(args.rank): Share(args)} if args.job_config.trainer.nodes > 1 else {}
