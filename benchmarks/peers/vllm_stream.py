"""What a token costs between vLLM and who trains on it: vLLM's own server over HTTP, against Headrace's token streams.

    API server ── SSE, an event a token ──▶ client here: lists of tokens and log-probabilities             vLLM's
    worker ── TokenReport, one an engine step ──▶ here: Scheduler ─▶ ledger ─▶ journal.db                    ours

The same vLLM, model, prompts and lengths, log-probabilities on both sides; at temperature 0 the tokens are compared.
The engine is not counted. Counted is, in CPU time of whole processes:

    vLLM's   the API server's process and the client's; not EngineCore's process, though that also packs and sends
    ours     the scheduler's process, journal included, and all of the worker's but the steps of its EngineCore

The server has two ways to stream tokens, and the cheaper one counts. All take turns, and who waits is idle; medians.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from pathlib import Path
from typing import Final

from benchmarks._command import Result, show
from benchmarks._jobs import hardware
from benchmarks._processes import on_uvloop
from benchmarks.peers._vllm_server import ENDPOINTS, client, server, vllm_version
from benchmarks.vllm._vllm import Work
from benchmarks.vllm.vllm_stream import (
    Samples,
    add_options,
    equal_fraction,
    in_journal,
    median,
    ours,
    per_token,
    shape,
    work_of,
)

PARTS: Final = {"ours": ("collector_cpu_s", "worker_cpu_s"), "peer": ("server_cpu_s", "client_cpu_s")}


def figures(work: Work, mine: list[Result], theirs: dict[str, list[Result]]) -> Result:
    """CPU microseconds a token of both sides, by part, and how many times less ours is than the peer's cheaper way."""
    ours_us = sum(per_token(work, mine, part) for part in PARTS["ours"])
    peer_us = {kind: sum(per_token(work, rounds, part) for part in PARTS["peer"]) for kind, rounds in theirs.items()}
    best = min(peer_us, key=lambda kind: peer_us[kind])
    return {
        "cpu_us_per_token": round(ours_us, 2),
        "peer_cpu_us_per_token": round(peer_us[best], 2),
        "times_cpu": round(peer_us[best] / ours_us, 2),
        "collector_cpu_us_per_token": per_token(work, mine, "collector_cpu_s"),
        "worker_cpu_us_per_token": per_token(work, mine, "worker_cpu_s"),
        "vllm_cpu_us_per_token": per_token(work, mine, "vllm_cpu_s"),
        "tokens_per_second": round(work.total_tokens / median(mine, "seconds")),
        "endpoint": best,
        "endpoints": {
            kind: {
                "server_cpu_us_per_token": per_token(work, rounds, "server_cpu_s"),
                "client_cpu_us_per_token": per_token(work, rounds, "client_cpu_s"),
                "engine_cpu_us_per_token": per_token(work, rounds, "engine_cpu_s"),
                "tokens_per_second": round(work.total_tokens / median(rounds, "seconds")),
            }
            for kind, rounds in theirs.items()
        },
    }


async def _measure(work: Work, rounds: int, python: str, directory: Path) -> Result:
    model, log = work.make_model(directory / "model"), directory / "server.log"
    mine: list[Result] = []
    theirs: dict[str, list[Result]] = {kind: [] for kind in ENDPOINTS}
    samples: dict[str, list[Samples]] = {kind: [] for kind in ENDPOINTS}
    async with contextlib.AsyncExitStack() as stack:
        running = stack.enter_context(server(python, work, model, log))
        reader = await stack.enter_async_context(client(running))
        await reader.ready(log)
        worker = await stack.enter_async_context(ours(work, rounds + 1, model, directory / "run"))
        for number in range(rounds + 1):
            mine.append(await worker.round(number))
            for kind in ENDPOINTS:
                cost, tokens = await reader.round(kind, work, number)
                theirs[kind].append(cost)
                samples[kind].append(tokens)
    entered = await in_journal(directory / "run", rounds + 1)
    equal = {kind: round(equal_fraction(work, entered, said), 3) for kind, said in samples.items()}
    for costs in (mine, *theirs.values()):
        del costs[0]  # for warming up
    return {**figures(work, mine, theirs), "equal_samples": equal, **shape(work, rounds)}


def main(args: list[str]) -> int:
    """Measure both and print."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.peers.vllm_stream", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--python", default=sys.executable, help="an interpreter that has vLLM, for the server")
    parser.add_argument("--json", action="store_true", help="JSON only on stdout")
    add_options(parser)
    options = parser.parse_args(args)
    version = vllm_version(options.python)
    if version is None:
        print("vLLM is not installed there; `make vllm` installs it", file=sys.stderr)
        return 2
    machine = hardware()
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        found = on_uvloop(_measure(work_of(options), options.rounds, options.python, Path(scratch)))
    show({"hardware": machine, "peer": "vllm", "version": version, **found}, options)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
