"""Calls of an actor in another process: ours beside another project's, on the same machine in one run.

    PYTHON benchmarks/peers/PEER_calls.py worker COUNT    in the peer's own environment: its round trip, its rate
    benchmarks.data_plane.ask                                        ours, in the same manner

The work is equal: 64 bytes there and back, one at a time, then 64 in flight. The two take turns; medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from benchmarks._command import Result, show
from benchmarks._jobs import hardware, last_line
from benchmarks._processes import on_uvloop
from benchmarks.data_plane.ask import measure

ROUNDS = 3


def compare(ours: list[Result], peers: list[Result]) -> Result:
    """Medians, and how many times as fast we are."""
    rtt, peer_rtt = (statistics.median(run["rtt_p50_us"] for run in runs) for runs in (ours, peers))
    rate, peer_rate = (statistics.median(run["pipelined_per_second"] for run in runs) for runs in (ours, peers))
    return {
        "rtt_p50_us": round(rtt, 1),
        "peer_rtt_p50_us": round(peer_rtt, 1),
        "times_rtt": round(peer_rtt / rtt, 2),
        "pipelined_per_second": round(rate),
        "peer_pipelined_per_second": round(peer_rate),
        "times_pipelined": round(rate / peer_rate, 2),
    }


def main(peer: str, worker: Path, args: list[str]) -> int:
    """Measure both and print; ``worker`` is the peer's script."""
    parser = argparse.ArgumentParser(prog=f"benchmarks.peers.{peer}_calls", description=__doc__)
    parser.add_argument("--python", required=True, help=f"an interpreter that has {peer}")
    parser.add_argument("--json", action="store_true", help="JSON only on stdout")
    parser.add_argument("--count", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args(args)
    result: Result = {"hardware": hardware(), "peer": peer}
    ours: list[Result] = []
    peers: list[Result] = []
    for _ in range(options.rounds):
        peers.append(json.loads(last_line([options.python, str(worker), "worker", str(options.count)], timeout_s=300)))
        ours.append(on_uvloop(measure(options.count)))
    result |= {"version": peers[0]["version"], **compare(ours, peers)}
    show(result, options, _print_table)
    return 0


def _print_table(result: Result) -> None:
    row = "{peer} {version}  round trip {peer_rtt_p50_us} µs, ours {rtt_p50_us} µs, {times_rtt} times as fast"
    print(row.format(**result))
    row = "  64 in flight  {peer_pipelined_per_second:,}/s, ours {pipelined_per_second:,}/s, {times_pipelined} times"
    print(row.format(**result))
