"""Whether a vLLM worker that streams into Headrace is as fast as vLLM's AsyncLLM consumed in the process that asks.

    worker: EngineCore ── TokenReport, one an engine step ──▶ here: Scheduler ─▶ ledger ─▶ journal.db      ours
    a process of vLLM: EngineCore ── its own sockets ──▶ another: AsyncLLM ─▶ lists of tokens              AsyncLLM

The same prompts, lengths and model; log-probabilities on both sides; at temperature 0 the tokens are compared. The two
take turns, and who waits is idle; medians. A round lasts from the first prompt until the last token is in the ledger,
or in AsyncLLM's list.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import msgspec.json
import numpy as np

from actors.core.actor import Actor, Delivery, handles
from actors.core.ref import ActorRef
from actors.core.system import ActorSystem
from actors.ledger.batch import SampleState
from actors.ledger.journal import SqliteJournal
from actors.ledger.ledger import Ledger
from actors.protocol.batches import BatchIssued, IssueBatch
from actors.protocol.metrics import Event, Spans
from actors.protocol.rewards import SourcedPrompt
from actors.protocol.work import SamplingParams
from actors.roles import RoleArgs
from actors.scheduler.scheduler import Scheduler
from benchmarks._command import Result, command_line, measured, show
from benchmarks._jobs import BenchmarkFailed, hardware
from benchmarks._processes import beside, cpu_s, on_uvloop
from benchmarks.data_plane._echo import new_system
from benchmarks.data_plane.tokens import WAIT_S, said
from benchmarks.vllm._vllm import (
    BLOCK_TOKENS,
    GROUP,
    KV_CACHE_BYTES,
    WORKER,
    Cost,
    GetCost,
    Work,
    async_llm_args,
    meter_at,
    worker_args,
)
from configs.run_files import JOURNAL
from configs.schema import JobConfig

JOB: Final = "bench"
ROUNDS: Final = 5
Samples = list[list[int]]
"""Token ids of each sample of a round, siblings together."""


def job_of(work: Work, rounds: int) -> JobConfig:
    """A step for each round; the bound on staleness lets one version serve all of them."""
    return JobConfig.model_validate(
        {
            "name": JOB,
            "steps": rounds,
            "model": {"source": "hf", "path": "unused"},
            "data": {"source": "jsonl", "path": "unused", "max_prompt_tokens": work.prompt_tokens},
            "reward": {"kind": "exact_match"},
            "algorithm": {"group_size": GROUP, "prompts_per_step": work.streams // GROUP},
            "rollout": {
                "engine": "vllm",
                "workers": 1,
                "device": "cpu",
                "threads": 1,
                "max_tokens": work.tokens,
                "max_running": work.streams,
                "temperature": work.temperature,
                "engine_options": {"kv_cache_memory_bytes": KV_CACHE_BYTES, "block_size": BLOCK_TOKENS},
            },
            "sync": {"mode": "async", "max_staleness": rounds},
        }
    )


class Unread(Actor):
    """Takes what a metrics actor would."""

    @handles(Spans)
    async def spans(self, message: Spans) -> None: ...

    @handles(Event)
    async def event(self, message: Event) -> None: ...


class Awaited(Scheduler):
    """Tells when the ledger holds so many tokens: looking again and again would be a cost, and come late."""

    expected = 0

    def __init__(self, job: JobConfig, run_dir: Path) -> None:
        super().__init__(job, run_dir)
        self._entered = asyncio.Event()

    async def token_report(self, batch: list[Delivery]) -> None:
        await super().token_report(batch)
        if self.counters.tokens >= self.expected:
            self._entered.set()

    async def entered(self, tokens: int) -> None:
        """Until there are so many, of all rounds."""
        self.expected = tokens
        self._entered.clear()
        if self.counters.tokens < tokens:
            await self._entered.wait()


class Ours:
    """A scheduler here, and a vLLM worker in a process of its own."""

    def __init__(self, work: Work, system: ActorSystem, scheduler: Awaited, meter: ActorRef) -> None:
        self._work = work
        self._scheduler, self._ref = scheduler, system.ref(system.address("scheduler"))
        self._meter = meter
        self._step = 0

    async def round(self, number: int) -> Result:
        """Seconds, and CPU seconds by who used them. ``worker_cpu_s`` is all of its process but vLLM's own steps."""
        work, step = self._work, self._step
        self._step += 1
        prompts = [SourcedPrompt(step * 1_000_000 + i, ids, "", b"") for i, ids in enumerate(work.prompts(number))]
        batch = IssueBatch(
            job=JOB, step=step, group_size=GROUP, prompts=prompts,
            sampling=SamplingParams(max_tokens=work.tokens, temperature=work.temperature),
        )  # fmt: skip
        before, used_s, began_s = await self._cost(), cpu_s(), time.perf_counter()
        await self._ref.ask(batch, BatchIssued)
        async with asyncio.timeout(WAIT_S):
            await self._scheduler.entered(self._step * work.total_tokens)
        seconds, collector_s, after = time.perf_counter() - began_s, cpu_s() - used_s, await self._cost()
        vllm_s = after.vllm_s - before.vllm_s
        return {
            "seconds": seconds,
            "collector_cpu_s": collector_s,
            "worker_cpu_s": after.process_s - before.process_s - vllm_s,
            "vllm_cpu_s": vllm_s,
        }

    async def _cost(self) -> Cost:
        return await self._meter.ask(GetCost(), Cost)


