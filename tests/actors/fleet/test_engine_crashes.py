"""An engine that dies by a fatal signal says nothing: its machine does, and what it held is isolated all the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from actors.protocol.workers import WorkerEnded
from tests.actors.scheduler_world import FakeWorker

InWorld = Callable[..., None]

POISON = 5


class Segfaulting(FakeWorker):
    """Its poison ends its process at once; the link breaks, and ``word_after_s`` later its machine says why."""

    world: Any
    word_after_s: float
    crashed: bool

    async def crash(self) -> None:
        self.world.in_background(tell_end(self.world, self, self.word_after_s, crashed=self.crashed))
        self.world.kill(self.ctx.self_address.peer.name)
        await asyncio.Event().wait()


async def tell_end(world: Any, worker: FakeWorker, after_s: float, *, crashed: bool) -> None:
    await asyncio.sleep(after_s)
    life = worker.ctx.self_address
    news = WorkerEnded(
        job="j", worker=life.name, incarnation=life.peer.incarnation, crashed=crashed, detail="signal SIGSEGV"
    )
    world.systems["head"].ref(world.scheduler_at).tell(news)


async def poisoned(world: Any, word_after_s: float, *, crashed: bool, lives_max: int) -> list[str]:
    """A whole run with a prompt that kills engines; returns the names of the lives that it has taken."""
    tasks: set[asyncio.Task[None]] = set()
    died: list[str] = []

    def in_background(work: Any) -> None:
        tasks.add(asyncio.create_task(work))

    world.in_background = in_background

    async def keep_alive(name: str) -> None:
        while True:
            worker = Segfaulting(world.scheduler_at)
            worker.world, worker.word_after_s, worker.crashed = world, word_after_s, crashed
            worker.poison = POISON if len(died) < lives_max else None
            await (await world.system(name)).spawn(name, worker)
            await world.until(lambda: name not in world.systems)
            died.append(name)

    await world.start_head()
    await world.start_rewards()
    await world.start_trainer()
    for name in ("rollout-0", "rollout-1"):
        in_background(keep_alive(name))
    try:
        assert await world.job.wait_over(60.0) == "finished"
    finally:
        for task in tasks:
            task.cancel()
    return died


@pytest.mark.parametrize("word_after_s", [0.0, 0.01, 0.2])
def test_a_prompt_that_kills_engines_by_a_signal_is_set_aside_after_the_second(
    in_world: InWorld, word_after_s: float
) -> None:
    async def scenario(world: Any) -> None:
        died = await poisoned(world, word_after_s, crashed=True, lives_max=10)
        names = [(s[0], s[1]) for step in sorted(world.trained) for s in world.trained[step]]
        assert names == [(p, s) for p in range(16) for s in range(4) if p != POISON], "no other sample is lost"
        reasons = {row.reason for row in world.journal.samples if row.prompt == POISON}
        assert reasons == {"data: poison, 2 engines crashed while they held prompt 5"}
        assert len(died) == 2

    in_world(scenario)


@pytest.mark.parametrize("word_after_s", [0.0, 0.01, 0.2, 5.0])
def test_engines_that_are_killed_from_outside_accuse_nobody(in_world: InWorld, word_after_s: float) -> None:
    """Three times while they hold the same prompt; also if nobody says in time what it was."""

    async def scenario(world: Any) -> None:
        died = await poisoned(world, word_after_s, crashed=False, lives_max=3)
        assert len(died) >= 3
        names = [(s[0], s[1]) for step in sorted(world.trained) for s in world.trained[step]]
        assert names == [(p, s) for p in range(16) for s in range(4)]
        assert all(row.state == "committed" for row in world.journal.samples)

    in_world(scenario)


def test_what_has_gone_on_elsewhere_before_the_crash_was_known_is_taken_back_and_given_out_alone(
    in_world: InWorld,
) -> None:
    async def scenario(world: Any) -> None:
        await world.start_head()
        await world.start_rewards()
        lost = await world.start_worker("rollout-0")
        await world.start_trainer()
        await world.until(lambda: len(lost.held) == 16)
        world.kill("rollout-0")
        spared = await world.start_worker("rollout-1")
        await world.until(lambda: len(spared.held) > 8)
        held = len(spared.held)
        await tell_end(world, lost, 0.0, crashed=True)
        await world.until(lambda: spared.revoked > 0)
        assert spared.revoked == held
        await asyncio.sleep(0.005)
        assert {prompt for prompt, *_ in spared.held.values()} == {0}, "one prompt at a time"
        assert await world.job.wait_over(60.0) == "finished"
        assert all(row.state == "committed" for row in world.journal.samples)

    in_world(scenario)
