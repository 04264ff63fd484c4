"""Evaluations beside training, in virtual time: of which version, by whom, at what cost, whatever dies meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.actors.scheduler_world import reward

InWorld = Callable[..., None]
EVERY = {"every": 2, "samples": 4, "data": {"path": "unused.jsonl"}}


def rows(world: Any) -> list[dict[str, Any]]:
    return [event.fields for event in world.events if event.kind == "evaluation"]


async def finish(world: Any) -> None:
    assert await world.job.wait_over(60.0) == "finished"


def check_trained(world: Any, steps: int = 4) -> None:
    """Every sample of every step was trained, and the evaluation counts in none of it."""
    names = [(s[0], s[1]) for step in sorted(world.trained) for s in world.trained[step]]
    assert names == [(p, s) for p in range(4 * steps) for s in range(4)]
    result = world.job.result()
    assert result["prompts_lost"] == 0 and result["samples_trained_twice"] == 0
    assert result["samples"] == 16 * steps and result["steps"] == steps
    assert result["tokens"] == sum(len(s[2]) for step in world.trained.values() for s in step)


def test_versions_are_evaluated_at_the_start_every_few_steps_and_at_the_end(in_world: InWorld) -> None:
    async def scenario(world: Any) -> None:
        await world.start()
        await finish(world)
        check_trained(world, 5)
        assert [row["version"] for row in rows(world)] == [0, 2, 4, 5]
        for row in rows(world):
            assert row["version_min"] == row["version_max"] == row["version"]
            assert row["samples"] == 20 and row["prompts"] == 5 and row["samples_dropped"] == 0
            mean = sum(reward(p, s) for p in range(5) for s in range(4)) / 20
            assert row["avg_at_k"] == pytest.approx(mean)
            assert set(row["pass_at_k"]) == {"1", "2", "4"}
        summary = world.job.result()["eval"]
        assert [summary[which]["version"] for which in ("first", "last", "best")] == [0, 5, 0]

    in_world(scenario, steps=5, eval=EVERY)
