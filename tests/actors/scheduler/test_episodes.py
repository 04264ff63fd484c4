"""Episodes through a whole job: whoever dies, the rows are the same, and no token of the model's is said twice."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from actors.ledger import events as ev
from supervisors.simulation.cluster.environments import Manners
from tests.actors.episode_world import THINK_S, EpisodeWorld, episodes_config
from tests.actors.scheduler_world import play_in

Scenario = Callable[[EpisodeWorld], Awaitable[None]]


def play(
    scenario: Scenario, environment: dict[str, Any] | None = None, *, seed: int = 0, **changes: Any
) -> EpisodeWorld:
    return play_in(EpisodeWorld, episodes_config(environment, **changes), scenario, seed)


async def to_the_end(world: EpisodeWorld) -> None:
    await world.until(lambda: len(world.trained) == world.config.steps and bool(world.scheduler._ledger.ended))


def discarded(world: EpisodeWorld) -> int:
    return world.scheduler.counters.tokens_discarded


def has_whole_rows(world: EpisodeWorld) -> None:
    """What was trained are the rows of undisturbed games, each token of the model's once."""
    assert not world.refused
    for step, samples in world.trained.items():
        assert len(samples) == 16, step
        for prompt, sibling, tokens, reward in samples:
            assert list(tokens) == world.whole_row(prompt, sibling), (step, prompt, sibling)
            assert reward == world.game(prompt, sibling).reward(np.array(tokens, np.int32))
    entered = sum(int(e.counts.sum()) for e in appended(world))
    trained = sum(tokens_said(world, *sample[:2]) for samples in world.trained.values() for sample in samples)
    assert entered == trained


def appended(world: EpisodeWorld) -> list[ev.TokensAppended]:
    return [event for event in world.journal.read()[1] if isinstance(event, ev.TokensAppended)]


def tokens_said(world: EpisodeWorld, prompt: int, sibling: int) -> int:
    row, game, turns, said = world.whole_row(prompt, sibling), world.game(prompt, sibling), list[np.ndarray](), 0
    at = 0
    while at < len(row) and (word := game.say(turns, 1)) is not None:
        at += len(word.tokens)
        turn: list[int] = []
        while at < len(row) and turn[-1:] != [9]:
            turn.append(row[at])
            at += 1
        turns.append(np.array(turn, np.int32))
        said += len(turn)
    return said


def test_episodes_of_several_turns_are_trained_whole() -> None:
    async def scenario(world: EpisodeWorld) -> None:
        await world.start()
        await to_the_end(world)
        has_whole_rows(world)
        assert discarded(world) == 0

    play(scenario)


@pytest.mark.parametrize("seed", range(4))
def test_deaths_of_workers_and_environments_in_mid_episode_cost_no_token(seed: int) -> None:
    async def scenario(world: EpisodeWorld) -> None:
        rng = random.Random(seed)
        await world.start(workers=2, environments=2)
        for _ in range(6):
            await asyncio.sleep(rng.uniform(0.02, 0.4))
            victim = rng.choice(["rollout-0", "rollout-1", "environments-0", "environments-1"])
            if victim not in world.systems:
                continue
            world.kill(victim)
            await asyncio.sleep(0.1)
            if victim.startswith("rollout"):
                await world.start_worker(victim)
            else:
                await world.start_environments(victim)
        await to_the_end(world)
        assert not world.refused
        for samples in world.trained.values():
            for prompt, sibling, tokens, _ in samples:
                assert list(tokens) == world.whole_row(prompt, sibling)
        assert discarded(world) == 0

    play(scenario, seed=seed)


def test_an_environment_that_says_something_else_after_its_death_discards_and_counts_it() -> None:
    async def scenario(world: EpisodeWorld) -> None:
        world.manners = Manners(THINK_S, drift=0.7)
        await world.start(environments=2)
        for name in ("environments-0", "environments-1", "environments-0"):
            await asyncio.sleep(0.4)
            world.kill(name)
            await asyncio.sleep(0.05)
            await world.start_environments(name)
        await to_the_end(world)
        assert not world.refused
        assert discarded(world) > 0
        entered = sum(int(event.counts.sum()) for event in appended(world))
        kept = sum(int(np.count_nonzero(batch.ragged(np.arange(16, dtype=np.int32)).versions >= 0))
                   for batch in world.scheduler._ledger.batches.values())  # fmt: skip
        assert entered == kept + discarded(world)

    play(scenario)


@pytest.mark.parametrize("after_s", [0.2, 0.45, 0.8])
def test_a_restart_of_the_head_takes_up_environments_where_they_are(after_s: float) -> None:
    async def scenario(world: EpisodeWorld) -> None:
        await world.start()
        await asyncio.sleep(after_s)
        await world.restart_head()
        await to_the_end(world)
        assert not world.refused
        for samples in world.trained.values():
            assert all(list(tokens) == world.whole_row(p, s) for p, s, tokens, _ in samples)
        batches = world.scheduler._ledger.batches.values()
        assert max(int(batch.lives.max()) for batch in batches) == 1, "no environment was begun a second time"
        assert discarded(world) == 0

    play(scenario)


def test_an_environment_that_fails_is_begun_again_and_dropped_with_the_reason_in_the_end() -> None:
    async def scenario(world: EpisodeWorld) -> None:
        await world.start_head()
        world.rewards = await world.start_rewards()
        world.workers = [await world.start_worker("rollout-0")]
        world.trainer = await world.start_trainer()
        world.manners = Manners(THINK_S, fails=1.0)
        await world.start_environments()
        await world.until(lambda: len(world.trained) >= 1)
        [batch] = [batch for step, batch in world.scheduler._ledger.batches.items() if step == 0]
        assert batch.lives.tolist() == [2] * 16
        assert set(batch.drop_reasons.values()) == {"no_result: the game gave no answer"}
        assert world.trained[0] == []

    play(scenario, {"attempts": 2})


def test_a_pause_longer_than_an_episode_may_take_costs_no_episode_anything() -> None:
    async def scenario(world: EpisodeWorld) -> None:
        await world.start()
        driving = world.environments[0]._playing
        await world.until(lambda: len(driving) >= 4)
        await world.pause(paused=True)
        await asyncio.sleep(20.0)
        await world.pause(paused=False)
        await to_the_end(world)
        has_whole_rows(world)
        assert discarded(world) == 0
        lives = np.concatenate([batch.lives for batch in world.scheduler._ledger.batches.values()])
        assert lives.max() == 2, "those that the pause had outlasted began again, once"

    play(scenario, {"episode_s": 5.0, "attempts": 1}, limits={"episode_overdue_s": 1.0})


def test_an_episode_that_hangs_is_taken_away_and_begun_again() -> None:
    async def scenario(world: EpisodeWorld) -> None:
        await world.start()
        slow = world.environments[0]
        await world.until(lambda: bool(slow._playing))
        hung = next(iter(slow._playing))
        slow._playing[hung].cancel()  # and nobody says a word of it
        slow._playing[hung] = asyncio.get_running_loop().create_task(asyncio.sleep(3600))
        await to_the_end(world)
        assert not world.refused
        for samples in world.trained.values():
            assert {sample[:2] for sample in samples}
            assert all(list(tokens) == world.whole_row(p, s) for p, s, tokens, _ in samples)
        assert world.scheduler._ledger.counters.dropped == 0

    play(scenario, {"episode_s": 5.0}, limits={"episode_overdue_s": 1.0})
