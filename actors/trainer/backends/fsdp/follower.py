"""A rank that follows: it obeys one order at a time, on a thread of its own, and decides nothing."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

import msgspec

from actors.host.host_memory import keep_freed_memory
from actors.host.thread_pool import let_waiting_threads_rest
from actors.protocol.training import (
    Accumulate,
    Accumulated,
    Finished,
    Save,
    Score,
    Scored,
    Step,
    Stepped,
    Valued,
    Values,
)
from actors.trainer.backend import BackendSpec
from actors.trainer.backends.fsdp.orders import (
    Answer,
    Begin,
    Begun,
    Meeting,
    Order,
    Restore,
    WriteRows,
    decode_order,
    encode,
    remove_meeting,
)
from actors.trainer.backends.remote_errors import failed
from actors.trainer.errors import BackendClosed
from actors.weights.segments import host_id

if TYPE_CHECKING:
    from actors.trainer.backends.fsdp.core import FsdpCore


class FsdpFollower:
    """Implements ``Follower``. What goes wrong in an order is its answer, and its leader says what becomes of it."""

    def __init__(self, rank: int, size: int) -> None:
        let_waiting_threads_rest()
        keep_freed_memory(one_arena=True)
        self._rank = rank
        self._size = size
        self._thread = ThreadPoolExecutor(1, "train")
        self._core: FsdpCore | None = None
        self._meeting: Meeting | None = None

    async def serve(self, order: bytes) -> bytes:
        decoded = decode_order(order)
        try:
            answer = await asyncio.get_running_loop().run_in_executor(self._thread, self._obey, decoded)
        except Exception as error:  # noqa: BLE001  the leader is told, and decides
            answer = failed(error)
        return encode(answer)

    def _obey(self, order: Order) -> Answer:
        if isinstance(order, Begin):
            return self._begin(order)
        core = self._core
        if core is None:
            raise BackendClosed(f"rank {self._rank} was given an order before it was told to begin")
        match order:
            case Score():
                return Scored(core.score(order.batch, order.temperature, order.reference))
            case Values():
                return Valued(core.values(order.batch))
            case Accumulate():
                return Accumulated(core.accumulate(order.batch, order.loss))
            case Step():
                return Stepped(core.step(order.weight))
            case WriteRows():
                core.write_rows(Path(order.path))
            case Save():
                core.save(Path(order.directory))
            case Restore():
                core.restore(order)
            case _:
                assert_never(order)
        return Finished()

    def _begin(self, order: Begin) -> Begun:
        from actors.trainer.backends.fsdp.core import FsdpCore

        if order.meeting.size != self._size:
            raise ValueError(f"rank {self._rank} is one of {self._size}, and its leader speaks of {order.meeting.size}")
        self._meeting = order.meeting
        spec = msgspec.json.decode(order.spec, type=BackendSpec, dec_hook=_path)
        self._core = FsdpCore(spec, order.meeting, self._rank)
        return Begun(host_id())

    async def close(self) -> None:
        if self._core is not None:
            core, self._core = self._core, None
            await asyncio.get_running_loop().run_in_executor(self._thread, core.close)
        self._thread.shutdown(wait=False)
        if self._meeting is not None:
            remove_meeting(self._meeting)


def _path(kind: type, value: object) -> object:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise ValueError(f"expected {kind.__name__}, got {type(value).__name__}")
