"""Calls of an actor: xoscar, beside ours. See ``_calls.py``; here it compares, with ``worker`` it measures xoscar."""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

IN_FLIGHT = 64
PAYLOAD = b"x" * 64

if sys.argv[1:2] == ["worker"]:
    xo: Any = __import__("xoscar")

    class Echo(xo.Actor):
        """Importable by its process: that is how xoscar makes it there."""

        async def ping(self, payload: bytes) -> bytes:
            return payload


async def worker(count: int) -> None:
    """In xoscar's own environment: measure and print."""
    pool = await xo.create_actor_pool("127.0.0.1", n_process=1)
    place = xo.allocate_strategy.ProcessIndex(1)
    echo = await xo.create_actor(Echo, address=pool.external_address, uid="echo", allocate_strategy=place)
    for _ in range(100):
        await echo.ping(PAYLOAD)
    trips: list[float] = []
    for _ in range(count):
        began = perf_counter()
        await echo.ping(PAYLOAD)
        trips.append((perf_counter() - began) * 1e6)

    async def one_after_the_other() -> None:
        for _ in range(count // IN_FLIGHT):
            await echo.ping(PAYLOAD)

    began = perf_counter()
    await asyncio.gather(*(one_after_the_other() for _ in range(IN_FLIGHT)))
    rate = count // IN_FLIGHT * IN_FLIGHT / (perf_counter() - began)
    await pool.stop()
    found = {"version": version("xoscar"), "rtt_p50_us": statistics.median(trips), "pipelined_per_second": rate}
    print(json.dumps(found), flush=True)


def main(args: list[str]) -> int:
    """Compare."""
    from benchmarks.peers import _calls

    return _calls.main("xoscar", Path(__file__), args)


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        asyncio.run(worker(int(sys.argv[2])))
    else:
        sys.exit(main(sys.argv[1:]))
