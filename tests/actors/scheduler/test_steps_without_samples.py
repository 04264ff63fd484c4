"""Steps without a sample to train, in virtual time: people are told why, and a run that trains on nothing fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from actors.jobs.troubles import RunWatch
from actors.protocol.failures import FailureKind
from actors.protocol.rewards import Verdict

InWorld = Callable[..., None]

WHY = "NameError: name 'answr' is not defined (rw.py:1)"


def no_verdict(prompt: int, sibling: int) -> Verdict:
    return Verdict(prompt=prompt, sibling=sibling, reward=None, failure_kind=FailureKind.NO_RESULT, failure_message=WHY)


def told(world: Any, trouble: str) -> list[str]:
    return [e.fields["message"] for e in world.events if e.kind == "trouble" and e.fields["trouble"] == trouble]


def rows(world: Any) -> list[dict[str, Any]]:
    return [e.fields for e in world.events if e.kind == "step"]


async def start(world: Any, fails: Callable[[int, int], bool]) -> None:
    """Everybody, over a verifier that gives no verdict on the samples of which ``fails`` holds."""
    await world.start_head()
    world.rewards = await world.start_rewards()
    verdict = world.rewards.verdict
    world.rewards.verdict = lambda p, s: no_verdict(p, s) if fails(p, s) else verdict(p, s)
    await world.start_worker("rollout-0")
    world.trainer = await world.start_trainer()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_run_whose_verifier_always_fails_ends_after_some_empty_steps_with_its_checkpoint_and_the_cause(
    in_world: InWorld, mode: str
) -> None:
    async def scenario(world: Any) -> None:
        await start(world, lambda p, s: True)
        assert await world.job.wait_over(60) == "failed"
        made, result = rows(world), world.job.result()
        assert 3 <= len(made) <= 4, "a step was under way when the third one had shown that it is hopeless"
        assert all(row["reward_mean"] is None and row["samples_dropped"] == 16 for row in made)
        assert result["reward_last"] is None and result["samples_dropped"] == 16 * len(made)
        assert result["checkpoint"] == f"step_{len(made):06d}"
        (reason,) = [e.fields["reason"] for e in world.events if e.kind == "state" and e.fields["state"] == "failed"]
        share = "48 of 48 samples of the last 3 steps had no verdict"
        assert reason == f"no sample of 3 steps in a row could be trained: {share}: {WHY}"

    in_world(scenario, steps=20, sync={"mode": mode})


def test_the_first_sample_without_a_verdict_is_told_at_once_and_the_share_with_each_doubling(
    in_world: InWorld,
) -> None:
    async def scenario(world: Any) -> None:
        await start(world, lambda p, s: s == 0)
        assert await world.job.wait_over(60) == "finished"
        assert told(world, "first_without_verdict") == [f"a sample got no verdict in 3 tries: {WHY}"]
        assert told(world, "samples_dropped") == [
            f"4 of 16 samples of the last step had no verdict: {WHY}",
            f"8 of 32 samples of the last 2 steps had no verdict: {WHY}",
            f"16 of 64 samples of the last 4 steps had no verdict: {WHY}",
            f"32 of 128 samples of the last 8 steps had no verdict: {WHY}",
        ]
        first = [e.kind for e in world.events if e.kind in ("trouble", "step")]
        assert first[0] == "trouble", "before the first step is over"

    in_world(scenario, steps=12)


def test_a_short_run_that_has_trained_on_nothing_fails_at_its_end(in_world: InWorld) -> None:
    async def scenario(world: Any) -> None:
        await start(world, lambda p, s: True)
        assert await world.job.wait_over(60) == "failed"
        assert len(rows(world)) == 2 and world.job.result()["checkpoint"] == "step_000002"

    in_world(scenario, steps=2)


def test_a_step_with_samples_ends_a_row_of_empty_ones(in_world: InWorld) -> None:
    async def scenario(world: Any) -> None:
        await start(world, lambda p, s: p // 4 % 3 != 2)  # two empty steps, one that is whole, and so on
        assert await world.job.wait_over(60) == "finished"
        assert [row["reward_mean"] is None for row in rows(world)] == [True, True, False] * 3

    in_world(scenario, steps=9)


def test_a_job_that_is_started_again_while_it_is_being_ended_still_fails(in_world: InWorld) -> None:
    """What its former life knew is in the rows, and the ledger says that it is stopping."""

    async def scenario(world: Any) -> None:
        await start(world, lambda p, s: True)
        world.trainer.train_s = 1.0
        await world.until(lambda: world.job.state == "stopping")
        anew = RunWatch(world.config.limits, lambda warned: pytest.fail(f"told again: {warned}"))
        anew.take_over(rows(world), 2)
        assert anew.hopeless_before == "no sample of 3 steps in a row could be trained"
        assert await world.job.wait_over(60) == "failed"

    in_world(scenario, steps=20)


def test_a_reward_worker_that_stays_silent_is_told_of(in_world: InWorld) -> None:
    async def scenario(world: Any) -> None:
        await start(world, lambda p, s: False)
        await world.until(lambda: len(rows(world)) == 1)
        world.rewards.delay_s = 1e9
        await world.until(lambda: told(world, "reward_worker_silent") != [], timeout_s=600)
        assert "finished samples are tried again" in told(world, "reward_worker_silent")[0]

    in_world(scenario, reward={"kind": "exact_match", "timeout_s": 0.5}, steps=20)
