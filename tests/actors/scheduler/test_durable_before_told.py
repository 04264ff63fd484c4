"""What somebody has been told of is on the disk, whatever a crash takes at that very moment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from actors.ledger import events as ev
from actors.protocol.failures import Acknowledged
from actors.protocol.steps import CheckpointTaken

InWorld = Callable[..., None]


def test_an_term_is_on_the_disk_before_it_rules(in_world: InWorld) -> None:
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
