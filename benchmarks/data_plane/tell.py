"""What a one-way message costs, over TCP between two processes, and whether many senders get their turn.

    here ── Told × window, GetCounts ─▶ _echo.py                    ours: mailbox bound, terms, traces, as in any role
    here ── bytes × window, GO ───────▶ a ROUTER that counts    the limit: pyzmq, the same loop, the same drain
    64 × ActorSystem ── Told ─────────▶ _echo.py                    fan-in: is anything lost, is anybody late

A tell is bounded by the mailbox it goes to, so the sender asks after each window how far the receiver is, and keeps at
most two windows under way. Ours and the raw socket take turns; medians.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from time import perf_counter
from typing import Final

import zmq

from actors.core.message import Done
from actors.core.ref import ActorRef
from actors.core.system import ActorSystem
from benchmarks import _baseline
from benchmarks._baseline import Ratio
from benchmarks._command import Result, command_line, show
from benchmarks._jobs import hardware
from benchmarks._processes import cpu_s, on_uvloop
from benchmarks.data_plane import _curve
from benchmarks.data_plane._echo import GO, Counts, GetCounts, RawSocket, StartCount, Told, new_system
from benchmarks.data_plane.ask import Other, echo
from transport.transport import SendOutcome
from transport.zmq.context import new_context

ROUNDS: Final = 5
WINDOW: Final = 1024
"""Tells between two looks at the receiver: half a mailbox at most, with the one before."""
BURST: Final = 64
"""Tells in one turn of the loop: a sender that never yields would measure a queue."""
CONNECTIONS: Final = 64
RATIOS: Final = (Ratio("ratio", floor=0.0, tolerance=0.2), Ratio("fan_in.slowest_share", floor=0.5, tolerance=1.0))
SHORT: Final = ("--count", "16384")


class TellRefused(Exception):
    """A tell was not taken although the window was kept: the figures would be of something else."""


async def tell_many(ref: ActorRef, count: int, sender: int, window: int) -> None:
    """Tell ``count`` times, with at most two windows under way; returns when the receiver has handled all."""
    looking: asyncio.Task[Counts] | None = None
    for number in range(count):
        if ref.tell(Told(sender=sender)) is not SendOutcome.QUEUED:
            raise TellRefused(f"tell {number} of {count}")
        if number % window == window - 1:
            if looking is not None:
                await looking
            looking = asyncio.create_task(ref.ask(GetCounts(), Counts, 60.0))
        if number % BURST == BURST - 1:
            await asyncio.sleep(0)
    if looking is not None:
        await looking
    await ref.ask(GetCounts(), Counts, 60.0)


class RawSink:
    """Sends to a ROUTER that counts, in the same windows."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        socket = self._context.socket(zmq.DEALER)
        _curve.secure_dialer(socket)
        socket.connect(endpoint)
        self._socket = RawSocket(socket, self._answer)
        self._waiting: list[asyncio.Future[int]] = []
        self._payload = Told().payload

    def _answer(self, frames: list[bytes]) -> None:
        self._waiting.pop(0).set_result(int(frames[0]))

    def _look(self) -> asyncio.Future[int]:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._socket.send([GO])
        return future

    async def send_many(self, count: int, window: int) -> None:
        looking: asyncio.Future[int] | None = None
        for number in range(count):
            while not self._socket.try_send([self._payload]):  # noqa: ASYNC110 - libzmq tells no one
                await asyncio.sleep(0)
            if number % window == window - 1:
                if looking is not None:
                    await looking
                looking = self._look()
            if number % BURST == BURST - 1:
                await asyncio.sleep(0)
        if looking is not None:
            await looking
        await self._look()

    def close(self) -> None:
        self._socket.close()
        self._context.term()


