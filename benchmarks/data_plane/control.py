"""How soon a head answers, and how late anybody's loop is, while tokens and weights flow as fast as two cores let them.

    64 workers × 32 sequences ── TokenReport ──▶ here: a head, its scheduler, ledger, journal ◀── jobs, tree, … ──
    client pullers elsewhere  ◀── chunks over TCP ──── its weight server, a process that the head's node agent watches

The head is the one of a real run, with a real job on it, whose other processes it has started and watches. Workers have
no engine, and pullers keep nothing, so both are as fast as they can be; samples never end, so nobody trains meanwhile.
Nothing is left of the cores: a plain socket that sends everything back, asked in the same way, says what that costs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import msgspec
import psutil

from actors.core.look import Lag, Look, Sight
from actors.protocol.batches import SetPaused
from actors.protocol.failures import Acknowledged
from actors.protocol.services import LookupService, ServiceFound
from actors.scheduler.scheduler import Scheduler
from benchmarks._command import Result, add_check_option, command_line, measured, show_and_check
from benchmarks._harm import percentile
from benchmarks._jobs import BenchmarkFailed, hardware
from benchmarks._processes import beside, on_uvloop
from benchmarks.data_plane._streamers import JOB
from benchmarks.data_plane._weights import Take, Taken
from benchmarks.data_plane.tokens import go, said, until
from benchmarks.data_plane.weights import make_model
from configs.limits import DEFAULT_LIMITS
from configs.run_files import EVENTS
from configs.schema import JobConfig
from supervisors.head.head import Head
from supervisors.machine.machine import CLUSTER
from supervisors.machine.membership.failure_detector import Health
from supervisors.tree.messages import ListProcesses, ProcessList
from transport.address import ActorAddress

SHORT: Final = ("--seconds", "10", "--bytes", "100000000")
"""For ``bench all``."""
OPS: Final = ("ping", "jobs", "tree", "metrics", "stalls")
"""What is asked: of the head alone, and of all of its processes."""
GOALS: Final = {"answer_p99_ms": 50.0, "lag_p99_ms": 20.0, "late_heartbeats": 0}
SILENT: Final = ("links_cut", "worker_down", "worker_lease_lapsed", "service_down", "child_exited", "ask_overdue")
"""What is recorded when somebody has not been heard in time."""
_LOOK_S: Final = 0.25
_PROMPT_TOKENS: Final = 512
"""Positions that are left for a prompt, beside those of what is said to have been generated."""
_BEGUN: Final = ("version_available", "service_registered")


def job_config(model: Path, options: argparse.Namespace) -> JobConfig:
    """A step of samples that do not end while it is measured, and no workers of its own."""
    return JobConfig.model_validate(
        {
            "name": JOB,
            "steps": 1,
            "model": {"source": "hf", "path": str(model), "dtype": "bfloat16"},
            "data": {"source": "reasoning_gym", "task": "spell_backward"},
            "reward": {"kind": "reasoning_gym"},
            "algorithm": {"group_size": options.sequences, "prompts_per_step": options.workers},
            "rollout": {
                "workers": 0,
                "max_tokens": options.tokens,
                "max_running": options.sequences,
                "stop": ["<eos>"],
            },
            "trainer": {"threads": 1},
            "weights": {"delta": False, "relay": False},
            "checkpoint": {"every": 0},
            "metrics": {"tensorboard": False},
        }
    )


@dataclass
class Watch:
    """What the head's own watchers think of its processes, looked at again and again."""

    suspected: set[str] = field(default_factory=set[str])
    looks: int = 0

    async def look(self, head: Head) -> None:
        """Until cancelled."""
        agent = head.system.ref(head.system.address("agent"))
        while True:
            listed = await agent.ask(ListProcesses(), ProcessList)
            self.suspected |= {process.name for process in listed.processes if process.health != Health.ALIVE}
            self.looks += 1
            await asyncio.sleep(_LOOK_S)


