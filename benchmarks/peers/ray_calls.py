"""Calls of an actor: Ray, beside ours. See ``_calls.py``; run here it compares, with ``worker`` it measures Ray.

Ray's round trip is ``ray.get``; its rate is the better of ``ray.get`` on 64 at a time and 64 asyncio callers.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

IN_FLIGHT = 64
PAYLOAD = b"x" * 64


def worker(count: int) -> None:
    """In Ray's own environment: measure and print."""
    ray: Any = __import__("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)

    class Echo:
        async def ping(self, payload: bytes) -> bytes:
            return payload

    echo = ray.remote(Echo).remote()
    for _ in range(100):
        ray.get(echo.ping.remote(PAYLOAD))
    trips: list[float] = []
    for _ in range(count):
        began = perf_counter()
        ray.get(echo.ping.remote(PAYLOAD))
        trips.append((perf_counter() - began) * 1e6)
    began = perf_counter()
    for _ in range(count // IN_FLIGHT):
        ray.get([echo.ping.remote(PAYLOAD) for _ in range(IN_FLIGHT)])
    in_lists = count // IN_FLIGHT * IN_FLIGHT / (perf_counter() - began)

    async def callers() -> float:
        async def one_after_the_other() -> None:
            for _ in range(count // IN_FLIGHT):
                await echo.ping.remote(PAYLOAD)

        began = perf_counter()
        await asyncio.gather(*(one_after_the_other() for _ in range(IN_FLIGHT)))
        return count // IN_FLIGHT * IN_FLIGHT / (perf_counter() - began)

    rate = max(in_lists, asyncio.run(callers()))
    ray.shutdown()
    found = {"version": ray.__version__, "rtt_p50_us": statistics.median(trips), "pipelined_per_second": rate}
    print(json.dumps(found), flush=True)


def main(args: list[str]) -> int:
    """Compare."""
    from benchmarks.peers import _calls

    return _calls.main("ray", Path(__file__), args)


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(int(sys.argv[2]))
    else:
        sys.exit(main(sys.argv[1:]))
