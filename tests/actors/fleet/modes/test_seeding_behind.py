"""A version may go with those who had it: the trainer that has to make it again is not kept waiting for its window.

version 1 was made of step 0, which is not committed ─▶ its trainer, its server and its last holder die
the window of step 1 has no end, as nobody serves version 1 ─▶ only the trainer can make it again, out of step 0
"""

from __future__ import annotations

from typing import Any

from actors.core.actor import handles
from actors.protocol.work import Assign
from actors.protocol.workers import WorkerVersion
from tests.actors.fleet.modes.seeded import GROUP, GROUPS, Seeded, play, windows
from tests.actors.fleet.modes.test_balanced import Batching

ASYNC: dict[str, Any] = {"sync": {"mode": "async", "max_staleness": 1}}


class Survivor(Batching):
    """A worker that has version 1 from before."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.version = 1
        self.steps: set[int] = set()

    async def on_start(self) -> None:
        await super().on_start()
        news = WorkerVersion(job="j", worker=self.ctx.self_address.name, policy_version=1, pull_s=0.0, pull_bytes=1)
        self.ctx.ref(self.scheduler).tell(news)

    @handles(Assign)
    async def assign(self, order: Assign) -> None:
        self.steps.update(work.step for work in order.work)
        await super().assign(order)


async def come_and_go(world: Seeded) -> None:
    """A survivor generates a part of the steps after 0 and is lost: its tokens are of a version that nobody has."""
    survivor = await world.add(Survivor, "remote-0")
    await world.until(lambda: survivor.tokens > GROUP)
    world.kill("remote-0")
    await world.until(lambda: "remote-0" not in world.scheduler._workers.by_name)
    assert survivor.steps == {1, 2}
    assert survivor.held


def is_generated(world: Seeded, step: int) -> bool:
    batch = world.scheduler._ledger.batches.get(step)
    return batch is not None and not batch.generating


def test_a_trainer_that_starts_again_behind_a_lost_version_is_given_its_step_and_makes_it_anew(
    events: list[dict[str, Any]],
) -> None:
    async def scenario(world: Seeded) -> None:
        await world.begin()
        await world.until(lambda: world.local.tokens > GROUPS * GROUP)
        world.kill("trainer")
        await world.until(lambda: is_generated(world, 0) and world.local.asleep)
        await come_and_go(world)
        await world.local.ctx.sleep(5.0)
        assert not is_generated(world, 1), "else nobody would have had to wait"
        world.trainer = await world.begin_training(0)
        await world.finished()
        assert world.trainer.met_nobody_awake

    play(scenario, steps=3, **ASYNC)
    told = [(window["step"], window["why"]) for window in windows(events)]
    assert told[:3] == [(0, "generated"), (1, "replay"), (1, "generated")]


def test_while_its_own_step_is_not_generated_the_local_engines_stay_awake_for_it(events: list[dict[str, Any]]) -> None:
    """They are all that there is."""

    async def scenario(world: Seeded) -> None:
        await world.begin()
        await world.until(lambda: world.local.tokens > GROUPS * GROUP)
        await come_and_go(world)
        assert not is_generated(world, 0)
        await world.finished()
        assert world.trainer.met_nobody_awake

    play(scenario, steps=3, **ASYNC)
    told = [(window["step"], window["why"]) for window in windows(events)]
    assert told[:2] == [(1, "replay"), (1, "generated")]
