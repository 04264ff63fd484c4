"""What a token costs on its way from a worker into the ledger, with the journal on, over TCP between processes.

    64 workers × 32 sequences ── TokenReport, one an engine step ──▶ here: Scheduler ─▶ ledger ─▶ journal.db     ours
    64 DEALERs                ── as many bytes in as many messages ▶ here: a ROUTER that counts them            raw
                                                                     here: the same tokens written into arrays  copy

The scheduler is the one of a real run, and so are links, codec, lease, ledger and journal; workers have no engine and
send as fast as the link takes it, so that the collector is never idle. ``cpu_us_per_token`` is what the collector's
whole process used, libzmq's and the journal's threads included, until the last token was durable on the disk. In the
end the journal is read and folded into a second ledger, whose tokens are compared with what was sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import zmq

from actors.core.ref import ActorRef
from actors.ledger.batch import SampleState
from actors.ledger.journal import SqliteJournal
from actors.ledger.ledger import Ledger
from actors.protocol.batches import BatchIssued, IssueBatch, SetPaused
from actors.protocol.failures import Acknowledged
from actors.protocol.rewards import SourcedPrompt
from actors.protocol.tokens import TokenReport
from actors.protocol.work import EngineStats, SamplingParams
from actors.scheduler.scheduler import Scheduler
from benchmarks import _baseline
from benchmarks._baseline import Ratio
from benchmarks._command import Result, command_line, show
from benchmarks._jobs import BenchmarkFailed, hardware
from benchmarks._processes import beside, cpu_s, on_uvloop
from benchmarks.data_plane import _curve
from benchmarks.data_plane._echo import RawSocket, new_system
from benchmarks.data_plane._streamers import JOB, logprobs, token_ids
from configs.run_files import JOURNAL
from configs.schema import JobConfig
from transport.codec import encode_body
from transport.envelope import Envelope, Kind, encode_envelope

RATIOS: Final = (Ratio("ratio_cpu", ceiling=math.inf, tolerance=0.5),)
SHORT: Final = ("--tokens", "512")
"""For ``bench all``."""
WAIT_S: Final = 120.0
_LOOK_S: Final = 0.005


@dataclass(frozen=True, slots=True)
class Load:
    """How much is streamed by how many."""

    workers: int = 64
    sequences: int = 32
    tokens: int = 4096
    """Length of each sequence."""
    processes: int = 1
    """Number of processes that the workers live in."""

    @property
    def total_tokens(self) -> int:
        return self.workers * self.sequences * self.tokens

    @property
    def messages(self) -> int:
        return self.workers * self.tokens


async def said(process: subprocess.Popen[str]) -> str:
    """Its next line.

    Raises:
        BenchmarkFailed: it says nothing more.
    """
    assert process.stdout is not None
    async with asyncio.timeout(WAIT_S):
        line = await asyncio.get_running_loop().run_in_executor(None, process.stdout.readline)
    if not line:
        raise BenchmarkFailed(f"a process of streamers ended with {process.wait()}")
    return line.strip()


def go(process: subprocess.Popen[str]) -> None:
    """Let it stream."""
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


async def until(over: Callable[[], bool]) -> None:
    """Look again and again: neither side tells anybody that it is done."""
    async with asyncio.timeout(WAIT_S):
        while not over():  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)


# ------------------------------------------------------------ ours


def job_of(load: Load) -> JobConfig:
    """One step that holds all samples: a group for each worker."""
    return JobConfig.model_validate(
        {
            "name": JOB,
            "steps": 1,
            "model": {"source": "tiny"},
            "data": {"source": "jsonl", "path": "none"},
            "reward": {"kind": "exact_match"},
            "algorithm": {"group_size": load.sequences, "prompts_per_step": load.workers},
            "rollout": {"max_tokens": load.tokens, "max_running": load.sequences},
        }
    )


@asynccontextmanager
async def collector(load: Load, directory: Path) -> AsyncIterator[tuple[Scheduler, ActorRef]]:
    """A scheduler with one batch, and nobody who scores."""
    system = new_system("head")
    await system.start()
    try:
        scheduler = Scheduler(job_of(load), directory, SqliteJournal(directory / JOURNAL, JOB))
        ref = await system.spawn("scheduler.bench", scheduler)
        prompts = [SourcedPrompt(i, np.array([i], np.int32), "", b"") for i in range(load.workers)]
        batch = IssueBatch(
            job=JOB, step=0, group_size=load.sequences, prompts=prompts,
            sampling=SamplingParams(max_tokens=load.tokens),
        )  # fmt: skip
        await ref.ask(batch, BatchIssued)
        yield scheduler, ref
    finally:
        await system.stop()


async def measure_ours(load: Load, directory: Path) -> Result:
    """Stream into a scheduler, and check what it has."""
    async with collector(load, directory) as (scheduler, ref):
        with contextlib.ExitStack() as stack:
            each = load.workers // load.processes
            where = (ref.address.endpoint, ref.address.peer.name, ref.address.peer.incarnation, ref.address.name)
            processes = [
                stack.enter_context(beside("data_plane._streamers", "workers", *where, i * each, each, load.sequences))
                for i in range(load.processes)
            ]
            for process in processes:
                await said(process)
            began, used, thread = time.perf_counter(), cpu_s(), time.thread_time()
            for process in processes:
                go(process)
            await until(lambda: scheduler.counters.tokens >= load.total_tokens)
            await ref.ask(SetPaused(job=JOB, paused=True), Acknowledged)  # answered when all is on the disk
            wall_s, collector_s, loop_s = time.perf_counter() - began, cpu_s() - used, time.thread_time() - thread
            sender_s = sum([float(await said(process)) for process in processes])
        counters = scheduler.counters
        if counters.tokens != load.total_tokens or counters.unknown_rows or counters.gap_rows:
            raise BenchmarkFailed(f"the ledger counts {counters}, {load.total_tokens} tokens were sent")
    await check_journal(directory, load)
    total = load.total_tokens
    return {
        "tokens_per_second": round(total / wall_s),
        "cpu_us_per_token": round(collector_s / total * 1e6, 4),
        "tokens_per_collector_core_second": round(total / collector_s),
        "loop_us_per_token": round(loop_s / total * 1e6, 4),
        "worker_cpu_us_per_token": round(sender_s / total * 1e6, 4),
        "journal_bytes_per_token": round((directory / JOURNAL).stat().st_size / total, 2),
    }


def check(ledger: Ledger, load: Load) -> None:
    """Raises:
    BenchmarkFailed: the ledger does not hold exactly what was sent.
    """
    batch = ledger.batches[0]
    rows = np.arange(len(batch), dtype=np.int32)
    if not (batch.state == SampleState.FINISHED).all():
        raise BenchmarkFailed(f"not all samples are finished: {ledger.count_states()}")
    for row in rows:
        found = batch.ragged(rows[row : row + 1])
        sent = token_ids(int(row) // load.sequences, int(row) % load.sequences, load.tokens)
        if not (np.array_equal(found.tokens, sent) and np.array_equal(found.logprobs, logprobs(sent))):
            raise BenchmarkFailed(f"sample {row} of the ledger is not what was sent")


async def check_journal(directory: Path, load: Load) -> None:
    """Raises:
    BenchmarkFailed: the journal does not fold into a ledger that holds what was sent.
    """
    journal = SqliteJournal(directory / JOURNAL, JOB)
    floor, events = journal.read()
    ledger = Ledger(floor)
    ledger.restore(events)
    check(ledger, load)
    await journal.close()


# ------------------------------------------------------------ the limits


async def measure_raw(load: Load, sizes: list[int]) -> Result:
    """As many messages of as many bytes, into a socket that is drained as ours is, and counts."""
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    _curve.secure_listener(socket)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    taken = 0

    def count(_: list[bytes]) -> None:
        nonlocal taken
        taken += 1

    raw = RawSocket(socket, count)
    with beside(
        "data_plane._streamers", "sockets", f"tcp://127.0.0.1:{port}", load.workers, load.tokens, *sizes
    ) as process:
        await said(process)
        began, used = time.perf_counter(), cpu_s()
        go(process)
        await until(lambda: taken >= load.messages)
        wall_s, used = time.perf_counter() - began, cpu_s() - used
        await said(process)
    raw.close()
    context.term()
    return {
        "raw_tokens_per_second": round(load.total_tokens / wall_s),
        "raw_cpu_us_per_token": round(used / load.total_tokens * 1e6, 4),
    }


def frame_sizes(load: Load) -> list[int]:
    """Bytes of the frames of one step's report."""
    n = load.sequences
    report = TokenReport.of(
        job=JOB, worker="rollout-10", term=1, sequence=1000, policy_version=0,
        assignments=np.arange(n) + (1 << 40), offsets=np.full(n, 1000, np.int32), counts=np.ones(n, np.int32),
        finished=np.zeros(n, np.uint8), tokens=np.zeros(n, np.int32), logprobs=np.zeros(n, np.float32),
        stats=EngineStats(running=n, step_s=0.01, busy_s_total=1.5, tokens_total=100_000),
    )  # fmt: skip
    envelope = Envelope(
        kind=Kind.TELL, source="rollout-10", target="scheduler.bench", target_incarnation=1 << 62, term=1, job=JOB,
        trace_id=1 << 62, tag="scheduler.token_report",
    )  # fmt: skip
    return [len(encode_envelope(envelope)), *(memoryview(frame).nbytes for frame in encode_body(report))]


