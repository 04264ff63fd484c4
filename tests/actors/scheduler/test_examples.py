"""Some samples of each committed step are told to whoever can decode them, for people to read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from actors.protocol.failures import FailureKind
from actors.protocol.rewards import Verdict
from tests.actors.scheduler_world import length, reward, token

InWorld = Callable[..., None]


def test_the_best_the_worst_some_others_and_one_that_was_dropped_are_shown(in_world: InWorld) -> None:
    async def scenario(world: Any) -> None:
        await world.start()
        verdict = world.rewards.verdict
        lost = Verdict(prompt=2, sibling=3, reward=None, failure_kind=FailureKind.DATA, failure_message="bad")
        world.rewards.verdict = lambda p, s: lost if (p, s) == (2, 3) else verdict(p, s)
        assert await world.job.wait_over(60) == "finished"
        (first, *_) = world.rewards.shown
        assert first.step == 0
        by_choice = {sample.chosen: sample for sample in first.samples}
        assert [sample.chosen for sample in first.samples].count("random") == 2
        assert by_choice["best"].reward == 1.0 and by_choice["worst"].reward == 0.0
        assert (by_choice["dropped"].prompt, by_choice["dropped"].sibling) == (2, 3)
        assert by_choice["dropped"].reason == "data: bad" and by_choice["dropped"].reward is None
        for sample in first.samples:
            p, s = sample.prompt, sample.sibling
            assert sample.token_ids.tolist() == [token(p, s, i) for i in range(length(p, s))]
            assert sample.chosen == "dropped" or sample.reward == reward(p, s)

    in_world(scenario, limits={"samples_interval_s": 0.001})


def test_a_fast_loop_shows_some_of_its_steps_and_a_job_may_show_none(in_world: InWorld) -> None:
    shown: list[list[int]] = []

    async def scenario(world: Any) -> None:
        await world.start()
        assert await world.job.wait_over(60) == "finished"
        shown.append([news.step for news in world.rewards.shown])

    in_world(scenario, steps=20)
    assert shown[0][0] == 0 and 1 < len(shown[0]) < 20
    in_world(scenario, steps=20, metrics={"samples": False})
    assert shown[1] == []
