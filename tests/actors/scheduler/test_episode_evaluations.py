"""Evaluations of episodes, in virtual time: on slots that training leaves, counted as evaluations, whoever dies."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from actors.ledger import events as ev
from actors.protocol.episodes import EpisodeName, GetEpisode
from actors.protocol.evaluations import evaluation_step, is_evaluation, version_of
from tests.actors.episode_world import EpisodeWorld, episodes_config, said
from tests.actors.scheduler_world import STOP, play_in

EVERY: dict[str, Any] = {"every": 2, "samples": 4, "data": {"path": "unused.jsonl"}}


def play(
    scenario: Callable[[EpisodeWorld], Awaitable[None]], *, seed: int = 0, evaluation: dict[str, Any] = EVERY,
    **changes: Any,
) -> EpisodeWorld:  # fmt: skip
    return play_in(EpisodeWorld, episodes_config(eval=evaluation, **changes), scenario, seed)


async def finish(world: EpisodeWorld) -> None:
    assert await world.job.wait_over(60.0) == "finished"


def rows(world: EpisodeWorld) -> dict[int, dict[str, Any]]:
    return {event.fields["version"]: event.fields for event in world.events if event.kind == "evaluation"}


def status(world: EpisodeWorld, step: int) -> str:
    """What the gateway hears of an episode of that batch."""
    return world.scheduler._turns.record(GetEpisode("j", EpisodeName(step, 0, 0, 1)), 0.0).status


def held_out_turns(world: EpisodeWorld) -> list[list[list[int]]]:
    """What the model says in each held-out game, turn by turn."""
    return [turns_of(world, prompt, sibling) for prompt in range(5) for sibling in range(4)]


def turns_of(world: EpisodeWorld, prompt: int, sibling: int) -> list[list[int]]:
    row, game, at, turns = world.whole_row(prompt, sibling), world.game(prompt, sibling), 0, list[list[int]]()
    while at < len(row) and (word := game.say([np.array(t, np.int32) for t in turns], 1)) is not None:
        at += len(word.tokens)
        turn: list[int] = []
        while at < len(row) and turn[-1:] != [STOP]:
            turn.append(said(prompt, sibling, at))
            at += 1
        turns.append(turn)
    return turns


def check_evaluations(world: EpisodeWorld, versions: list[int]) -> None:
    """Each has the figures of undisturbed games, of its own version alone."""
    assert not world.refused and sorted(rows(world)) == versions
    games, pairs = held_out_turns(world), [(p, s) for p in range(5) for s in range(4)]
    rewards = [world.game(p, s).reward(np.array(world.whole_row(p, s), np.int32)) for p, s in pairs]
    for version, row in rows(world).items():
        assert row["samples"] == 20 and row["samples_dropped"] == 0
        assert row["avg_at_k"] == pytest.approx(np.mean(rewards))
        assert row["version_min"] == row["version_max"] == version
        assert row["response_tokens_mean"] == pytest.approx(np.mean([sum(map(len, turns)) for turns in games]))
        assert row["turns_mean"] == pytest.approx(np.mean([len(turns) for turns in games]))


def check_training(world: EpisodeWorld, steps: int) -> None:
    """Every step has its rows, and the evaluations count in none of it."""
    said_in_training = 0
    for samples in world.trained.values():
        assert len(samples) == 16
        for prompt, sibling, tokens, _ in samples:
            assert list(tokens) == world.whole_row(prompt, sibling)
            said_in_training += sum(map(len, turns_of(world, prompt, sibling)))
    result = world.job.result()
    assert result["steps"] == steps and result["samples"] == 16 * steps
    assert result["prompts_lost"] == 0 and result["samples_trained_twice"] == 0
    assert world.scheduler.counters.tokens == said_in_training
    assert world.scheduler.counters.tokens_discarded == 0


def test_versions_are_evaluated_with_episodes_beside_training_and_count_in_no_step() -> None:
    async def scenario(world: EpisodeWorld) -> None:
        await world.start()
        await finish(world)
        check_training(world, 3)
        check_evaluations(world, [0, 2, 3])
        assert all(row["env_turns"] == pytest.approx(row["turns_mean"]) for row in rows(world).values())
        known = [status(world, evaluation_step(version)) for version in range(4)]
        assert known == ["ended", "unknown", "ended", "ended"], "version 1 was never due"

    play(scenario)


def test_an_episode_of_an_evaluation_begins_only_when_none_of_a_step_wants_the_slot() -> None:
    async def scenario(world: EpisodeWorld) -> None:
        await world.start()
        await finish(world)
        begun: dict[int, set[int]] = {}
        beside = 0
        for event in world.journal.read()[1]:
            if not isinstance(event, ev.EpisodesBegun):
                continue
            if is_evaluation(event.step) and version_of(event.step) < 3:
                assert len(begun[version_of(event.step)]) == 16, "all of that step's have begun before"
                beside += len(event.rows)
            begun.setdefault(event.step, set()).update(event.rows.tolist())
        assert beside == 40

    play(scenario)


@pytest.mark.parametrize("seed", range(3))
def test_whoever_dies_amid_an_evaluation_of_episodes_its_figures_are_the_same(seed: int) -> None:
    async def scenario(world: EpisodeWorld) -> None:
        rng = random.Random(seed)
        await world.start(environments=2)
        for turn in range(4):
            await world.until(lambda: bool(world.scheduler._ledger.evaluations) or world.job.over)
            await asyncio.sleep(rng.uniform(0.05, 0.3))
            if turn == 1:
                await world.restart_head()
                continue
            victim = rng.choice(["rollout-0", "rollout-1", "environments-0", "environments-1"])
            world.kill(victim)
            await asyncio.sleep(0.1)
            start = world.start_worker if victim.startswith("rollout") else world.start_environments
            await start(victim)
        await finish(world)
        assert world.scheduler.counters.tokens_discarded == 0
        assert all(row["samples"] == 20 for row in rows(world).values())
        averages = {round(row["avg_at_k"], 9) for row in rows(world).values()}
        assert len(averages) == 1 and sorted(rows(world)) == [0, 2, 3]

    play(scenario, seed=seed)


def test_what_an_evaluation_says_of_its_responses_bounds_its_episodes() -> None:
    async def scenario(world: EpisodeWorld) -> None:
        await world.start()
        await finish(world)
        issued = [e for e in world.journal.read()[1] if isinstance(e, ev.BatchIssued) and is_evaluation(e.step)]
        bounds = {(e.sampling.max_tokens, e.episodes.turn_tokens, e.episodes.episode_tokens) for e in issued}  # type: ignore[union-attr]
        assert bounds == {(20, 20, 80)}
        assert all(row["response_tokens_mean"] <= 20 for row in rows(world).values())

    play(scenario, evaluation=EVERY | {"max_tokens": 20})
