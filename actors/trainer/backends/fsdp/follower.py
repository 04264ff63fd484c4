"""A follower rank: it obeys one order at a time, on a thread of its own, and decides nothing."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

from actors.host.host_memory import keep_freed_memory
from actors.host.thread_pool import let_waiting_threads_rest
from actors.protocol import training
from actors.ranks.shared import SharedFollower
from actors.trainer.backend import BackendSpec
from actors.trainer.backends.fsdp.orders import (
    Begin,
    Begun,
    CopiedOut,
    CopyOut,
    FsdpAnswer,
    FsdpOrder,
    Measure,
    Measured,
    Meeting,
    Release,
    Restore,
    Sealed,
    SealShare,
    TakeBack,
    UseRecompute,
    WriteRows,
    WriteShare,
    decode_order,
    encode,
    hold_meeting,
    remove_meeting,
)
from actors.trainer.backends.remote_errors import failed
from actors.trainer.errors import BackendClosed

if TYPE_CHECKING:
    from actors.trainer.backends.fsdp.core import FsdpCore
    from actors.trainer.backends.fsdp.parked_shards import ParkedShards


class FsdpFollower:
    """Implements ``Follower``. A failed order is answered with its error, and the leader decides what follows."""

    def __init__(self, rank: int, size: int) -> None:
        let_waiting_threads_rest()
        keep_freed_memory(one_arena=True)
        self._rank = rank
        self._size = size
        self._thread = ThreadPoolExecutor(1, "train")
        self._core: FsdpCore | None = None
        self._parked: ParkedShards
        self._meeting: Meeting | None = None

    async def serve(self, order: bytes) -> bytes:
        decoded = decode_order(order)
        try:
            answer = await asyncio.get_running_loop().run_in_executor(self._thread, self._obey, decoded)
        except Exception as error:  # noqa: BLE001  the leader is told, and decides
            answer = failed(error)
        return encode(answer)

    def _obey(self, order: FsdpOrder) -> FsdpAnswer:
        if isinstance(order, Begin):
            return self._begin(order)
        core = self._core
        if core is None:
            raise BackendClosed(f"rank {self._rank} was given an order before it was told to begin")
        match order:
            case training.ScoreCall():
                return training.TokensScored(core.score(order.batch, order.temperature, order.reference))
            case training.ValuesCall():
                return training.Valued(core.values(order.batch))
            case training.AccumulateCall():
                return training.Accumulated(core.accumulate(order.batch, order.loss))
            case training.LearnCall():
                return training.TargetsLearned(core.learn(order.batch, order.loss, order.backward))
            case Measure():
                use = core.measure(order.batch, order.loss)
                return Measured(use.peak_bytes, use.free_bytes, use.seconds)
            case UseRecompute():
                core.use_recompute(order.way)
            case training.DropSums():
                core.drop_sums()
            case training.StepCall():
                return training.Stepped(core.step(order.weight, order.adam))
            case WriteRows():
                core.write_rows(Path(order.path))
            case WriteShare():
                core.write_share(Path(order.path))
            case SealShare():
                return Sealed(core.seal_share(Path(order.path), order.chunk_bytes))
            case training.SaveCall():
                core.save(Path(order.directory))
            case Restore():
                core.restore(order)
            case CopyOut():
                return CopiedOut(self._parked.copy_out(order.files))
            case Release():
                self._parked.release()
            case TakeBack():
                self._parked.restore(order.files)
            case _:
                assert_never(order)
        return training.Finished()

    def _begin(self, order: Begin) -> Begun:
        from actors.trainer.backends.fsdp.core import FsdpCore
        from actors.trainer.backends.fsdp.parked_shards import ParkedShards

        if order.meeting.size != self._size:
            raise ValueError(f"rank {self._rank} is one of {self._size}, and its leader speaks of {order.meeting.size}")
        self._meeting = order.meeting
        hold_meeting(order.meeting)
        self._core = FsdpCore(BackendSpec.from_json(order.spec), order.meeting, self._rank)
        self._parked = ParkedShards(self._core)
        return Begun()

    async def close(self) -> None:
        if self._core is not None:
            core, self._core = self._core, None
            await asyncio.get_running_loop().run_in_executor(self._thread, core.close)
        self._thread.shutdown(wait=False)
        if self._meeting is not None:
            remove_meeting(self._meeting)


def shared(rank: int, size: int) -> SharedFollower:
    """A follower for the bundles of several jobs."""
    return SharedFollower(partial(FsdpFollower, rank, size))