@asynccontextmanager
async def ours(work: Work, rounds: int, model: Path, directory: Path) -> AsyncIterator[Ours]:
    """A worker that has registered. ``rounds``: how many there will be."""
    job = job_of(work, rounds)
    directory.mkdir(parents=True)
    system = new_system("head")
    await system.start()
    try:
        scheduler = Awaited(job, directory)
        await system.spawn("scheduler", scheduler)
        await system.spawn("metrics", Unread())
        address = system.address("scheduler")
        role = RoleArgs(
            role="rollout", name=WORKER, node="bench", job=job.model_dump_json(), model_path=str(model),
            run_dir=str(directory), scheduler=address, metrics=system.address("metrics"),
        )  # fmt: skip
        with beside("vllm._vllm", "worker", worker_args(role)) as process:
            meter = system.ref(meter_at(await said(process)))
            yield Ours(work, system, scheduler, meter)
    finally:
        await system.stop()


async def in_journal(directory: Path, rounds: int) -> list[Samples]:
    """What the journal of a finished run holds, a round each.

    Raises:
        BenchmarkFailed: not all samples have ended.
    """
    journal = SqliteJournal(directory / JOURNAL, JOB)
    floor, events = journal.read()
    ledger = Ledger(floor)
    ledger.restore(events)
    await journal.close()
    found: list[Samples] = []
    for step in range(rounds):
        batch = ledger.batches[step]
        if not (batch.state == SampleState.FINISHED).all():
            raise BenchmarkFailed(f"not all samples of round {step} are in the journal: {ledger.count_states()}")
        rows = np.arange(len(batch), dtype=np.int32)
        found.append([batch.ragged(rows[row : row + 1]).tokens.tolist() for row in rows])
    return found


class AsyncLlm:
    """vLLM's AsyncLLM in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    async def round(self, number: int) -> tuple[Result, Samples]:
        """Seconds, the consumer's CPU seconds, and its tokens."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()
        found: dict[str, Any] = msgspec.json.decode(await said(self._process))
        tokens = found.pop("tokens")
        return found, tokens


@asynccontextmanager
async def async_llm(work: Work, model: Path) -> AsyncIterator[AsyncLlm]:
    """One that is ready."""
    with beside("vllm._vllm", "async_llm", async_llm_args(work, model)) as process:
        line = await said(process)
        if line != "ready":
            raise BenchmarkFailed(f"AsyncLLM says {line!r}")
        yield AsyncLlm(process)


