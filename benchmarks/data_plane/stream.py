"""What a credit stream carries, against a raw socket that sends as fast as libzmq takes it, over TCP, two processes.

    here ◀── Item × N ── benchmarks/data_plane/_echo.py     ours: credit in items and bytes, offsets, a typed item each
    here ◀── bytes × N ─ a ROUTER                the limit: pyzmq, the same loop, the same drain, libzmq's own bound

Twice: small items, where each item's own cost is all there is, and chunks, where the bytes are. Ours and the raw
stream take turns; medians.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from time import perf_counter
from typing import Final

import zmq

from actors.core.ref import ActorRef
from benchmarks import _baseline
from benchmarks._baseline import Ratio
from benchmarks._command import Result, command_line, show
from benchmarks._jobs import hardware
from benchmarks._processes import cpu_s, on_uvloop
from benchmarks.data_plane import _curve
from benchmarks.data_plane._echo import GO, Flow, Item, RawSocket, new_system
from benchmarks.data_plane.ask import echo
from transport.transport import Lane

ROUNDS: Final = 5
SMALL_BYTES: Final = 64
CHUNK_BYTES: Final = 1 << 20
SMALL_CREDIT: Final = 1024
CHUNK_CREDIT: Final = 32
RATIOS: Final = (
    Ratio("items.ratio", floor=0.0, tolerance=0.2),
    Ratio("chunks.ratio", floor=0.0, tolerance=0.2),
)
SHORT: Final = ("--items", "8192", "--chunks", "256")


class RawStream:
    """Asks a ROUTER for frames and counts them."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        socket = self._context.socket(zmq.DEALER)
        _curve.secure_dialer(socket)
        socket.connect(endpoint)
        self._socket = RawSocket(socket, self._take)
        self._left = 0
        self._done: asyncio.Future[None] | None = None

    def _take(self, _frames: list[bytes]) -> None:
        self._left -= 1
        if not self._left and self._done is not None:
            self._done.set_result(None)

    async def take(self, count: int, size_bytes: int) -> None:
        self._left, self._done = count, asyncio.get_running_loop().create_future()
        self._socket.send([GO, str(count).encode(), str(size_bytes).encode()])
        await self._done

    def close(self) -> None:
        self._socket.close()
        self._context.term()


async def take_ours(ref: ActorRef, count: int, size_bytes: int, lane: Lane, credit: int) -> None:
    """Read a stream to its end."""
    taken = 0
    question = Flow(items=count, size_bytes=size_bytes)
    async with ref.stream(question, Item, 60.0, credit_items=credit, lane=lane) as items:
        async for _ in items:
            taken += 1
    assert taken == count, "a stream ends with all of its items, or raises"


async def measure(items: int, chunks: int) -> Result:
    """Small items, then chunks."""
    with echo("actor") as other, echo("source") as source:
        raw = RawStream(source.words[0])
        system = new_system("here")
        await system.start()
        try:
            ref = system.ref(other.address)
            small = await _take_turns(ref, raw, items, SMALL_BYTES, Lane.MESSAGE, SMALL_CREDIT)
            large = await _take_turns(ref, raw, chunks, CHUNK_BYTES, Lane.BULK, CHUNK_CREDIT)
        finally:
            await system.stop()
            raw.close()
    for found in (small, large):
        found["gb_per_second"] = round(found["per_second"] * found["bytes"] / 1e9, 3)
        found["raw_gb_per_second"] = round(found["raw_per_second"] * found["bytes"] / 1e9, 3)
    return {"items": small, "chunks": large}


async def _take_turns(ref: ActorRef, raw: RawStream, count: int, size: int, lane: Lane, credit: int) -> Result:
    ours: list[float] = []
    raws: list[float] = []
    used_s = 0.0
    await take_ours(ref, max(1, count // 8), size, lane, credit)
    await raw.take(max(1, count // 8), size)
    for _ in range(ROUNDS):
        before, began = cpu_s(), perf_counter()
        await take_ours(ref, count, size, lane, credit)
        ours.append(count / (perf_counter() - began))
        used_s += cpu_s() - before
        began = perf_counter()
        await raw.take(count, size)
        raws.append(count / (perf_counter() - began))
    rate, raw_rate = statistics.median(ours), statistics.median(raws)
    return {
        "bytes": size,
        "per_second": round(rate),
        "raw_per_second": round(raw_rate),
        "ratio": round(rate / raw_rate, 3),
        "consumer_cpu_us": round(used_s * 1e6 / (ROUNDS * count), 2),
    }


def main(args: list[str]) -> int:
    """Measure and print."""
    parser = command_line("stream", __doc__)
    parser.add_argument("--items", type=int, default=50_000, help="small items of each round")
    parser.add_argument("--chunks", type=int, default=1000, help="chunks of 1 MiB of each round")
    _curve.add_option(parser)
    _baseline.add_options(parser)
    options = parser.parse_args(args)
    machine = hardware()
    found = _curve.plain_and_secure(lambda: on_uvloop(measure(options.items, options.chunks)), options)
    result = {"hardware": machine, **found}
    code = _baseline.settle(result, _curve.baseline_name("stream", options), RATIOS, options)
    show(result, options, _print_table)
    return code


def _print_table(result: Result) -> None:
    for name in ("items", "chunks"):
        row = "{bytes:>8} bytes    ours {per_second:,}/s  raw {raw_per_second:,}/s  ratio {ratio}"
        print(f"{name:<7}" + row.format(**result[name]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
