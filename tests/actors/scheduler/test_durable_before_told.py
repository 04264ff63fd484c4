"""What somebody has been told of is on the disk, whatever a crash takes at that very moment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from actors.ledger import events as ev
from actors.protocol.failures import Acknowledged
from actors.protocol.steps import CheckpointTaken
from actors.scheduler.steps import Steps
from configs.limits import Limits

InWorld = Callable[..., None]


def test_a_term_is_on_the_disk_before_it_rules(in_world: InWorld) -> None:
    """Else the next life would rule under the same number, and nobody could tell the two apart."""

    async def scenario(world: Any) -> None:
        await world.start_head()
        world.journal.crash()
        assert world.journal.read()[1] == [ev.Opened(1)]

    in_world(scenario)


def test_a_checkpoint_is_on_the_disk_before_its_trainer_is_told_that_it_is_known(in_world: InWorld) -> None:
    async def scenario(world: Any) -> None:
        await world.start()
        assert await world.job.wait_over(60.0) == "finished"
        scheduler = world.systems["head"].ref(world.scheduler_at)
        await scheduler.ask(CheckpointTaken(job="j", step=1, path="step_000001"), Acknowledged)
        world.journal.crash()
        last = world.journal.read()[1][-1]
        assert isinstance(last, ev.Checkpointed) and last.path == "step_000001"

    in_world(scenario, steps=1, checkpoint={"every": 0})


async def test_whoever_waits_for_a_commit_goes_on_before_one_who_comes_as_it_ends() -> None:
    """Else a trainer's next life could open the step before the commit of its former life is answered."""
    steps: Any = object.__new__(Steps)
    steps._commit = SimpleNamespace(under_way=True, over=asyncio.Event())
    steps._queue, steps._scope = asyncio.Lock(), SimpleNamespace(limits=Limits())
    order: list[str] = []

    async def wait(who: str) -> None:
        await steps._last_commit_over()
        order.append(who)

    waiter = asyncio.create_task(wait("waiter"))
    await asyncio.sleep(0)
    newcomer = asyncio.create_task(wait("newcomer"))
    steps._commit.under_way = False
    steps._commit.over.set()
    await asyncio.gather(waiter, newcomer)
    assert order == ["waiter", "newcomer"]
