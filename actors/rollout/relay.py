"""Passes the versions that a puller fetches on to other pullers, each chunk as soon as it is verified here.

    server ── chunks ─▶ this puller ── chunks ─▶ pullers on other machines
                              └── the file ────▶ pullers on this machine, once it is complete

The relay stores nothing itself: it serves the versions that its puller's client holds. A puller that waits for a
version that is released gets an error, and asks the weight server for another source.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from actors.core.actor import Actor, concurrent, handles
from actors.core.context import Context
from actors.core.errors import NameTaken, ReplyError
from actors.protocol.weights import Chunk, GetChunks, GetSegment, SegmentReady
from actors.weights.holding import HeldVersions, Holding
from actors.weights.manifest import whole_chunk, wrong_chunks
from actors.weights.pace import Pace
from transport.address import ActorAddress


class NotOnTheShelf(ReplyError):
    """A puller does not have the version, or will not have all of it: ask the weight server for another source."""


class Relay(Actor):
    """Serves ``held``, which its puller fills."""

    def __init__(self, held: HeldVersions, send_bytes_per_s: int | None = None) -> None:
        self._held = held
        self._pace = Pace(send_bytes_per_s)

    @handles(GetSegment)
    @concurrent
    async def get_segment(self, message: GetSegment) -> SegmentReady:
        holding = await self._holding(message.policy_version)
        if not await holding.until(None, self.ctx.limits.pull_timeout_s):
            raise NotOnTheShelf(f"version {message.policy_version} did not become whole here")
        return SegmentReady(path=str(holding.path))

    @handles(GetChunks)
    @concurrent
    async def get_chunks(self, message: GetChunks) -> AsyncIterator[Chunk]:
        holding = await self._holding(message.policy_version)
        if wrong := wrong_chunks(holding.manifest, message.chunks):
            raise NotOnTheShelf(wrong)
        for index in message.chunks.tolist():
            if not await holding.until(index, self.ctx.limits.pull_timeout_s):
                raise NotOnTheShelf(f"chunk {index} of version {message.policy_version} did not come here")
            chunk = _chunk(holding, index, message.base)
            await self._pace.wait_to_send(self.ctx, chunk.data.nbytes)
            yield chunk

    async def _holding(self, version: int) -> Holding:
        if (holding := await self._held.until(version, self.ctx.limits.pull_timeout_s)) is None:
            raise NotOnTheShelf(f"version {version} is not here; here are {sorted(self._held)}")
        return holding


async def relay_beside(ctx: Context, held: HeldVersions, send_bytes_per_s: int | None = None) -> ActorAddress:
    """The relay of the puller whose context is ``ctx``; it is spawned if there is none or it has crashed."""
    own = ctx.self_address
    name = f"{own.name}-relay"
    with contextlib.suppress(NameTaken):  # there is one already
        await ctx.spawn(name, Relay(held, send_bytes_per_s))
    return ActorAddress(name, own.peer, own.endpoint)


def _chunk(holding: Holding, index: int, base: int) -> Chunk:
    """The chunk as the delta that it came as, if that is against version ``base``; else as it lies in the file."""
    delta = holding.deltas.get(index)
    if delta is not None and delta.base == base:
        return delta
    return whole_chunk(holding.manifest, holding.view, index)
