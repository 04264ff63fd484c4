"""CPU a token of a worker that speaks to a `vllm serve` of yours, beside vLLM's engine in the worker's own process.

    headrace bench own_server --url http://127.0.0.1:8000 --pid PID --model DIRECTORY

PID is that of the server, whose processes are counted with it. Both compute the same requests, after one round to warm
up; seconds are those of all threads. Start the server as docs/guides/own_servers.md says, with --max-model-len 512.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from actors.protocol.work import SamplingParams
from actors.rollout.engine import EngineSpec, GenerationRequest, RolloutEngine
from actors.rollout.engines.server.engine import ServerEngine
from actors.rollout.engines.vllm.engine import VllmEngine
from benchmarks._command import command_line, show
from configs.limits import DEFAULT_LIMITS

_CONTEXT_TOKENS = 512


def _requests(options: argparse.Namespace, first: int, vocabulary: int) -> list[GenerationRequest]:
    sampling = SamplingParams(
        max_tokens=options.tokens, temperature=1.0, stop_token_ids=(), seed=first, top_k=0, top_p=1.0
    )  # fmt: skip
    return [
        GenerationRequest(
            request=first + n, prompt=n, sibling=0, generated=np.empty(0, np.int32), sampling=sampling,
            prompt_ids=np.arange(3 + n, 19 + n, dtype=np.int32) % vocabulary,
        )
        for n in range(options.sequences)
    ]  # fmt: skip


def _cpu_s(pid: int) -> float:
    """Seconds of processor that a process and its children have taken."""
    process = psutil.Process(pid)
    times = [one.cpu_times() for one in [process, *process.children(recursive=True)]]
    return sum(one.user + one.system for one in times)


async def _round(engine: RolloutEngine, requests: list[GenerationRequest]) -> int:
    engine.add(requests)
    tokens = 0
    while engine.has_work:
        tokens += len((await engine.step()).tokens)
    return tokens


async def _measured(engine: RolloutEngine, spec: EngineSpec, options: argparse.Namespace) -> dict[str, float]:
    vocabulary = json.loads((options.model / "config.json").read_text())["vocab_size"]
    await engine.start(spec)
    try:
        await _round(engine, _requests(options, 0, vocabulary))
        own_s, server_s, began_s = _cpu_s(os.getpid()), _cpu_s(options.pid), time.perf_counter()
        tokens = await _round(engine, _requests(options, 1000, vocabulary))
        took_s = time.perf_counter() - began_s
        own_s, server_s = _cpu_s(os.getpid()) - own_s, _cpu_s(options.pid) - server_s
    finally:
        await engine.close()
    figures = {"tokens_per_s": tokens / took_s, "worker_cpu_us_per_token": 1e6 * own_s / tokens}
    return figures | ({"server_cpu_us_per_token": 1e6 * server_s / tokens} if engine.kind == "server" else {})


def main(args: list[str]) -> int:
    """Measure and print."""
    parser = command_line("own_server", __doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--pid", type=int, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256)
    options = parser.parse_args(args)
    asked = {"answer_s": DEFAULT_LIMITS.server_answer_s, "start_s": 10.0, "load_s": DEFAULT_LIMITS.pull_timeout_s}
    sizes: dict[str, Any] = {"max_running": options.sequences, "max_context_tokens": _CONTEXT_TOKENS}
    at = EngineSpec(model_path=options.model, options={"url": options.url, **asked}, **sizes)
    here = EngineSpec(model_path=options.model, threads=1, **sizes)
    found = {"server": asyncio.run(_measured(ServerEngine(), at, options))}
    found["vllm"] = asyncio.run(_measured(VllmEngine(), here, options))
    rows = {f"{kind}_{name}": round(value, 1) for kind, figures in found.items() for name, value in figures.items()}
    show(rows | {"sequences": options.sequences, "tokens": options.tokens}, options)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
