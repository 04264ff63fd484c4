"""Passes on to other pullers the versions that this one has, each chunk as soon as it is verified here.

    server ── chunks ─▶ this puller ── chunks ─▶ pullers on other machines
                              └── the file ────▶ neighbours on this machine, once it is whole

It holds nothing of its own: what is on the client's shelf is to be had here, and who waits for what is let go is told
so, and asks the weight server for somebody else.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from actors.core.actor import Actor, concurrent, handles
from actors.core.context import Context
from actors.core.errors import NameTaken, ReplyError
from actors.protocol.weights import Chunk, GetChunks, GetSegment, SegmentReady
from actors.weights.holding import Holding, Shelf
from actors.weights.manifest import whole_chunk, wrong_chunks
from actors.weights.pace import Pace
from transport.address import ActorAddress


class NotOnTheShelf(ReplyError):
    """This puller does not have that version, or will not have all of it; ask the weight server for another feed."""


class Relay(Actor):
    """Serves ``shelf``, which its puller fills."""

    def __init__(self, shelf: Shelf, send_bytes_per_s: int | None = None) -> None:
        self._shelf = shelf
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
            await self._pace.turn(self.ctx, chunk.data.nbytes)
            yield chunk

    async def _holding(self, version: int) -> Holding:
        if (holding := await self._shelf.until(version, self.ctx.limits.pull_timeout_s)) is None:
            raise NotOnTheShelf(f"version {version} is not here; here are {sorted(self._shelf)}")
        return holding


async def relay_beside(ctx: Context, shelf: Shelf, send_bytes_per_s: int | None = None) -> ActorAddress:
    """The relay of the puller whose context is ``ctx``: the one that lives, or another if that has crashed."""
    own = ctx.self_address
    name = f"{own.name}-relay"
    with contextlib.suppress(NameTaken):  # it lives
        await ctx.spawn(name, Relay(shelf, send_bytes_per_s))
    return ActorAddress(name, own.peer, own.endpoint)


def _chunk(holding: Holding, index: int, base: int) -> Chunk:
    """Read a chunk as the delta that it came as, if that is against ``base``, else as it lies in the file."""
    delta = holding.deltas.get(index)
    if delta is not None and delta.base == base:
        return delta
    return whole_chunk(holding.manifest, holding.view, index)
