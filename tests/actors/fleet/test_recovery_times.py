"""How long a loss was felt is measured, told in events and exported as metrics, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from actors.fleet.recovery import Recoveries
from actors.ledger import events as ev
from actors.ledger.batch import SampleState
from actors.ledger.ledger import Ledger

InWorld = Callable[..., None]


def newest_row(world: Any) -> dict[str, Any]:
    return [event.fields for event in world.events if event.kind == "step"][-1]


async def finish(world: Any) -> None:
    assert await world.job.wait_over(60.0) == "finished"


def heard_of(world: Any) -> dict[str, list[dict[str, Any]]]:
    """Events that the scheduler tells from now on, by name."""
    told: dict[str, list[dict[str, Any]]] = {}
    world.scheduler._scope.event = lambda name, **fields: told.setdefault(name, []).append(fields)
    return told


def test_samples_of_a_lost_worker_are_timed_until_the_last_of_them_is_with_another(in_world: InWorld) -> None:
    """The only worker is gone, and its successor comes 0.7 s later: that is how long its samples have waited."""

    async def scenario(world: Any) -> None:
        await world.start(workers=1)
        told = heard_of(world)
        step_s = world.workers[0].step_s
        await world.until(lambda: bool(world.workers[0].held))
        await asyncio.sleep(step_s / 2)  # that it serves the version has been heard by now
        held = len(world.scheduler._scope.ledger.in_flight("rollout-0"))
        world.kill("rollout-0")
        await asyncio.sleep(0.7)
        await world.start_worker("rollout-1")
        await finish(world)
        [event] = told["samples_reassigned"]
        assert (event["worker"], event["samples"]) == ("rollout-0", held)
        assert 0.7 <= event["after_s"] < 0.8, "and what it takes to load a version"
        row = newest_row(world)
        assert row["reassign_s"] == row["reassign_max_s"] == event["after_s"]
        assert 0 <= row["detect_s"] <= step_s, "no longer than an engine step, for the link broke"
        assert row["trainer_to_progress_s"] == row["head_to_progress_s"] == 0

    in_world(scenario)


def test_a_loss_that_left_no_sample_to_others_is_no_recovery(in_world: InWorld) -> None:
    async def scenario(world: Any) -> None:
        await world.start(workers=2)
        told = heard_of(world)
        await world.until(lambda: not any(samples for _, _, samples, _ in world.scheduler.credit()))
        world.kill("rollout-0")
        await finish(world)
        assert "samples_reassigned" not in told
        assert newest_row(world)["reassign_s"] == 0

    in_world(scenario)


@pytest.mark.parametrize("crash_at", [1, 3])
def test_a_lost_trainer_is_timed_until_a_step_that_was_not_committed_before(in_world: InWorld, crash_at: int) -> None:
    """What it replays is no progress."""

    async def scenario(world: Any) -> None:
        await world.start()
        told = heard_of(world)
        world.trainer.crash_before_commit = crash_at
        await world.until(lambda: "trainer" not in world.systems["trainer"].actors())
        await asyncio.sleep(0.5)
        await world.start_trainer(step=crash_at // 2 * 2)
        await finish(world)
        [event] = told["progress_resumed"]
        assert (event["lost"], event["step"]) == ("trainer", crash_at)
        assert 0.5 <= event["after_s"] < 1.0
        assert newest_row(world)["trainer_to_progress_s"] == event["after_s"]

    in_world(scenario)


def test_a_lost_head_is_timed_from_the_opening_of_the_next_one(in_world: InWorld) -> None:
    async def scenario(world: Any) -> None:
        await world.start()
        await world.until(lambda: 1 in world.trained)
        for name in ("head", "rollout-0", "rollout-1", "rewards", "trainer"):
            world.kill(name)
        await world.start_head()
        told = heard_of(world)
        await asyncio.sleep(0.4)
        await world.start_rewards()
        for name in ("rollout-0", "rollout-1"):  # else the samples of the second one wait for it for a while
            await world.start_worker(name)
        await world.start_trainer(step=world.scheduler._ledger.trainer_step)
        await finish(world)
        [event] = told["progress_resumed"]
        assert event["lost"] == "head" and 0.4 <= event["after_s"] < 1.0
        assert newest_row(world)["head_to_progress_s"] == event["after_s"]

    in_world(scenario)


def test_two_losses_at_a_time_are_told_apart() -> None:
    """The second worker's samples go at once, the first one's wait for room."""
    from actors.protocol.work import SamplingParams

    ledger = Ledger()
    ledger.apply(ev.Opened(1))
    prompts = np.arange(2, dtype=np.int64)
    ledger.apply(
        ev.BatchIssued(
            step=0, group_size=2, sampling=SamplingParams(max_tokens=4, temperature=1.0, top_p=1.0, top_k=0, seed=0,
            stop_token_ids=(9,)), prompts=prompts, prompt_lengths=np.ones(2, np.int32),
            prompt_ids=np.ones(2, np.int32), contexts=[b"", b""],
        )
    )  # fmt: skip
    recoveries = Recoveries(ledger)
    recoveries.lost_worker("a", {0: np.array([0, 1], np.int32)}, silent_s=0.2, now=10.0)
    recoveries.lost_worker("b", {0: np.array([2, 3], np.int32)}, silent_s=0.1, now=11.0)
    recoveries.lost_worker("idle", {}, silent_s=99.0, now=11.0)
    state = ledger.batches[0].state
    state[[0, 2, 3]] = SampleState.ASSIGNED
    assert [(r.part, r.after_s, r.samples) for r in recoveries.assigned(11.5)] == [("b", 0.5, 2)]
    state[1] = SampleState.DROPPED
    assert [(r.part, r.after_s, r.samples) for r in recoveries.assigned(13.0)] == [("a", 3.0, 2)]
    assert recoveries.assigned(14.0) == []
    times = recoveries.metrics()
    assert (times["detect_s"], times["detect_max_s"]) == (0.1, 0.2)
    assert (times["reassign_s"], times["reassign_max_s"]) == (3.0, 3.0)