class Bench:
    """A head with one job, and everybody who talks to it."""

    def __init__(self, head: Head, run_dir: Path, control: str, options: argparse.Namespace) -> None:
        self.head, self.control = head, control
        self._run_dir, self._options = run_dir, options
        self._scheduler_ref = head.system.ref(head.system.address(f"scheduler.{JOB}"))

    @property
    def scheduler(self) -> Scheduler | None:
        actor = self.head.system.hosted(f"scheduler.{JOB}")
        return actor if isinstance(actor, Scheduler) else None

    async def ready(self) -> ActorAddress:
        """Wait until version 0 is published; where it is to be had."""
        run = self.head.jobs[JOB]
        await until(lambda: run.state.over or all(self.events(name) for name in _BEGUN))
        if run.state.over:
            raise BenchmarkFailed(f"the job is {run.state}: {run.summary().get('error')}")
        found = await self._scheduler_ref.ask(LookupService(job=JOB, role="weights"), ServiceFound)
        assert found.address is not None, "a version is published at a weight server"
        return found.address

    def events(self, *names: str) -> list[dict[str, Any]]:
        """The events of the job's record so far."""
        path = self._run_dir / EVENTS
        lines = path.read_text("utf-8").splitlines() if path.exists() else []
        return [row for row in map(json.loads, lines) if row["event"] in names]

    def silences(self) -> int:
        """How often somebody was not heard in time."""
        return len(self.events(*SILENT)) + self.head.system.counters().get("links_cut", 0)

    async def lags(self) -> dict[str, Lag]:
        """The lag of each process's loop, over the last 13 seconds."""
        run = self.head.jobs[JOB]
        found = {"head": self.head.system.sight().loop_lag}
        for supervisor in run.tree.supervisors.values():
            for info in supervisor.snapshot():
                running = supervisor.running(info.name)
                if running is not None and running.address.peer != self.head.system.peer:
                    reporter = ActorAddress("reporter", running.address.peer, running.address.endpoint)
                    found[info.name] = (await self.head.system.ref(reporter).ask(Look(), Sight)).loop_lag
        return {name: lag for name, lag in found.items() if lag is not None}


@asynccontextmanager
async def bench_head(model: Path, scratch: Path, options: argparse.Namespace) -> AsyncIterator[Bench]:
    """A head, with the job launched."""
    head = Head(run_root=scratch)
    await head.start()
    try:
        control = await head.serve_control(f"ipc://{scratch}/control.sock")
        run_dir = scratch / JOB
        run_dir.mkdir()
        head.launch(job_config(model, options), run_dir)
        yield Bench(head, run_dir, control, options)
    finally:
        await head.stop()


class Crowd:
    """The processes beside the head; they end with ``exits``."""

    def __init__(self, exits: contextlib.ExitStack, options: argparse.Namespace) -> None:
        self._exits, self._options = exits, options
        self.streamers: subprocess.Popen[str]
        self.pullers: list[ActorAddress] = []

    async def gather(self, bench: Bench) -> None:
        """Everybody is there and ready."""
        scheduler = bench.head.system.address(f"scheduler.{JOB}")
        where = (scheduler.endpoint, scheduler.peer.name, scheduler.peer.incarnation, scheduler.name)
        numbers = (0, self._options.workers, self._options.sequences)
        self.streamers = self._role("data_plane._streamers", "flow", *where, *numbers)
        await said(self.streamers)
        for number in range(self._options.pullers):
            args = {"name": f"rollout-puller-{number}", "job": JOB, "cluster": CLUSTER}
            process = self._role("data_plane._weights", "puller", json.dumps(args))
            self.pullers.append(msgspec.json.decode(await said(process), type=ActorAddress))

    def _role(self, module: str, *words: object) -> subprocess.Popen[str]:
        """One that stands for role processes, which give way to heads."""
        process = self._exits.enter_context(beside(module, *words))
        os.setpriority(os.PRIO_PROCESS, process.pid, DEFAULT_LIMITS.role_niceness)
        return process

    async def asker(self, endpoint: str, *ops: str) -> subprocess.Popen[str]:
        """One that asks ``ops`` at the control socket, or a plain socket if there are none."""
        process = self._exits.enter_context(beside("data_plane._asker", endpoint, self._options.every_ms, *ops))
        await said(process)
        return process

    async def raw(self) -> subprocess.Popen[str]:
        """One that asks a plain socket in another process."""
        process = self._exits.enter_context(beside("data_plane._echo", "socket"))
        return await self.asker(await said(process))


async def noted(asker: subprocess.Popen[str]) -> Result:
    """End it; what it has noted."""
    assert asker.stdin is not None
    asker.stdin.close()
    return json.loads(await said(asker))


def answers(took_ms: Sequence[float]) -> Result:
    """Statistics of many answers."""
    return {
        "p50_ms": percentile(took_ms, 0.5),
        "p99_ms": percentile(took_ms, 0.99),
        "max_ms": max(took_ms),
        "count": len(took_ms),
    }


async def _asked(crowd: Crowd, bench: Bench, seconds: float) -> tuple[Result, Result]:
    """The control socket and a plain one, asked for ``seconds`` side by side."""
    control, raw = await crowd.asker(bench.control, *OPS), await crowd.raw()
    await asyncio.sleep(seconds)
    return await noted(control), await noted(raw)


def _all_ms(found: Result) -> list[float]:
    return [value for values in found["took_ms"].values() for value in values]


