"""Pulling a version: map it when it lies on this machine, else fetch its chunks; verified either way.

    manifest ──same machine as the server──▶ map the segment ──▶ verify every chunk ──▶ views
        │                                                                                 ▲
        ├──── a neighbour pulls it already ──▶ map its file, which it has verified ───────┘
        └──── else ──▶ chunks or deltas from the server, or from a puller that has them ──▶ verify, put in place ─┐
                                      ▲──────────────── what is missing or corrupt ───────────────────────────────┘

Receiving is the loop's, verifying and placing the actor's own thread's; a bounded number of chunks is between them.

What comes over the network lies in a segment of this machine's shared memory (``holding.py``): neighbours map it,
pullers elsewhere are fed from it, the next delta is applied to it, and a puller that was killed finds it again. A pull
that breaks off keeps what it has. A server whose chunks stay corrupt is told so: the damage may lie in its segment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from actors.core.context import Context
from actors.core.errors import AskError
from actors.protocol.weights import (
    Chunk,
    GetChunks,
    GetManifest,
    GetSegment,
    Manifest,
    ManifestReply,
    SegmentDamaged,
    SegmentReady,
)
from actors.weights.errors import CorruptSegment, VersionNotHeld
from actors.weights.holding import Holding, Shelf, mapped_holding, open_holding
from actors.weights.manifest import SegmentViews, check_manifest, same_layout
from actors.weights.memory import SegmentWriter
from actors.weights.segments import held_path, host_id, own_site
from transport.address import ActorAddress
from transport.transport import Lane

WINDOW_CHUNKS: Final = 8
"""Chunks under way to a puller; half of them may be between its loop and its thread."""


@dataclass(frozen=True, slots=True)
class PulledWeights:
    """Holds a whole, verified version. ``tensors``: read-only views; bfloat16 comes as uint16, named in ``dtypes``."""

    policy_version: int
    tensors: dict[str, np.ndarray]
    dtypes: dict[str, str]
    bytes: int
    seconds: float
    mapped: bool
    wire_bytes: int = 0
    """What came over the network for it: nothing if it was mapped, little if as deltas."""
    adapter_of: str = ""
    """Identity of the model beside which it is an adapter; empty: it is a whole model."""

    def close(self) -> None:
        """Let go of the views; the memory goes with the last of them."""
        self.tensors.clear()


class WeightClient:
    """Pulls versions on behalf of one actor; one pull at a time.

    ``serve`` sees to it that the versions on ``shelf`` are passed on to others, and says by whom. Called for each pull.
    """

    def __init__(self, ctx: Context, job: str, serve: Callable[[], Awaitable[ActorAddress]] | None = None) -> None:
        self._ctx = ctx
        self._job = job
        self._serve = serve
        self._served_by: ActorAddress | None = None
        self._writer = SegmentWriter()
        self._leaving: list[Holding] = []
        """Versions that are over, and whose memory has not been given back."""
        self.shelf = Shelf()

    async def pull(self, weights: ActorAddress, policy_version: int) -> PulledWeights:
        """Fetch and verify ``policy_version`` (-1: the newest) from the server at ``weights``.

        Raises:
            VersionNotHeld: the server has retired it; ask for the newest.
            CorruptSegment: bytes do not match their hashes after every retry.
            NoRoom: this machine's shared memory is full.
            AskError: the server could not be reached in time; a later call resumes.
        """
        started_s = self._ctx.now()
        passes_on = self._served_by is not None and policy_version >= 0  # as with the version before
        try:
            named = await self._named(policy_version) if passes_on else None
            reply = await self._locate(weights, policy_version, named)
            if reply.host == host_id():
                holding = await self._ctx.run_blocking(mapped_holding, _manifest(reply), Path(reply.path))
                if holding is not None:
                    return self._pulled(holding, started_s, mapped=True)
            elif reply.relay and not passes_on and self._serve is not None:
                version = _manifest(reply).policy_version
                reply = await self._locate(weights, version, await self._named(version))
            holding = await self._fetch(weights, reply)
        finally:
            self.shelf.expect(-1)
        return self._pulled(holding, started_s, mapped=not holding.own)

    async def _named(self, policy_version: int) -> ActorAddress | None:
        """Who is named to the server as having ``policy_version`` soon: others may be sent there at once."""
        if self._serve is not None:
            self._served_by = await self._serve()
        self.shelf.expect(policy_version)
        return self._served_by

    def close(self) -> None:
        """Give back what this client has in shared memory; what is unfinished waits for its next life."""
        for holding in self.shelf.values():
            holding.release()
        self.shelf.clear()
        self._release()
        self._writer.close()

    def _pulled(self, holding: Holding, started_s: float, *, mapped: bool) -> PulledWeights:
        manifest = holding.manifest
        return PulledWeights(
            policy_version=manifest.policy_version,
            tensors=SegmentViews(manifest, holding.view, holding.path),
            dtypes={entry.name: entry.dtype for entry in manifest.tensors},
            bytes=manifest.total_bytes,
            seconds=self._ctx.now() - started_s,
            mapped=mapped,
            wire_bytes=holding.wire_bytes,
            adapter_of=manifest.adapter_of,
        )

    async def _locate(
        self,
        weights: ActorAddress,
        policy_version: int,
        puller: ActorAddress | None = None,
        avoid: ActorAddress | None = None,
    ) -> ManifestReply:
        """The manifest, and where ``puller``, who may be named to others, gets the chunks."""
        question = GetManifest(
            job=self._job, policy_version=policy_version, puller=puller, host=host_id(), site=own_site(), avoid=avoid
        )
        reply = await self._ctx.ref(weights).ask(question, ManifestReply)
        if reply.manifest is None:
            raise VersionNotHeld(f"the weight server does not hold version {policy_version}")
        check_manifest(reply.manifest)
        return reply

    async def _fetch(self, weights: ActorAddress, reply: ManifestReply) -> Holding:
        """All of a version, from whoever is named, at last from the server itself."""
        manifest = _manifest(reply)
        holding: Holding | None = None
        feed, maps = reply.feed or weights, reply.feed_maps
        for _ in range(self._ctx.limits.chunk_retries):
            try:
                if maps:
                    holding = await self._map_neighbours(feed, manifest)
                else:
                    holding = await self._open(manifest, reply)
                    await self._fetch_missing(feed, holding, reply)
            except AskError:
                if feed == weights:
                    raise
            if holding is not None and holding.whole:
                return await self._keep(holding)
            if feed != weights:
                reply = await self._locate(weights, manifest.policy_version, self._served_by, avoid=feed)
                feed, maps = reply.feed or weights, reply.feed_maps
        holding = await self._open(manifest, reply)
        if feed != weights:
            await self._fetch_missing(weights, holding, reply)
            if holding.whole:
                return await self._keep(holding)
        self._ctx.ref(weights).tell(SegmentDamaged(job=self._job, policy_version=manifest.policy_version))
        raise CorruptSegment(f"version {manifest.policy_version}: chunks {sorted(holding.missing)[:8]} stay corrupt")

    async def _open(self, manifest: Manifest, reply: ManifestReply) -> Holding:
        """What there is of a version, on the shelf or of an earlier life; nothing at first."""
        version = manifest.policy_version
        holding = self.shelf.get(version)
        if holding is not None and holding.manifest == manifest:
            return holding
        for other in [v for v, held in self.shelf.items() if v == version or not held.whole]:
            self.shelf.pop(other).discard()
        path = held_path(Path(reply.path), self._ctx.self_address.name)
        first = not self.shelf  # what else lies there is of earlier lives
        holding = await self._ctx.run_blocking(open_holding, manifest, path, self._writer, first=first)
        self.shelf[version] = holding
        self.shelf.notify()
        return holding

    async def _map_neighbours(self, neighbour: ActorAddress, manifest: Manifest) -> Holding | None:
        """The file of a puller on this machine, once it has all of the version, and has verified it where it lies."""
        question = GetSegment(job=self._job, policy_version=manifest.policy_version)
        patience_s = self._ctx.limits.pull_timeout_s
        ready = await self._ctx.ref(neighbour).ask(question, SegmentReady, timeout_s=patience_s)
        return await self._ctx.run_blocking(mapped_holding, manifest, Path(ready.path), verified=True)

    async def _fetch_missing(self, feed: ActorAddress, holding: Holding, reply: ManifestReply) -> None:
        base = self._base(holding.manifest) if reply.delta and holding.takes_deltas else None
        if holding.whole:
            return
        request = GetChunks(
            job=self._job,
            policy_version=holding.manifest.policy_version,
            chunks=np.array(sorted(holding.missing), dtype=np.int32),
            base=-1 if base is None else base.manifest.policy_version,
        )
        stream = self._ctx.ref(feed).stream(
            request, Chunk, timeout_s=self._ctx.limits.pull_timeout_s, credit_items=WINDOW_CHUNKS, lane=Lane.BULK
        )
        landing: asyncio.Task[None] | None = None
        waiting: list[Chunk] = []
        try:
            async with stream as chunks:
                async for chunk in chunks:
                    if chunk.index in holding.missing:
                        waiting.append(chunk)
                    if landing is not None and (landing.done() or len(waiting) >= WINDOW_CHUNKS // 2):
                        await self._landed(landing)
                        landing = None
                    if landing is None and waiting:
                        landing = asyncio.create_task(self._land(holding, waiting, base), name="land chunks")
                        waiting = []
        finally:
            if landing is not None:
                await self._landed(landing)
            if waiting:
                await self._land(holding, waiting, base)

    async def _landed(self, landing: asyncio.Task[None]) -> None:
        async with asyncio.timeout(self._ctx.limits.blocking_call_s):
            await landing

    async def _land(self, holding: Holding, chunks: list[Chunk], base: Holding | None) -> None:
        holding.landed(chunks, await self._ctx.run_blocking(holding.land, chunks, base))

    def _base(self, manifest: Manifest) -> Holding | None:
        """The version to take deltas against."""
        whole = [held for held in self.shelf.values() if held.whole and same_layout(held.manifest, manifest)]
        return max(whole, key=lambda held: held.manifest.policy_version, default=None)

    async def _keep(self, holding: Holding) -> Holding:
        """Put the whole version in place of the one before it; room is made for the one after it."""
        manifest = holding.manifest
        if holding.own and not holding.named:
            await self._ctx.run_blocking(self._writer.finish, holding.path)
            holding.has_its_name()
        formers = [former for former in self.shelf.values() if former is not holding]
        self.shelf.clear()
        for former in formers:  # what was begun and is not needed now, be it of this version, would have no owner
            former.end() if former.named else former.discard()
        self._leaving += formers
        self.shelf[manifest.policy_version] = holding
        self.shelf.notify()
        self._ctx.start_task(self._make_room(holding), "make room for the next version")
        return holding

    async def _make_room(self, holding: Holding) -> None:
        """Give back the memory of what is over and prepare the next: either takes the system longer than a copy."""
        await self._ctx.sleep(self._ctx.limits.weights_settle_s)
        await self._ctx.run_blocking(self._release)
        await self._ctx.run_blocking(self._writer.forget_taken)
        if holding.own:
            await self._ctx.run_blocking(self._writer.prepare, holding.path, holding.manifest.total_bytes)

    def _release(self) -> None:
        """The last reference goes here, and with it the mapping: on the actor's thread, not on the loop."""
        while self._leaving:
            self._leaving.pop().release()


def _manifest(reply: ManifestReply) -> Manifest:
    assert reply.manifest is not None, "checked when it came"
    return reply.manifest
