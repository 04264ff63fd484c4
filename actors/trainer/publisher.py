"""Publishes the trainer's weights: exported at once, then offered to the weight server while training goes on.

    step ─▶ publish(v) ─ export (backend thread) ─┬─▶ return: the next step may be opened
                                                   └─▶ Publish ─▶ weight server ─▶ Published(newest)

Invariants
- Versions are immutable: what the server holds, or anything newer, is never published again. So a trainer that
  replays steps publishes nothing until it is past the newest version.
- At most one version is on its way; the next export waits for it.
- If the weight server does not answer, its address is looked up at the scheduler before it is asked again.
- Export runs between optimizer steps only (the trainer's loop calls it), so a segment is never half old, half new.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TypeVar

from actors.core.context import Context
from actors.core.leader import Leader
from actors.core.message import Message
from actors.core.patience import ask_patiently
from actors.protocol.services import LookupService, ServiceFound
from actors.protocol.weights import Manifest, Publish, Published, QueryVersions, Versions
from actors.trainer.backend import TrainBackend
from actors.trainer.room import telling_of_room
from actors.trainer.spans import SpanRecorder
from actors.weights.segments import host_id, segment_path
from transport.address import ActorAddress

R = TypeVar("R", bound=Message)


class Publisher:
    """A publisher serves one life of the trainer. ``newest``: newest version known to be at the server, or -1."""

    def __init__(
        self,
        ctx: Context,
        backend: TrainBackend,
        spans: SpanRecorder,
        *,
        job: str,
        run_dir: Path,
        scheduler: Leader,
    ) -> None:
        self._ctx = ctx
        self._backend = backend
        self._spans = spans
        self._job = job
        self._run_dir = run_dir
        self._scheduler = scheduler
        self._server: ActorAddress | None = None
        self._under_way: asyncio.Task[object] | None = None
        self.newest = -1

    def server_changed(self, address: ActorAddress) -> None:
        """Another server has taken the weights over."""
        self._server = address

    async def find_server(self) -> None:
        """Ask the scheduler until it knows who serves the weights, at most ``limits.ready_timeout_s``."""
        lookup, scheduler = LookupService(job=self._job, role="weights"), self._scheduler
        async with asyncio.timeout(self._ctx.limits.ready_timeout_s):
            while self._server is None:
                found = await ask_patiently(
                    self._ctx, lambda: scheduler.address, lookup, ServiceFound, renew=scheduler.find
                )
                if found.address is not None and self._server is None:
                    self._server = found.address
                elif self._server is None:
                    await self._ctx.sleep(self._ctx.limits.backoff_first_s)

    async def sync(self, version: int) -> None:
        """Learn what the server holds, and publish ``version`` unless it holds that or a newer one."""
        await self.settle()
        versions = await self._ask(QueryVersions(job=self._job), Versions)
        self.newest = max(versions.held, default=-1)
        await self.publish(version)

    async def publish(self, version: int) -> bool:
        """Export ``version`` and offer it in the background. False: the server is past it, nothing was done."""
        await self.settle()
        if version <= self.newest:
            return False
        limits, path = self._ctx.limits, segment_path(self._run_dir, version)
        with self._spans.span("publish", step=version - 1, version=version):
            size = self._backend.stored_bytes().segment
            with telling_of_room(path, f"version {version} of the weights", size):
                manifest = await self._backend.export_segment(
                    path, job=self._job, policy_version=version, chunk_bytes=limits.bulk_chunk_bytes
                )
        self._under_way = self._ctx.start_task(self._offer(manifest, path), f"publish version {version}")
        return True

    async def settle(self) -> None:
        """Wait until nothing is on its way. A failed offer has crashed the actor already."""
        if self._under_way is not None:
            async with asyncio.timeout(2 * self._ctx.limits.publish_timeout_s):  # its own limit comes first
                await self._under_way
            self._under_way = None

    async def _offer(self, manifest: Manifest, path: Path) -> None:
        offer = Publish(manifest=manifest, host=host_id(), path=str(path))
        published = await self._ask(offer, Published)
        self.newest = max(self.newest, published.newest)

    async def _ask(self, message: Message, reply: type[R]) -> R:
        patience_s = self._ctx.limits.publish_timeout_s
        return await ask_patiently(
            self._ctx, self._address, message, reply, renew=self._look_again, patience_s=patience_s
        )

    async def _look_again(self) -> None:
        """Ask the scheduler who serves the weights now: a restarted one does not know that it should tell us."""
        await self._scheduler.find()
        lookup = LookupService(job=self._job, role="weights")
        found = await self._ctx.ref(self._scheduler.address).ask(lookup, ServiceFound)
        if found.address is not None:
            self._server = found.address

    def _address(self) -> ActorAddress:
        assert self._server is not None, "find_server comes first"
        return self._server