async def _measure(options: argparse.Namespace, scratch: Path, model: Path, exits: contextlib.ExitStack) -> Result:
    async with bench_head(model, scratch, options) as bench:
        weights, crowd = await bench.ready(), Crowd(exits, options)
        gc.freeze()  # as a head's process does; this one has imported torch as well
        await crowd.gather(bench)
        alone, _ = await _asked(crowd, bench, options.seconds / 4)
        quiet = {"quiet_answer_p99_ms": answers(_all_ms(alone))["p99_ms"]}
        return quiet | await _loaded(bench, crowd, weights, options)


async def _loaded(bench: Bench, crowd: Crowd, weights: ActorAddress, options: argparse.Namespace) -> Result:
    """The same questions, with everything flowing."""
    scheduler, watch, system = bench.scheduler, Watch(), bench.head.system
    assert scheduler is not None, "its batch was issued"
    take = Take(weights=weights, policy_version=0, seconds=options.seconds + 2.0)
    asks = [system.ref(puller).ask(take, Taken, timeout_s=take.seconds + 60.0) for puller in crowd.pullers]
    tasks = [asyncio.create_task(ask) for ask in asks]
    watching = asyncio.create_task(watch.look(bench.head))
    go(crowd.streamers)
    await asyncio.sleep(1.0)
    silences, began, tokens = bench.silences(), perf_counter(), scheduler.counters.tokens
    psutil.cpu_percent()
    under_load, raw = await _asked(crowd, bench, options.seconds)
    busy, lags, took_s = psutil.cpu_percent(), await bench.lags(), perf_counter() - began
    tokens = scheduler.counters.tokens - tokens
    taken = [await task for task in tasks]
    watching.cancel()
    lost = scheduler.counters.unknown_rows + scheduler.counters.gap_rows
    if not tokens or lost:
        raise BenchmarkFailed(f"nothing was measured: {scheduler.counters}")
    if scheduler.counters.tokens >= options.workers * options.sequences * options.tokens:
        raise BenchmarkFailed(f"all samples ended while it was measured: more --tokens than {options.tokens}, please")
    await system.ref(system.address(f"scheduler.{JOB}")).ask(SetPaused(job=JOB, paused=True), Acknowledged)
    all_ms = _all_ms(under_load)
    return {
        **{f"answer_{name}": value for name, value in answers(all_ms).items()},
        "answers": {op: answers(values) for op, values in under_load["took_ms"].items()},
        "raw_p99_ms": answers(_all_ms(raw))["p99_ms"],
        "raw_max_ms": answers(_all_ms(raw))["max_ms"],
        "lag_p99_ms": round(1000 * max(lag.p99_s for lag in lags.values()), 2),
        "lag_max_ms": round(1000 * max(lag.max_s for lag in lags.values()), 2),
        "lags_p99_ms": {name: round(1000 * lag.p99_s, 2) for name, lag in lags.items()},
        "client_lag_p99_ms": raw["own_lag_p99_ms"],
        "late_heartbeats": bench.silences() - silences + len(watch.suspected),
        "suspected": sorted(watch.suspected),
        "looks": watch.looks,
        "tokens_per_second": round(tokens / took_s),
        "weights_gb_per_second": round(sum(each.bytes for each in taken) / take.seconds / 1e9, 2),
        "busy_cores": round(busy / 100 * (psutil.cpu_count() or 1), 2),
    }


def missed(result: Result) -> list[str]:
    """Goals that were not met, in sentences."""
    return [f"{name}: {result[name]}, the goal is {goal}" for name, goal in GOALS.items() if result[name] > goal]


def measure(options: argparse.Namespace, scratch: Path) -> Result:
    """All of it in ``scratch``."""
    machine = hardware()
    make_model(scratch / "model", options.bytes, positions=options.tokens + _PROMPT_TOKENS)
    with contextlib.ExitStack() as exits:
        result = {"hardware": machine, **on_uvloop(_measure(options, scratch, scratch / "model", exits))}
    return result | {"missed": missed(result)}


def main(args: list[str]) -> int:
    """Measure and print; with ``--check`` hold the figures against their goals."""
    parser = command_line("control", __doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="under load; a quarter of it before, without")
    parser.add_argument("--workers", type=int, default=64, help="that stream tokens")
    parser.add_argument("--sequences", type=int, default=32, help="of each worker")
    parser.add_argument("--tokens", type=int, default=1 << 17, help="that a sample may have at most")
    parser.add_argument("--bytes", type=int, default=600_000_000, help="size of the model's weights")
    parser.add_argument("--pullers", type=int, default=1, help="that take the weights over TCP, again and again")
    parser.add_argument("--every-ms", type=float, default=20.0, help="pause of the client between two questions")
    add_check_option(parser)
    options = parser.parse_args(args)
    return show_and_check(measured(measure, options), options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
