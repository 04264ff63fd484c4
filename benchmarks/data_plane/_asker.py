"""The client of `bench control`, in a process of its own: it asks again and again, and notes how long each answer took.

``python -m benchmarks.data_plane._asker`` and

    ENDPOINT EVERY_MS OP…    over the control socket, the ops in turn
    ENDPOINT EVERY_MS        a plain DEALER and a ROUTER that sends everything back

Says ``ready`` once it has been answered; ends with its standard input, and then says in one line of JSON what it noted.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Self

import zmq

from actors.control.client import ControlClient
from actors.core.kernel.loop_lag import LoopLag
from benchmarks._processes import on_uvloop, until_input_ends
from benchmarks.data_plane._echo import RawSocket
from configs.limits import DEFAULT_LIMITS

Ask = Callable[[str], Awaitable[object]]


class RawAsker:
    """A DEALER with one question under way."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        socket = self._context.socket(zmq.DEALER)
        socket.connect(endpoint)
        self._answered: asyncio.Future[None]
        self._socket = RawSocket(socket, lambda _: self._answered.set_result(None))

    async def ask(self, _: str) -> None:
        self._answered = asyncio.get_running_loop().create_future()
        self._socket.send([b"x" * 64])
        async with asyncio.timeout(DEFAULT_LIMITS.control_timeout_s):
            await self._answered

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._socket.close()
        self._context.term()


async def _ask_until(ended: asyncio.Event, ask: Ask, ops: list[str], every_s: float) -> dict[str, list[float]]:
    """Milliseconds of each answer, by op."""
    took_ms: dict[str, list[float]] = {op: [] for op in ops}
    for op in itertools.cycle(ops):
        if ended.is_set():
            return took_ms
        began = time.perf_counter()
        await ask(op)
        took_ms[op].append(round((time.perf_counter() - began) * 1000, 3))
        await asyncio.sleep(every_s)
    raise AssertionError("a cycle has no end")


async def _serve(endpoint: str, every_s: float, ops: list[str]) -> None:
    lag = LoopLag()
    async with AsyncExitStack() as stack:
        if ops:
            client = await stack.enter_async_context(ControlClient(endpoint))
            ask: Ask = client.call
        else:
            ask = (await stack.enter_async_context(RawAsker(endpoint))).ask
        for op in ops or ["raw"]:
            await ask(op)
        print("ready", flush=True)
        lag.start()
        ended = asyncio.Event()
        asking = asyncio.create_task(_ask_until(ended, ask, ops or ["raw"], every_s))
        await until_input_ends()
        ended.set()
        took_ms = await asking
    lag.stop()
    own = lag.over_last_probes()
    print(json.dumps({"took_ms": took_ms, "own_lag_p99_ms": round(1000 * own.p99_s, 2) if own else 0.0}), flush=True)


if __name__ == "__main__":
    on_uvloop(_serve(sys.argv[1], float(sys.argv[2]) / 1000, sys.argv[3:]))
