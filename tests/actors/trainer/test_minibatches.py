"""Steps of several updates: minibatches by prompt order, old log-probabilities of before, and one version a step."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from actors.trainer import checkpoint
from actors.trainer.backend import LossSpec, MicroBatch, MicroBatchStats
from tests.actors.trainer.trainer_world import (
    GROUP,
    PROMPTS,
    NotingBackend,
    ScriptedScheduler,
    World,
    grant,
    job_config,
    run_to_end,
)
from tests.simulated import run_simulated


class Noting(NotingBackend):
    """Notes every micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[MicroBatch] = []

    async def accumulate(self, batch: MicroBatch, loss: LossSpec) -> MicroBatchStats:
        self.taken.append(batch)
        return await super().accumulate(batch, loss)


def world_of(directory: Path, *, seed: int = 0, steps: int = 3, **algorithm: object) -> World:
    keys = {"group_size": GROUP, "prompts_per_step": PROMPTS} | algorithm
    trainer = {"backend": "simulated", "lr": 0.1, "micro_batch_tokens": 1000}
    job = job_config(steps, algorithm=keys, trainer=trainer, sync={"mode": "sync"})
    return World(directory, job=job, backend=Noting(), scheduler=ScriptedScheduler(steps, seed=seed))


def weights_after(world: World) -> bytes:
    newest = checkpoint.newest(world.run_dir)
    assert newest is not None
    return (newest / "trainer" / "backend.json").read_bytes()


def tokens_of(prompts: range) -> int:
    return sum(int(grant(0, prompt).lengths.sum()) for prompt in prompts)


def test_a_step_is_scored_once_then_each_run_of_prompts_is_an_update_with_its_own_divisor(tmp_path: Path) -> None:
    world = world_of(tmp_path, minibatches=2, epochs=2)
    run_to_end(world)
    halves = [f"step {tokens_of(half)}" for half in (range(2), range(2, 4))]
    one_pass = ["accumulate", halves[0], "accumulate", halves[1]]
    assert world.backend.calls[1:11] == ["score", *one_pass, *one_pass, "export 1"]
    assert world.weights.published == [0, 1, 2, 3]
    row = world.scheduler.commits[0].metrics
    assert row["tokens_trained"] == tokens_of(range(4))
    assert row["micro_batches"] == 4.0


def test_all_updates_of_a_step_have_the_old_log_probabilities_of_before_it(tmp_path: Path) -> None:
    world = world_of(tmp_path, minibatches=4)
    run_to_end(world)
    assert isinstance(world.backend, Noting)
    for first in range(0, 12, 4):
        found = [batch.old_logprobs for batch in world.backend.taken[first : first + 4]]
        values = {float(x) for old in found if old is not None for x in old.ravel() if x}
        assert len(found) == 4 and len(values) == 1  # the simulated backend's is a function of its weights
    assert (
        len({float(batch.old_logprobs.max()) for batch in world.backend.taken if batch.old_logprobs is not None}) == 1
    )


def test_the_order_of_arrival_changes_no_bit_and_one_update_is_another_step_than_two(tmp_path: Path) -> None:
    worlds = [
        world_of(tmp_path / str(i), seed=i, minibatches=n, name="reinforce_pp_baseline")
        for i, n in enumerate((2, 2, 1))
    ]
    for world in worlds:
        run_to_end(world)
    one, other, single = (weights_after(world) for world in worlds)
    assert one == other != single
    assert worlds[0].backend.steps == 2 * worlds[2].backend.steps


@pytest.mark.parametrize("dropped", [{0}, {0, 1, 2}])
def test_dropped_prompts_leave_the_number_of_updates_as_it_is(tmp_path: Path, dropped: set[int]) -> None:
    """So that schedules go on as if nothing had been lost: an update of an empty minibatch has a gradient of 0."""
    world = world_of(tmp_path, minibatches=3)
    world.scheduler.dropped = dropped
    run_to_end(world)
    assert world.backend.steps == 9
    assert sorted(world.scheduler.commits) == [0, 1, 2]


def test_a_trainer_that_is_killed_comes_to_the_same_weights(tmp_path: Path) -> None:
    whole, broken = (world_of(tmp_path / name, steps=6, minibatches=2, seed=len(name)) for name in ("whole", "cut"))
    broken.scheduler.checkpoint_after = {1}
    run_to_end(whole)

    async def main() -> None:
        await broken.start()
        while len(broken.scheduler.commits) <= 3 or not broken.scheduler.checkpoints:
            await asyncio.sleep(0.1)
        await broken.kill_trainer()
        broken.backend = Noting()
        await broken.start_trainer()
        await broken.finish()

    run_simulated(main())
    assert weights_after(whole) == weights_after(broken)
    assert np.isfinite(whole.scheduler.commits[5].metrics["loss"])
