"""Pulling a version: map it when it lies on this machine, else fetch its chunks; verified either way.

    manifest ──same machine as the server──▶ map the segment ──▶ verify every chunk ──▶ views
        │                                                                                 ▲
        ├──── a neighbour pulls it already ──▶ map the neighbour's verified file ─────────┘
        └──── else ──▶ chunks or deltas from the server, or from a puller that has them ──▶ verify, put in place ─┐
                                      ▲──────────────── what is missing or corrupt ───────────────────────────────┘

Chunks are received on the loop, verified and placed on the actor's own thread; a bounded number waits in between.

A version that lies on several machines (``Manifest.sources``) is fetched from all of them at once, on the trainer's
machine too: the file that lies there is a part of it.

They are placed in a segment of this machine's shared memory (``holding.py``): neighbours map it, pullers elsewhere are
fed from it, the next delta is applied to it, and a puller that was killed finds it again. A pull that breaks off keeps
what it has. A server whose chunks stay corrupt is told so: the damage may lie in its segment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
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
from actors.weights.errors import CorruptSegment, SourceLost, VersionNotHeld
from actors.weights.holding import HeldVersions, Holding, mapped_holding, open_holding
from actors.weights.manifest import SegmentViews, check_manifest, same_layout
from actors.weights.memory import SegmentWriter
from actors.weights.segments import held_path, host_id, own_site
from transport.address import ActorAddress
from transport.transport import Lane

WINDOW_CHUNKS: Final = 8
"""Most chunks under way to a puller; half of them may wait between its loop and its thread."""


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
    """Bytes that came over the network for the version: 0 if it was mapped, few if as deltas."""
    adapter_of: str = ""
    """Identity of the base model if the version is an adapter; empty for a whole model."""

    def close(self) -> None:
        """Drop the views; the memory is freed with the last of them."""
        self.tensors.clear()


class WeightClient:
    """Pulls versions on behalf of one actor; one pull at a time.

    ``serve``, called for each pull, has the versions in ``held`` passed on to others, and returns the serving actor.
    """

    def __init__(self, ctx: Context, job: str, serve: Callable[[], Awaitable[ActorAddress]] | None = None) -> None:
        self._ctx = ctx
        self._job = job
        self._serve = serve
        self._served_by: ActorAddress | None = None
        self._writer = SegmentWriter()
        self._leaving: list[Holding] = []
        """Former versions, whose memory has not been given back yet."""
        self.held = HeldVersions()

    async def pull(self, weights: ActorAddress, policy_version: int) -> PulledWeights:
        """Fetch and verify ``policy_version`` (-1: the newest) from the server at ``weights``.

        Raises:
            VersionNotHeld: the server has retired it; ask for the newest.
            CorruptSegment: bytes do not match their hashes after every retry.
            NoRoom: this machine's shared memory is full.
            AskError: the server could not be reached in time; a later call resumes.
            SourceLost: a machine that has a share of the version is gone; a later call resumes.
        """
        started_s = self._ctx.now()
        passes_on = self._served_by is not None and policy_version >= 0  # as the version before was
        try:
            named = await self._named(policy_version) if passes_on else None
            reply = await self._locate(weights, policy_version, named)
            if reply.host == host_id() and not reply.sources:
                holding = await self._ctx.run_blocking(mapped_holding, _manifest(reply), Path(reply.path))
                if holding is not None:
                    return self._pulled(holding, started_s, mapped=True)
            elif reply.relay and not passes_on and self._serve is not None:
                version = _manifest(reply).policy_version
                reply = await self._locate(weights, version, await self._named(version))
            holding = await self._fetch(weights, reply)
        finally:
            self.held.expect(-1)
        return self._pulled(holding, started_s, mapped=not holding.own)

    async def _named(self, policy_version: int) -> ActorAddress | None:
        """Expect ``policy_version``, and return the address to which others may be sent at once to get it."""
        if self._serve is not None:
            self._served_by = await self._serve()
        self.held.expect(policy_version)
        return self._served_by

    def close(self) -> None:
        """Free this client's shared memory, but for an unfinished version, with which its next life goes on."""
        for holding in self.held.values():
            holding.release()
        self.held.clear()
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
        """The manifest, and where ``puller``, to which others may be sent, gets its chunks."""
        question = GetManifest(
            job=self._job, policy_version=policy_version, puller=puller, host=host_id(), site=own_site(), avoid=avoid
        )
        reply = await self._ctx.ref(weights).ask(question, ManifestReply)
        if reply.manifest is None:
            raise VersionNotHeld(f"the weight server does not hold version {policy_version}")
        check_manifest(reply.manifest)
        return reply

    async def _fetch(self, weights: ActorAddress, reply: ManifestReply) -> Holding:
        """Fetch all of a version, from the feeds that the server names, at last from the server itself."""
        manifest = _manifest(reply)
        holding: Holding | None = None
        feed, maps = reply.feed or weights, reply.feed_maps
        for _ in range(self._ctx.limits.chunk_retries):
            try:
                if maps:
                    holding = await self._map_neighbours(feed, manifest)
                else:
                    holding = await self._open(manifest, reply)
                    await self._fetch_missing(weights, feed, holding, reply)
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
            await self._fetch_missing(weights, weights, holding, reply)
            if holding.whole:
                return await self._keep(holding)
        self._ctx.ref(weights).tell(SegmentDamaged(job=self._job, policy_version=manifest.policy_version))
        raise CorruptSegment(f"version {manifest.policy_version}: chunks {sorted(holding.missing)[:8]} stay corrupt")

    async def _open(self, manifest: Manifest, reply: ManifestReply) -> Holding:
        """The holding of a version, with the chunks that this or an earlier life has fetched."""
        version = manifest.policy_version
        holding = self.held.get(version)
        if holding is not None and holding.manifest == manifest:
            return holding
        for other in [v for v, held in self.held.items() if v == version or not held.whole]:
            self.held.pop(other).discard()
        path = held_path(Path(reply.path), self._ctx.self_address.name)
        first = not self.held  # then other files there are of earlier lives
        holding = await self._ctx.run_blocking(open_holding, manifest, path, self._writer, first=first)
        self.held[version] = holding
        self.held.notify()
        return holding

    async def _map_neighbours(self, neighbour: ActorAddress, manifest: Manifest) -> Holding | None:
        """The version in the file of another puller on this machine, once that has fetched and verified all of it."""
        question = GetSegment(job=self._job, policy_version=manifest.policy_version)
        patience_s = self._ctx.limits.pull_timeout_s
        ready = await self._ctx.ref(neighbour).ask(question, SegmentReady, timeout_s=patience_s)
        return await self._ctx.run_blocking(mapped_holding, manifest, Path(ready.path), verified=True)

    async def _fetch_missing(
        self, weights: ActorAddress, feed: ActorAddress, holding: Holding, reply: ManifestReply
    ) -> None:
        """Fetch what is missing: of a version on several machines from all of them at once, or all from another puller.

        Raises:
            SourceLost: a machine that has a part of it is gone.
        """
        base = self._base(holding.manifest) if reply.delta and holding.takes_deltas else None
        from_sources = reply.sources if feed == weights else ()
        shares = missing_by_source(holding.manifest, holding.missing, from_sources, feed)
        results = await asyncio.gather(  # what the others have is kept
            *(self._fetch_from(source, holding, chunks, base) for source, chunks in shares.items()),
            return_exceptions=True,
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result
        if from_sources and None in from_sources and holding.missing:
            lost = [name for name, at in zip(holding.manifest.sources, from_sources, strict=False) if at is None]
            raise SourceLost(
                f"version {holding.manifest.policy_version}: {len(holding.missing)} of its "
                f"{len(holding.manifest.chunk_hashes)} chunks are on machines that are gone ({', '.join(lost)}); tried "
                "again until they are back or the next version is there"
            )

    async def _fetch_from(
        self, feed: ActorAddress, holding: Holding, wanted: Sequence[int], base: Holding | None
    ) -> None:
        """Fetch the chunks ``wanted`` from one feed."""
        if not wanted:
            return
        request = GetChunks(
            job=self._job,
            policy_version=holding.manifest.policy_version,
            chunks=np.array(wanted, dtype=np.int32),
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
        """The newest whole version of the same layout, to take deltas against."""
        whole = [held for held in self.held.values() if held.whole and same_layout(held.manifest, manifest)]
        return max(whole, key=lambda held: held.manifest.policy_version, default=None)

    async def _keep(self, holding: Holding) -> Holding:
        """Put the whole version in place of former ones, and start to make room for the next."""
        manifest = holding.manifest
        if holding.own and not holding.named:
            await self._ctx.run_blocking(self._writer.finish, holding.path)
            holding.has_its_name()
        formers = [former for former in self.held.values() if former is not holding]
        self.held.clear()
        for former in formers:  # an unfinished one, even of this version, would have no owner any more
            former.end() if former.named else former.discard()
        self._leaving += formers
        self.held[manifest.policy_version] = holding
        self.held.notify()
        self._ctx.start_task(self._make_room(holding), "make room for the next version")
        return holding

    async def _make_room(self, holding: Holding) -> None:
        """Free the memory of former versions and prepare the next one's: either takes longer than a copy."""
        await self._ctx.sleep(self._ctx.limits.weights_settle_s)
        await self._ctx.run_blocking(self._release)
        await self._ctx.run_blocking(self._writer.forget_taken)
        if holding.own:
            await self._ctx.run_blocking(self._writer.prepare, holding.path, holding.manifest.total_bytes)

    def _release(self) -> None:
        """Drop the last references to former versions, and so their mappings; slow, so pulls do it off the loop."""
        while self._leaving:
            self._leaving.pop().release()


def missing_by_source(
    manifest: Manifest, missing: Iterable[int], sources: Sequence[ActorAddress | None], feed: ActorAddress
) -> dict[ActorAddress, list[int]]:
    """Who is asked for which of the chunks ``missing``; without ``sources`` it is ``feed`` for all."""
    if not sources:
        return {feed: sorted(missing)}
    asked: dict[ActorAddress, list[int]] = {}
    for index in sorted(missing):
        source = sources[manifest.chunk_sources[index]]
        if source is not None:
            asked.setdefault(source, []).append(index)
    return asked


def _manifest(reply: ManifestReply) -> Manifest:
    assert reply.manifest is not None, "checked when it came"
    return reply.manifest