async def measure(count: int) -> Result:
    """One sender against the raw socket, in turns; then the fan-in."""
    with echo("actor") as other, echo("sink") as sink:
        raw = RawSink(sink.words[0])
        try:
            one = await _one_sender(other, raw, count)
        finally:
            raw.close()
        return {**one, "fan_in": await fan_in(other, CONNECTIONS, max(1, count // CONNECTIONS))}


async def _one_sender(other: Other, raw: RawSink, count: int) -> Result:
    system = new_system("here")
    await system.start()
    ref = system.ref(other.address)
    ours: list[float] = []
    raws: list[float] = []
    sent_s = took_s = 0.0
    lost = 0
    try:
        await tell_many(ref, WINDOW, 0, WINDOW)
        for _ in range(ROUNDS):
            await ref.ask(StartCount(expected=count), Done)
            here, there, began = cpu_s(), other.cpu_s(), perf_counter()
            await tell_many(ref, count, 0, WINDOW)
            ours.append(count / (perf_counter() - began))
            sent_s, took_s = sent_s + cpu_s() - here, took_s + other.cpu_s() - there
            lost += count - (await ref.ask(GetCounts(), Counts)).total
            began = perf_counter()
            await raw.send_many(count, WINDOW)
            raws.append(count / (perf_counter() - began))
    finally:
        await system.stop()
    rate, raw_rate = statistics.median(ours), statistics.median(raws)
    return {
        "per_second": round(rate),
        "raw_per_second": round(raw_rate),
        "ratio": round(rate / raw_rate, 3),
        "lost": lost,
        "sender_cpu_us": round(sent_s * 1e6 / (ROUNDS * count), 2),
        "receiver_cpu_us": round(took_s * 1e6 / (ROUNDS * count), 2),
    }


async def fan_in(other: Other, connections: int, each: int) -> Result:
    """As many systems as connections, all telling one actor at once."""
    context = None if _curve.keys() else new_context()  # a context has one allow-list
    systems = [new_system(f"sender-{number}", context) for number in range(connections)]
    for system in systems:
        await system.start()
    try:
        return await _all_at_once(systems, other, each)
    finally:
        for system in systems:
            await system.stop()
        if context is not None:
            context.term()


async def _all_at_once(systems: list[ActorSystem], other: Other, each: int) -> Result:
    refs = [system.ref(other.address) for system in systems]
    count = each * len(refs)
    for ref in refs:
        await ref.ask(StartCount(expected=count), Done)  # links, too
    window = max(1, WINDOW // len(refs))
    began = perf_counter()
    await asyncio.gather(*(tell_many(ref, each, number, window) for number, ref in enumerate(refs)))
    took_s = perf_counter() - began
    counts = await refs[0].ask(GetCounts(), Counts)
    slowest = min((counts.at_half.get(number, 0) for number in range(len(refs))), default=0)
    return {
        "connections": len(refs),
        "per_second": round(count / took_s),
        "lost": count - counts.total,
        "slowest_share": round(slowest * len(refs) / max(1, sum(counts.at_half.values())), 3),
    }


def main(args: list[str]) -> int:
    """Measure and print."""
    parser = command_line("tell", __doc__)
    parser.add_argument("--count", type=int, default=100_000, help="tells of each round")
    _curve.add_option(parser)
    _baseline.add_options(parser)
    options = parser.parse_args(args)
    machine = hardware()
    found = _curve.plain_and_secure(lambda: on_uvloop(measure(options.count)), options)
    result = {"hardware": machine, **found}
    code = _baseline.settle(result, _curve.baseline_name("tell", options), RATIOS, options)
    show(result, options, _print_table)
    return code or int(bool(result["lost"] or result["fan_in"]["lost"]))


def _print_table(result: Result) -> None:
    print("one sender    ours {per_second:,}/s  raw {raw_per_second:,}/s  ratio {ratio}  lost {lost}".format(**result))
    print(
        "{connections} senders    {per_second:,}/s  lost {lost}  slowest share {slowest_share}".format(
            **result["fan_in"]
        )
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
