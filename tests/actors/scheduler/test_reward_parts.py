"""Several rewards on their way into the ledger and the metrics: none dies with a head; a sum without one is none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from actors.ledger import events as ev
from actors.ledger.batch import SampleState
from actors.ledger.errors import IllegalTransition
from actors.protocol.rewards import Verdict
from configs.data_mix import Mix

InWorld = Callable[..., None]
PARTS = [{"kind": "exact_match", "name": "right"}, {"kind": "math_verify", "name": "form", "weight": 0.5}]
MIX = [{"name": "easy", "weight": 3.0, "path": "a.jsonl"}, {"name": "hard", "path": "b.jsonl"}]


def values(prompt: int, sibling: int) -> tuple[float, float]:
    return float(sibling), float(prompt % 5)


def verdict(prompt: int, sibling: int) -> Verdict:
    right, form = values(prompt, sibling)
    return Verdict(prompt=prompt, sibling=sibling, reward=right + 0.5 * form, parts=(right, form))


def rows_of(world: Any) -> dict[int, dict[str, Any]]:
    """The last row of each step."""
    return {event.fields["step"]: event.fields for event in world.events if event.kind == "step"}


async def play(world: Any, answer: Callable[[int, int], Verdict] = verdict) -> None:
    await world.start_head()
    world.rewards = await world.start_rewards()
    world.rewards.verdict = answer
    await world.start_worker("rollout-0")
    await world.start_trainer()


def test_each_reward_has_its_mean_in_the_row_of_a_step(in_world: InWorld) -> None:
    async def scenario(world: Any) -> None:
        await play(world)
        assert await world.job.wait_over(60.0) == "finished"
        for step, row in rows_of(world).items():
            expected = [values(prompt, sibling) for prompt in range(4 * step, 4 * step + 4) for sibling in range(4)]
            right, form = np.mean(expected, axis=0)
            assert (row["reward_right_mean"], row["reward_form_mean"]) == pytest.approx((right, form))
            assert row["reward_mean"] == pytest.approx(right + 0.5 * form)
        assert world.rewards.shown[0].samples[0].parts

    in_world(scenario, reward={"parts": PARTS})


def test_a_head_that_dies_still_knows_each_reward(in_world: InWorld) -> None:
    """Samples that were scored in the former life count with all their parts, since the journal has them."""

    async def scenario(world: Any) -> None:
        await play(world)
        await world.until(lambda: len(world.rewards.asked) >= 8)
        await asyncio.sleep(0.02)
        world.kill("head")
        asked = len(world.rewards.asked)
        for name in ("rewards", "rollout-0", "trainer"):
            world.kill(name)
        await play(world)
        assert await world.job.wait_over(60.0) == "finished"
        assert asked + len(world.rewards.asked) < 2 * 4 * 16, "not all were scored again"
        row = rows_of(world)[0]
        assert (row["reward_right_mean"], row["reward_form_mean"]) == pytest.approx((1.5, 1.5))

    in_world(scenario, reward={"parts": PARTS})


@pytest.mark.parametrize("parts", [(), (1.0,), (1.0, float("nan"))])
def test_a_verdict_that_lacks_a_reward_is_no_verdict(in_world: InWorld, parts: tuple[float, ...]) -> None:
    async def scenario(world: Any) -> None:
        def lacking(prompt: int, sibling: int) -> Verdict:
            if (prompt, sibling) == (1, 2):
                return Verdict(prompt=prompt, sibling=sibling, reward=1.0, parts=parts)
            return verdict(prompt, sibling)

        await play(world, lacking)
        assert await world.job.wait_over(60.0) == "finished"
        (dropped,) = [sample for sample in world.journal.samples if sample.state == "dropped"]
        assert (dropped.prompt, dropped.sibling, dropped.reward) == (1, 2, None)
        assert rows_of(world)[0]["samples"] == 15

    in_world(scenario, reward={"parts": PARTS}, steps=1)


def test_each_source_of_prompts_has_its_mean_reward(in_world: InWorld) -> None:
    async def scenario(world: Any) -> None:
        await play(world, lambda prompt, sibling: Verdict(prompt=prompt, sibling=sibling, reward=float(prompt)))
        assert await world.job.wait_over(60.0) == "finished"
        mix = Mix.of(world.config.data, world.config.seed)
        for step, row in rows_of(world).items():
            for which, name in enumerate(("easy", "hard")):
                prompts = [p for p in range(4 * step, 4 * step + 4) if mix.source_of(p) == which]
                mean = pytest.approx(np.mean(prompts)) if prompts else None
                assert row[f"source_{name}_reward_mean"] == mean

    in_world(scenario, data={"mix": MIX})


@pytest.mark.parametrize("parts", [np.ones((2, 2)), np.ones(4), np.full((4, 2), np.nan)])
def test_parts_that_do_not_fit_change_nothing(in_world: InWorld, parts: np.ndarray) -> None:
    async def scenario(world: Any) -> None:
        await play(world)
        world.kill("rewards")
        ledger = world.scheduler._ledger
        await world.until(lambda: 0 in ledger.batches and (ledger.batches[0].state == SampleState.FINISHED).sum() >= 4)
        rows = np.nonzero(ledger.batches[0].state == SampleState.FINISHED)[0][:4].astype(np.int32)
        with pytest.raises(IllegalTransition, match="reward"):
            ledger.apply(ev.Scored(0, rows, np.ones(4), parts))
        assert (ledger.batches[0].state[rows] == SampleState.FINISHED).all() and np.isnan(
            ledger.batches[0].reward[rows]
        ).all()

    in_world(scenario, reward={"parts": PARTS})
