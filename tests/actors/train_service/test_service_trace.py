"""The trace of a service: what each job's lane shows, that it is bounded, and that it finds a head that began anew."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from actors.core.system import ActorSystem
from actors.metrics.recorder import Metrics
from actors.protocol.metrics import Flush, Flushed
from actors.train_service.parked_files import remove_parked
from actors.train_service.service_trace import ServiceTrace
from actors.trainer.backends.simulated_backend import SimulatedBackend, TrainCost
from configs.limits import Limits
from configs.schema import MetricsConfig
from tests.actors.train_service.service_world import ServiceWorld, Trainer
from tests.actors.train_service.test_service import burst
from tests.simulated import run_simulated
from transport.address import ActorAddress, PeerId
from transport.memory_transport import MemoryNetwork, MemoryTransport

Bars = dict[str, list[tuple[str, float, float]]]
LISTEN = "memory://head"
COST = TrainCost(step_s=1.0)


class Head:
    """One life of the process that has the service's metrics."""

    def __init__(self, network: MemoryNetwork, number: int, directory: Path) -> None:
        self.transport = MemoryTransport(network, PeerId("head", number), listen=LISTEN)
        self.system = ActorSystem(self.transport)
        self.directory = directory

    async def start(self) -> ActorAddress:
        await self.system.start()
        plain = MetricsConfig(samples=False, tensorboard=False)
        return (await self.system.spawn("metrics", Metrics("service.train-0", self.directory, plain))).address

    async def flush(self) -> None:
        await self.system.ref(self.system.address("metrics")).ask(Flush(job=""), Flushed)

    async def end(self) -> None:
        self.transport.abort()
        await self.system.stop()


def lanes_of(directory: Path) -> Bars:
    """Bars by lane, in seconds of the trace."""
    events: list[dict[str, Any]] = json.loads((directory / "trace.json").read_text())
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    bars: Bars = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] == "X":
            bars[names[event["tid"]]].append((event["name"], event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6))
    return bars


def play(
    directory: Path,
    scenario: Callable[[ServiceWorld, Head], Awaitable[None]],
    *,
    cost: TrainCost = COST,
    **config: Any,
) -> Bars:
    """What the trace shows in the end."""

    async def main() -> None:
        world = ServiceWorld(directory, make=lambda kind: SimulatedBackend(cost), **config)
        head = Head(world.network, 1, directory)
        world.metrics = await head.start()
        await world.start()
        await scenario(world, head)
        await world.stop()

    run_simulated(main())
    remove_parked(directory)
    return lanes_of(directory)


async def train(trainer: Trainer, directory: Path, *, steps: int = 3) -> None:
    directory.mkdir(parents=True)
    for step in range(steps):
        await burst(trainer, directory, step)


async def share(world: ServiceWorld, directory: Path) -> None:
    """Two jobs that ask all the time; the service stops in good order when they have done."""
    a, b = await world.attached("a"), await world.attached("b")
    await asyncio.gather(train(a, directory / "a"), train(b, directory / "b"))
    await world.stop()


def test_a_trace_has_a_lane_a_job_whose_bursts_do_not_overlap_and_shows_its_waits(tmp_path: Path) -> None:
    async def scenario(world: ServiceWorld, head: Head) -> None:
        await share(world, tmp_path)
        await head.flush()

    trace = play(tmp_path / "service", scenario)
    assert set(trace) == {"a", "b"}
    bursts = sorted((start, end, job) for job in trace for name, start, end in trace[job] if name == "burst")
    assert [[one[2] for one in bursts if one[1] - one[0] > 0.9].count(job) for job in "ab"] == [3, 3]
    assert all(one[1] <= two[0] + 0.001 for one, two in itertools.pairwise(bursts))
    for job, other in ("ab", "ba"):
        theirs = [(start, end) for start, end, of in bursts if of == other]
        waits = [(start, end) for name, start, end in trace[job] if name == "wait" and start >= bursts[0][0]]
        assert waits, "while the other one computes"
        assert all(any(a < end and b > start for a, b in theirs) for start, end in waits)


def test_states_that_take_turns_in_memory_are_seen_to_be_switched(tmp_path: Path) -> None:
    async def scenario(world: ServiceWorld, head: Head) -> None:
        await share(world, tmp_path)
        await head.flush()

    trace = play(
        tmp_path / "service",
        scenario,
        cost=TrainCost(step_s=1.0, moved_byte_s=1e-4),
        memory_bytes=3000,
        host_bytes=10**8,
    )
    for job in "ab":
        switches = [end - start for name, start, end in trace[job] if name == "switch"]
        assert len(switches) >= 2
        assert all(0.1 < seconds < 1.0 for seconds in switches), "two thousand bytes and more, out and in"


def test_what_does_not_fit_between_two_reports_is_lost_and_what_is_too_short_to_see(tmp_path: Path) -> None:
    async def scenario(world: ServiceWorld, head: Head) -> None:
        trace = ServiceTrace(world.service.ctx, "service.train-0", head.system.address("metrics"))
        for number in range(10):
            trace.add("a", "burst", number, number + 0.5)
        trace.add("b", "wait", 1.0, 1.0004)
        await asyncio.sleep(world.limits.span_interval_s + 0.1)
        trace.add("a", "prefetch", 20.0, 21.0)
        await asyncio.sleep(world.limits.span_interval_s + 0.1)
        await head.flush()

    trace = play(tmp_path / "service", scenario, limits=Limits(service_spans=3))
    assert [name for name, *_ in trace["a"]] == ["burst"] * 3 + ["prefetch"]
    assert set(trace) == {"a"}


def test_a_head_that_was_started_again_gets_what_happened_while_it_was_away(tmp_path: Path) -> None:
    async def scenario(world: ServiceWorld, head: Head) -> None:
        trainer = await world.attached("a")
        await head.end()
        await burst(trainer, tmp_path / "v")
        await asyncio.sleep(5.0)
        after = Head(world.network, 2, head.directory)
        await after.start()
        await asyncio.sleep(10.0)
        await after.flush()
        await after.end()

    trace = play(tmp_path / "service", scenario)
    assert max(end - start for name, start, end in trace["a"] if name == "burst") > 0.9