def measure_copy(load: Load) -> Result:
    """The least that a ledger does: the tokens of each message into the columns of its rows."""
    n, steps = load.sequences, min(load.tokens, 1024)
    tokens, scores, versions = (np.zeros((load.workers * n, steps), kind) for kind in (np.int32, np.float32, np.int32))
    rows = [np.arange(n) + i * n for i in range(load.workers)]
    column, score = np.zeros(n, np.int32), np.zeros(n, np.float32)
    used = time.thread_time()
    for step in range(steps):
        for of_worker in rows:
            tokens[of_worker, step] = column
            scores[of_worker, step] = score
            versions[of_worker, step] = 0
    used = time.thread_time() - used
    return {"copy_cpu_us_per_token": round(used / (load.workers * n * steps) * 1e6, 4)}


def measure(load: Load) -> Result:
    """Ours, then the limits, then the ratios."""
    with tempfile.TemporaryDirectory() as directory:
        ours = on_uvloop(measure_ours(load, Path(directory)))
    raw = on_uvloop(measure_raw(load, frame_sizes(load)))
    copied = measure_copy(load)
    limit = raw["raw_cpu_us_per_token"] + copied["copy_cpu_us_per_token"]
    return {
        **ours,
        **raw,
        **copied,
        "ratio_cpu": round(ours["cpu_us_per_token"] / limit, 2),
        "workers": load.workers,
        "sequences": load.sequences,
        "tokens": load.total_tokens,
        "bytes_per_message": sum(frame_sizes(load)),
    }


def main(args: list[str]) -> int:
    """Measure and print."""
    parser = command_line("tokens", __doc__)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--sequences", type=int, default=32, help="of each worker")
    parser.add_argument("--tokens", type=int, default=4096, help="of each sequence")
    parser.add_argument("--processes", type=int, default=1, help="that the workers live in")
    _curve.add_option(parser)
    _baseline.add_options(parser)
    options = parser.parse_args(args)
    load = Load(options.workers, options.sequences, options.tokens, options.processes)
    machine = hardware()
    result = {"hardware": machine, **_curve.plain_and_secure(lambda: measure(load), options)}
    code = _baseline.settle(result, _curve.baseline_name("tokens", options), RATIOS, options)
    show(result, options)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