def equal_fraction(work: Work, one: list[Samples], other: list[Samples]) -> float:
    """The fraction of samples with the same tokens on both sides.

    Raises:
        BenchmarkFailed: they are not as many, or not as long as they were to be.
    """
    for samples in (*one, *other):
        if len(samples) != work.streams or any(len(sample) != work.tokens for sample in samples):
            raise BenchmarkFailed(f"{len(samples)} samples came, not all of {work.tokens} tokens")
    pairs = [pair for a, b in zip(one, other, strict=True) for pair in zip(a, b, strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


def median(rounds: list[Result], name: str) -> float:
    """The median of one figure over all rounds."""
    return statistics.median(float(row[name]) for row in rounds)


def per_token(work: Work, rounds: list[Result], name: str) -> float:
    """Microseconds a token."""
    return round(median(rounds, name) / work.total_tokens * 1e6, 2)


async def _measure(work: Work, rounds: int, directory: Path) -> Result:
    model = work.make_model(directory / "model")
    mine: list[Result] = []
    theirs: list[Result] = []
    samples: list[Samples] = []
    async with contextlib.AsyncExitStack() as stack:
        worker = await stack.enter_async_context(ours(work, rounds + 1, model, directory / "run"))
        peer = await stack.enter_async_context(async_llm(work, model))
        for number in range(rounds + 1):
            mine.append(await worker.round(number))
            cost, said_samples = await peer.round(number)
            theirs.append(cost)
            samples.append(said_samples)
    equal = equal_fraction(work, await in_journal(directory / "run", rounds + 1), samples)
    mine, theirs = mine[1:], theirs[1:]  # the first is for warming up
    ratios = [peer["seconds"] / own["seconds"] for own, peer in zip(mine, theirs, strict=True)]
    return {
        "tokens_per_second": round(work.total_tokens / median(mine, "seconds")),
        "async_llm_tokens_per_second": round(work.total_tokens / median(theirs, "seconds")),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "equal_samples": round(equal, 3),
        "collector_cpu_us_per_token": per_token(work, mine, "collector_cpu_s"),
        "worker_cpu_us_per_token": per_token(work, mine, "worker_cpu_s"),
        "vllm_cpu_us_per_token": per_token(work, mine, "vllm_cpu_s"),
        "async_llm_consumer_cpu_us_per_token": per_token(work, theirs, "consumer_cpu_s"),
        **shape(work, rounds),
    }


def shape(work: Work, rounds: int) -> Result:
    """What was measured."""
    return {
        "rounds": rounds,
        "streams": work.streams,
        "tokens_each": work.tokens,
        "temperature": work.temperature,
        "model": f"{work.layers} layers of {work.hidden}",
    }


def measure(options: argparse.Namespace, directory: Path) -> Result:
    """All of it in ``directory``."""
    machine = hardware()
    return {"hardware": machine, **on_uvloop(_measure(work_of(options), options.rounds, directory))}


def add_options(parser: argparse.ArgumentParser) -> None:
    """What is generated, and how often."""
    usual = Work()
    parser.add_argument("--streams", type=int, default=usual.streams, help=f"samples at once, a multiple of {GROUP}")
    parser.add_argument("--tokens", type=int, default=usual.tokens, help="of each response")
    parser.add_argument("--temperature", type=float, default=usual.temperature)
    parser.add_argument("--hidden", type=int, default=usual.hidden, help="of the model, a multiple of 64")
    parser.add_argument("--layers", type=int, default=usual.layers)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of each side, after one for warming up")


def work_of(options: argparse.Namespace) -> Work:
    """What the command line asks for."""
    if options.streams < GROUP or options.streams % GROUP:
        raise SystemExit(f"--streams {options.streams}: expected a multiple of {GROUP}")
    if options.hidden < 64 or options.hidden % 64:
        raise SystemExit(f"--hidden {options.hidden}: expected a multiple of 64")
    return Work(
        streams=options.streams, tokens=options.tokens, temperature=options.temperature, hidden=options.hidden,
        layers=options.layers,
    )  # fmt: skip


def main(args: list[str]) -> int:
    """Measure and print."""
    parser = command_line("vllm_stream", __doc__)
    add_options(parser)
    options = parser.parse_args(args)
    show(measured(measure, options), options)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
