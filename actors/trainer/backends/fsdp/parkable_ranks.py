"""The sharded backend as a training service has it: its state can be parked, every rank's rows at once.

    copy_out   room for a part ─▶ every rank copies its rows there, and hashes them ─▶ hashes of all, in order of ranks
    release    every rank gives its memory back
    restore    every rank takes its rows back, and checks them ─ one finds damage ─▶ all give their memory back

The leader alone knows what has changed since it was stored, since every order is its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from actors.protocol import training
from actors.ranks.errors import RankLost
from actors.trainer.backend import (
    AdamStep,
    BackendSpec,
    Learned,
    LedRanks,
    LossSpec,
    MicroBatch,
    MicroBatchStats,
    StepResult,
    StoredBytes,
)
from actors.trainer.backends.fsdp.core import FsdpCore
from actors.trainer.backends.fsdp.fsdp_backend import FsdpBackend
from actors.trainer.backends.fsdp.orders import CopiedOut, CopyOut, Release, StoredFile, TakeBack
from actors.trainer.backends.fsdp.parked_shards import ParkedShards
from actors.trainer.errors import ParkedStateDamaged, StateParked
from actors.trainer.parking import SUMS, TRAINED, Block, Place, StatePart, StoredPart, place_blocks, size_bytes


class ParkableRanks(FsdpBackend):
    """Implements ``Parkable``; see there for the promises."""

    _shards: ParkedShards
    _versions: dict[str, int]
    _blocks: dict[str, tuple[Block, ...]]
    _stored: StoredBytes
    _sums_are_zero = True
    _released = False

    async def start(self, spec: BackendSpec, *, checkpoint_step: int = 0) -> None:
        try:
            await super().start(spec, checkpoint_step=checkpoint_step)
        except Exception:
            with contextlib.suppress(RankLost):  # so that no rank is in a world that another one has left
                await self.close()
            raise
        self._shards = ParkedShards(self._state)
        self._versions = {TRAINED: 1, SUMS: 1}
        self._blocks = {part: place_blocks(self._shards.lengths(part)) for part in (TRAINED, SUMS)}
        self._stored = super().stored_bytes()

    @property
    def _state(self) -> FsdpCore:
        """The core, whether its state is parked or not."""
        return super()._open

    @property
    def _open(self) -> FsdpCore:
        if self._released:
            raise StateParked("the fsdp backend was called while its state is parked; restore it first")
        return self._state

    @property
    def _parked(self) -> ParkedShards:
        """Our own rows. Raises BackendClosed before ``start`` and after ``close``."""
        assert self._state
        return self._shards

    def stored_bytes(self) -> StoredBytes:
        assert self._state is not None
        return self._stored

    # ------------------------------------------------------------ what changes

    def _changed(self, part: str, *, sums_are_zero: bool) -> None:
        """Note that ``part`` is about to change, or has changed."""
        self._versions[part] += 1
        self._sums_are_zero = sums_are_zero

    def _stepped(self) -> None:
        self._changed(TRAINED, sums_are_zero=True)
        self._changed(SUMS, sums_are_zero=True)

    async def accumulate(self, batch: MicroBatch, loss: LossSpec) -> MicroBatchStats:
        if self._open:
            self._changed(SUMS, sums_are_zero=False)
        return await super().accumulate(batch, loss)

    async def learn(self, batch: MicroBatch, loss: LossSpec, *, backward: bool = True) -> Learned:
        if self._open and backward:
            self._changed(SUMS, sums_are_zero=False)
        return await super().learn(batch, loss, backward=backward)

    async def drop_sums(self) -> None:
        await super().drop_sums()
        self._changed(SUMS, sums_are_zero=True)

    async def step(self, *, weight: float, adam: AdamStep | None = None) -> StepResult:
        result = await super().step(weight=weight, adam=adam)
        self._stepped()
        return result

    async def load(self, directory: Path, *, optimizer: bool = True) -> None:
        await super().load(directory, optimizer=optimizer)
        self._stepped()

    # ------------------------------------------------------------ parking

    @property
    def steps(self) -> int:
        return self._state.steps

    @property
    def keeps_addresses(self) -> bool:
        return self._parked.keeps_addresses

    def fingerprint(self) -> str:
        return self._parked.fingerprint()

    def parts(self) -> tuple[StatePart, ...]:
        sums = () if self._sums_are_zero else self._blocks[SUMS]
        return (
            StatePart(name=TRAINED, version=self._versions[TRAINED], blocks=self._blocks[TRAINED]),
            StatePart(name=SUMS, version=self._versions[SUMS], blocks=sums),
        )

    def resident_bytes(self) -> int:
        return sum(size_bytes(blocks) for blocks in self._blocks.values())

    def released_bytes(self) -> int:
        return self._parked.released_bytes()

    async def copy_out(self, places: Mapping[str, Place], chunk_bytes: int) -> dict[str, tuple[bytes, ...]]:
        files = {part: StoredFile(str(to.path), self._blocks[part], chunk_bytes) for part, to in places.items()}
        assert self._open
        copy = partial(self._shards.copy_out, files)
        own, answers = await self._together(copy, CopyOut(files), CopiedOut, self._limits.service_move_timeout_s)
        of_ranks = [own, *(answer.digests for answer in answers)]
        return {part: tuple(digest for digests in of_ranks for digest in digests[part]) for part in places}

    async def release(self) -> None:
        self._released = True
        limit_s = self._limits.service_move_timeout_s
        await self._together(self._parked.release, Release(), training.Finished, limit_s)

    async def restore(self, stored: Mapping[str, StoredPart]) -> None:
        files = {
            name: StoredFile(str(part.path), part.blocks, part.chunk_bytes, part.hashes)
            for name, part in stored.items()
        }
        take, limit_s = partial(self._parked.restore, files), self._limits.service_move_timeout_s
        try:
            await self._together(take, TakeBack(files), training.Finished, limit_s)
        except ParkedStateDamaged:
            await self.release()
            raise
        self._released = False
        self._changed(TRAINED, sums_are_zero=True)
        self._changed(SUMS, sums_are_zero=SUMS not in stored)

    async def forget_place(self, memory: memoryview) -> None:
        """Do nothing: no memory is pinned."""


def build(ranks: LedRanks) -> ParkableRanks:
    """The leader of those ranks."""
    return ParkableRanks(
        ranks.followers,
        ranks.limits,
        replicas=ranks.replicas,
        context=ranks.context,
        offload=ranks.offload,
        host=ranks.host,
    )
