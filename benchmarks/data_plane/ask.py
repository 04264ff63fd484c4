"""What a question and its answer cost, against a raw socket that echoes, over TCP between two processes.

    here ── Ping ─▶ _echo.py ── Pong ─▶ here              ours: deadline, credit, terms, watch, as in any role
    here ── bytes ▶ a ROUTER ── the same bytes ─▶ here    the limit: pyzmq, the same loop, the same drain

Round trips are one at a time and the two sides take turns, so that both see the same machine; then 64 are in flight.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from time import perf_counter
from typing import Final, NamedTuple

import psutil
import zmq

from actors.core.ref import ActorRef
from benchmarks import _baseline
from benchmarks._baseline import Ratio
from benchmarks._command import Result, command_line, show
from benchmarks._jobs import hardware
from benchmarks._processes import beside, cpu_s, on_uvloop
from benchmarks.data_plane import _curve
from benchmarks.data_plane._echo import ECHO, Ping, Pong, RawSocket, new_system
from transport.address import ActorAddress, PeerId

ROUNDS: Final = 8
"""Turns that ours and the raw echo take: what else the machine does in the meantime hits both."""
IN_FLIGHT: Final = 64

RATIOS: Final = (Ratio("ratio_rtt", ceiling=1.6, tolerance=0.15), Ratio("ratio_pipelined", floor=0.0, tolerance=0.2))
SHORT: Final = ("--count", "1024")
"""What `bench all` adds, to be done in seconds."""

Sides = dict[str, list[float]]


class Other(NamedTuple):
    """A ``benchmarks.data_plane._echo`` process."""

    pid: int
    words: list[str]
    """What it says of itself."""

    @property
    def address(self) -> ActorAddress:
        """The address of its Echo actor, if it has one."""
        endpoint, name, incarnation = self.words
        return ActorAddress(ECHO, PeerId(name, int(incarnation)), endpoint)

    def cpu_s(self) -> float:
        """CPU seconds that it has used."""
        times = psutil.Process(self.pid).cpu_times()
        return times.user + times.system


@contextmanager
def echo(kind: str) -> Iterator[Other]:
    """A ``benchmarks.data_plane._echo`` process; it ends with the block."""
    with beside("data_plane._echo", kind) as process:
        assert process.stdout is not None
        yield Other(process.pid, process.stdout.readline().split())


@asynccontextmanager
async def actor_echo() -> AsyncIterator[ActorRef]:
    """A ref of an Echo actor in another process."""
    with echo("actor") as other:
        system = new_system("here")
        await system.start()
        try:
            yield system.ref(other.address)
        finally:
            await system.stop()


class RawEcho:
    """Asks a raw socket: the answers come in order, so a queue of futures is all that it needs."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        socket = self._context.socket(zmq.DEALER)
        _curve.secure_dialer(socket)
        socket.connect(endpoint)
        self._waiting: list[asyncio.Future[None]] = []
        self._answered = 0
        self._socket = RawSocket(socket, self._answer)
        self._payload = Ping().payload

    def _answer(self, _frames: list[bytes]) -> None:
        self._waiting[self._answered].set_result(None)
        self._answered += 1

    async def ask(self) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._socket.send([self._payload])
        await future

    def close(self) -> None:
        self._socket.close()
        self._context.term()


async def round_trips_us(ask: Callable[[], Awaitable[object]], count: int) -> list[float]:
    """Microseconds of ``count`` questions, one after the other."""
    found: list[float] = []
    for _ in range(count):
        asked = perf_counter()
        await ask()
        found.append((perf_counter() - asked) * 1e6)
    return found


async def pipelined_per_second(ask: Callable[[], Awaitable[object]], count: int, in_flight: int) -> float:
    """Questions a second while ``in_flight`` of them are open."""

    async def one_after_the_other() -> None:
        for _ in range(count // in_flight):
            await ask()

    began = perf_counter()
    await asyncio.gather(*(one_after_the_other() for _ in range(in_flight)))
    return count // in_flight * in_flight / (perf_counter() - began)


async def measure(count: int) -> Result:
    """Both sides in turns; medians."""
    with echo("socket") as other:
        async with actor_echo() as ref:
            return await compare(ref, RawEcho(other.words[0]), count)


async def compare(ref: ActorRef, raw: RawEcho, count: int) -> Result:
    """Ours through ``ref``, the limit through ``raw``."""
    try:
        trips, rates, used_s = await _take_turns(ref, raw, count)
    finally:
        raw.close()
    rtt, raw_rtt = statistics.median(trips["ours"]), statistics.median(trips["raw"])
    rate, raw_rate = statistics.median(rates["ours"]), statistics.median(rates["raw"])
    return {
        "rtt_p50_us": round(rtt, 1),
        "raw_rtt_p50_us": round(raw_rtt, 1),
        "ratio_rtt": round(rtt / raw_rtt, 2),
        "rtt_p99_us": round(statistics.quantiles(trips["ours"], n=100)[98], 1),
        "pipelined_per_second": round(rate),
        "raw_pipelined_per_second": round(raw_rate),
        "ratio_pipelined": round(rate / raw_rate, 3),
        "in_flight": IN_FLIGHT,
        "asker_cpu_us": round(used_s * 1e6 / (ROUNDS * (count // IN_FLIGHT * IN_FLIGHT)), 1),
    }


async def _take_turns(ref: ActorRef, raw: RawEcho, count: int) -> tuple[Sides, Sides, float]:
    """Microseconds of each round trip, questions a second of each round, and our CPU seconds in the latter."""

    async def ours() -> Pong:
        return await ref.ask(Ping(), Pong)

    trips: Sides = {"ours": [], "raw": []}
    rates: Sides = {"ours": [], "raw": []}
    used_s = 0.0
    await round_trips_us(ours, 200)
    await round_trips_us(raw.ask, 200)
    for _ in range(ROUNDS):
        trips["ours"] += await round_trips_us(ours, count // ROUNDS)
        trips["raw"] += await round_trips_us(raw.ask, count // ROUNDS)
        before = cpu_s()
        rates["ours"].append(await pipelined_per_second(ours, count, IN_FLIGHT))
        used_s += cpu_s() - before
        rates["raw"].append(await pipelined_per_second(raw.ask, count, IN_FLIGHT))
    return trips, rates, used_s


def main(args: list[str]) -> int:
    """Measure and print."""
    parser = command_line("ask", __doc__)
    parser.add_argument("--count", type=int, default=8000, help="questions one at a time, and in flight in each round")
    _curve.add_option(parser)
    _baseline.add_options(parser)
    options = parser.parse_args(args)
    machine = hardware()
    found = _curve.plain_and_secure(lambda: on_uvloop(measure(options.count)), options)
    result = {"hardware": machine, **found}
    code = _baseline.settle(result, _curve.baseline_name("ask", options), RATIOS, options)
    show(result, options, _print_table)
    return code


def _print_table(result: Result) -> None:
    print("round trip    ours {rtt_p50_us} µs  raw {raw_rtt_p50_us} µs  ratio {ratio_rtt}".format(**result))
    rates = (
        "{in_flight} in flight  ours {pipelined_per_second:,}/s  raw {raw_pipelined_per_second:,}/s"
        "  ratio {ratio_pipelined}"
    )
    print(rates.format(**result))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
