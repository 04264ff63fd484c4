"""Histories of jobs that really ran: the real scheduler, ledger and job on a virtual-time loop, with faults."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from actors.core.actor import Actor, handles
from actors.jobs.job import Job
from actors.ledger.memory_journal import MemoryJournal
from actors.metrics.ask_watch import AskWatch
from actors.protocol.failures import FailureKind
from actors.protocol.metrics import Event, Flush, Flushed, StepRow
from actors.protocol.rewards import Verdict
from actors.scheduler.scheduler import Scheduler
from supervisors.checkers.history import History, RunState
from supervisors.simulation.cluster.environments import Manners
from tests.actors.episode_world import THINK_S, EpisodeWorld, episodes_config
from tests.actors.scheduler_world import STOP, FakeTrainer, World, config, play_in, reward


class Recorder(Actor):
    """The metrics actor of a recorded world: keeps lines instead of writing them."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.rows: list[dict[str, Any]] = []

    async def on_start(self) -> None:
        self.asks = AskWatch(self.ctx)

    @handles(Event)
    async def event(self, message: Event) -> None:
        self.events.append({"time_s": self.ctx.now(), "job": "j", "event": message.name, **message.fields})

    @handles(StepRow)
    async def row(self, message: StepRow) -> None:
        self.rows.append(dict(message.row))

    @handles(Flush)
    async def flush(self, _: Flush) -> Flushed:
        self.events.append({"time_s": self.ctx.now(), "job": "j", "event": "asks_counted", **self.asks.counted()})
        return Flushed()


class UnprunedJournal(MemoryJournal):
    """Keeps every event, so that the checkers can follow every token."""

    def prune(self, below: int) -> None:
        return


class ForwardTrainer(FakeTrainer):
    """Publishes nothing that is older than what its weight server would hold, as the real one does."""

    newest = -1

    def publish(self) -> None:
        if self.step > self.newest:
            super().publish()


class RecordedWorld(World):
    async def start_trainer(self, step: int = 0) -> FakeTrainer:
        trainer = ForwardTrainer(self.scheduler_at, step, self.trained, self.config.steps)
        trainer.newest = max(self.trained, default=-1) + 1 if self.trained else -1
        await (await self.system("trainer")).spawn("trainer", trainer)
        return trainer

    async def start_head(self) -> None:
        system = await self.system("head")
        self.journal = UnprunedJournal("j")
        self.recorder = Recorder()
        metrics = (await system.spawn("metrics.j", self.recorder)).address
        self.scheduler = Scheduler(self.config, Path(), journal=self.journal, metrics=metrics)
        self.scheduler_at = (await system.spawn("scheduler.j", self.scheduler)).address
        self.job = Job(self.config, self.scheduler_at, metrics, stop_token_ids=(STOP,))
        self.job_at = (await system.spawn("job.j", self.job)).address

    def history(self, state: RunState) -> History:
        _, ledger = self.journal.read()
        return History(
            job=self.config,
            state=state,
            ledger=ledger,
            samples=list(self.journal.samples),
            events=[dict(event) for event in self.recorder.events],
            rows=[dict(row) for row in self.recorder.rows],
        )


class RecordedEpisodes(EpisodeWorld, RecordedWorld):
    """Its samples are episodes."""


Scenario = Callable[[RecordedWorld], Awaitable[None]]


def record(scenario: Scenario, *, state: RunState = RunState.FINISHED, **changes: Any) -> History:
    """Run ``scenario`` in virtual time and return what was recorded of it."""
    histories: list[History] = []

    async def told(world: RecordedWorld) -> None:
        await scenario(world)
        histories.append(world.history(state))

    play_in(RecordedWorld, config(**changes), told)
    return histories[0]


async def _finish(world: RecordedWorld) -> None:
    assert await world.job.wait_over(60.0) == "finished"


async def _with_faults(world: RecordedWorld) -> None:
    """A worker is killed and comes back, one sample gets no verdict, the trainer dies and replays a step."""
    await world.start()

    def verdict(prompt: int, sibling: int) -> Verdict:
        if (prompt, sibling) == (5, 2):
            return Verdict(prompt, sibling, None, FailureKind.DATA, "it cannot be read")
        return Verdict(prompt, sibling, reward(prompt, sibling))

    world.rewards.verdict = verdict
    await world.until(lambda: any(at > 2 for _, _, at, _ in world.workers[0].held.values()))
    world.kill("rollout-0")
    world.workers = [await world.start_worker("rollout-0")]
    await world.until(lambda: world.trainer.step == 3)
    world.kill("trainer")
    world.trainer = await world.start_trainer(step=2)
    await _finish(world)


async def _without_faults(world: RecordedWorld) -> None:
    await world.start()
    await _finish(world)


async def _with_episodes(world: RecordedEpisodes) -> None:
    """Environment workers die, and say something else afterwards."""
    world.manners = Manners(THINK_S, drift=1.0)
    await world.start(environments=2)
    for name in ("environments-0", "environments-1", "environments-0"):
        await asyncio.sleep(0.4)
        world.kill(name)
        await world.start_environments(name)
    await _finish(world)


@functools.cache
def with_episodes() -> History:
    """Three steps of episodes. Shared: copy it before you change it."""
    histories: list[History] = []

    async def told(world: RecordedEpisodes) -> None:
        await _with_episodes(world)
        histories.append(world.history(RunState.FINISHED))

    play_in(RecordedEpisodes, episodes_config(), told)
    return histories[0]


@functools.cache
def with_faults() -> History:
    """Four steps in sync mode. Shared: copy it before you change it."""
    return record(_with_faults)


@functools.cache
def in_async_mode() -> History:
    """Eight steps, one version of staleness. Shared: copy it before you change it."""
    return record(_without_faults, steps=8, sync={"mode": "async", "max_staleness": 1})


@functools.cache
def still_running() -> History:
    """Cut off in the middle of its second step."""

    async def scenario(world: RecordedWorld) -> None:
        await world.start()
        await world.until(lambda: world.trainer.step == 1)
        await asyncio.sleep(0.05)

    return record(scenario, state=RunState.RUNNING)
