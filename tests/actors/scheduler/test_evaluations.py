"""Evaluations beside training, in virtual time: of which version, on whose slots, and whatever dies meanwhile."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from actors.ledger import events as ev
from actors.ledger.batch import SampleState
from actors.ledger.ledger import Ledger
from actors.protocol.evaluations import is_evaluation, version_of
from actors.protocol.jobs import CancelJob, JobReport
from actors.protocol.rewards import Verdict
from tests.actors.scheduler_world import FakeTrainer, World, config, length, play_in, reward

InWorld = Callable[..., None]
EVERY: dict[str, Any] = {"every": 2, "samples": 4, "data": {"path": "unused.jsonl"}}
MEAN = sum(reward(p, s) for p in range(5) for s in range(4)) / 20
"""Of an evaluation that has lost no sample."""


def rows(world: Any) -> dict[int, dict[str, Any]]:
    """Version → its row. A job without eval.jsonl, as here, is told of all again by the next life of the head."""
    found: dict[int, dict[str, Any]] = {}
    for row in (event.fields for event in world.events if event.kind == "evaluation"):
        assert found.setdefault(row["version"], row) == row
    return found


async def finish(world: Any) -> None:
    assert await world.job.wait_over(60.0) == "finished"


async def start_again(world: World) -> None:
    """All of it is killed, and what was not durable is lost but for two events; then the run is resumed."""
    for name in ("head", "trainer", "rewards", "rollout-0", "rollout-1"):
        if name in world.systems:
            world.kill(name)
    world.journal.crash(keep=2)
    frontier = max((e.step for e in world.journal.read()[1] if isinstance(e, ev.Checkpointed)), default=0)
    await world.start_head(resumed=True)
    world.rewards = await world.start_rewards()
    world.workers = [await world.start_worker(f"rollout-{i}") for i in range(2)]
    world.trainer = await world.start_trainer(step=frontier)


def check_trained(world: Any, steps: int = 4) -> None:
    """Every sample of every step was trained, and the evaluation counts in none of it."""
    names = [(s[0], s[1]) for step in sorted(world.trained) for s in world.trained[step]]
    assert names == [(p, s) for p in range(4 * steps) for s in range(4)]
    result = world.job.result()
    assert result["prompts_lost"] == 0 and result["samples_trained_twice"] == 0
    assert result["samples"] == 16 * steps and result["steps"] == steps
    assert result["tokens"] == sum(len(s[2]) for step in world.trained.values() for s in step)


def check_whole(world: Any, versions: list[int]) -> None:
    """Each of these was evaluated, with all samples."""
    assert sorted(rows(world)) == versions
    for row in rows(world).values():
        assert row["samples"] == 20 and row["samples_dropped"] == 0 and row["avg_at_k"] == pytest.approx(MEAN)


def test_versions_are_evaluated_at_the_start_every_few_steps_and_at_the_end(in_world: InWorld) -> None:
    async def scenario(world: Any) -> None:
        await world.start()
        await finish(world)
        check_trained(world, 5)
        check_whole(world, [0, 2, 4, 5])
        for version, row in rows(world).items():
            assert row["version_min"] == row["version_max"] == version, "on-policy, all of one version"
            assert set(row["pass_at_k"]) == {"1", "2", "4"} and row["prompts"] == 5
        summary = world.job.result()["eval"]
        assert [summary[which]["version"] for which in ("first", "last", "best")] == [0, 5, 0]

    in_world(scenario, steps=5, eval=EVERY)


def test_an_evaluation_that_is_long_holds_the_next_version_back_if_it_is_to_be_of_one(in_world: InWorld) -> None:
    """With 400 samples on 32 slots it takes longer than the trainer's step."""

    async def scenario(world: Any) -> None:
        await world.start_head()
        rewards = await world.start_rewards()
        rewards.held_out = 100
        world.workers = [await world.start_worker(f"rollout-{i}") for i in range(2)]
        await world.start_trainer()
        await finish(world)
        check_trained(world, 3)
        for version, row in rows(world).items():
            assert row["version_min"] == row["version_max"] == version
            assert row["samples"] == 400

    in_world(scenario, steps=3, eval=EVERY | {"every": 1})


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_training_that_does_not_wait_ends_as_soon_as_without_evaluation_but_for_the_last(mode: str) -> None:
    """What is left of an evaluation is drawn from newer versions, and the row says so. No step takes longer."""

    def last_step_s(**changes: Any) -> tuple[float, World]:
        ended: list[float] = []

        async def scenario(world: World) -> None:
            await world.start()
            world.rewards.held_out = 40
            await world.until(lambda: len(world.trained) == 6)
            ended.append(asyncio.get_running_loop().time())
            await finish(world)

        job = config(steps=6, sync={"mode": mode}, **changes)
        return (play_in(World, job, scenario), ended[0])[::-1]  # type: ignore[return-value]

    plain, _ = last_step_s()
    beside, world = last_step_s(eval=EVERY | {"every": 100, "wait": mode != "sync"})
    assert rows(world)[0]["version_max"] > rows(world)[0]["version_min"]
    assert rows(world)[6]["version_min"] == rows(world)[6]["version_max"] == 6, "nobody trains behind it"
    check_trained(world, 6)
    assert beside <= plain * 1.5, "its samples have taken slots that nobody needed at that moment"


def test_no_sample_of_an_evaluation_is_handed_out_while_one_of_a_step_waits(in_world: InWorld) -> None:
    async def scenario(world: Any) -> None:
        await world.start(workers=1)  # 16 slots: a step fills them all
        await finish(world)
        check_whole(world, [0, 2, 4])
        ledger, beside = Ledger(), set[int]()
        for event in world.journal.read()[1]:
            if isinstance(event, ev.Assigned) and is_evaluation(event.step):
                step = ledger.batches.get(version_of(event.step))
                assert step is None or not (step.state == SampleState.QUEUED).any()
                if step is not None and (step.state < SampleState.SCORED).any():
                    beside.add(event.step)
            ledger.apply(event)
        assert beside, "some go out while the last samples of the step are generated"

    in_world(scenario, eval=EVERY, checkpoint={"every": 0})


@pytest.mark.parametrize("after_s", [0.07, 0.1, 0.13, 0.2, 0.3])
@pytest.mark.parametrize("who", ["rollout-0", "rewards"])
def test_who_is_killed_in_mid_evaluation_costs_no_sample_of_it(in_world: InWorld, who: str, after_s: float) -> None:
    async def scenario(world: Any) -> None:
        await world.start()
        await asyncio.sleep(after_s)
        world.kill(who)
        if who == "rewards":
            await world.start_rewards()
        await finish(world)
        check_trained(world)
        check_whole(world, [0, 1, 2, 3, 4])

    in_world(scenario, eval=EVERY | {"every": 1})


def test_a_worker_killed_in_mid_evaluation_goes_on_elsewhere_from_the_tokens_that_the_ledger_has(
    in_world: InWorld,
) -> None:
    async def scenario(world: Any) -> None:
        await world.start(workers=1)
        held = world.workers[0].held
        await world.until(lambda: any(is_evaluation(step) and at > 2 for _, _, at, step in held.values()))
        world.kill("rollout-0")
        world.workers = [await world.start_worker("rollout-0")]
        await finish(world)
        check_trained(world)
        check_whole(world, [0, 2, 4])
        back = [e for e in world.journal.read()[1] if isinstance(e, ev.Returned) and len(e.assignments)]
        assert back, "some were with it"
        generated = sum(length(p, s) for p in range(5) for s in range(4)) * 3
        assert world.scheduler.counters.evaluation_tokens == generated, "and no token of theirs is generated twice"

    in_world(scenario, eval=EVERY, checkpoint={"every": 0})


@pytest.mark.parametrize("after_s", [0.05, 0.09, 0.13, 0.2, 0.35, 0.5])
def test_a_head_that_dies_in_mid_evaluation_goes_on_with_the_same_samples(after_s: float) -> None:
    async def scenario(world: World) -> None:
        await world.start()
        await asyncio.sleep(after_s)
        await start_again(world)
        await finish(world)
        check_whole(world, [0, 1, 2, 3, 4])
        assert sorted(world.trained) == [0, 1, 2, 3]

    play_in(World, config(eval=EVERY | {"every": 1}), scenario)


def test_an_evaluation_outlives_the_pruning_of_the_steps_beside_it() -> None:
    """It lasts for so long that the steps during which it began could be pruned; then the head dies."""

    async def scenario(world: World) -> None:
        await world.start_head()
        rewards = await world.start_rewards()
        rewards.held_out = 60
        world.workers = [await world.start_worker(f"rollout-{i}") for i in range(2)]
        world.trainer = await world.start_trainer()
        await world.until(lambda: len(world.trained) == 6)
        assert world.scheduler._ledger.evaluations, "it is still under way"
        await start_again(world)
        [step] = world.scheduler._ledger.evaluations
        assert (world.scheduler._ledger.batches[step].state >= SampleState.FINISHED).any(), "what it had is there"
        world.rewards.held_out = 60
        await finish(world)
        assert {version: row["samples"] for version, row in rows(world).items()} == {0: 240, 12: 240}

    job = config(steps=12, checkpoint={"every": 1, "keep": 1}, sync={"mode": "async"}, eval=EVERY | {"every": 100})
    play_in(World, job, scenario)


def test_the_best_checkpoint_is_spared_and_marked_whoever_dies(tmp_path: Path) -> None:
    """Rewards of the evaluation rise up to version 2 and fall again."""

    async def scenario(world: World) -> None:
        await world.start_head()
        rewards = await world.start_rewards()
        verdict = rewards.verdict

        def scored(prompt: int, sibling: int) -> Verdict:
            evaluated = world.scheduler._ledger.evaluations
            if not evaluated:
                return verdict(prompt, sibling)
            return Verdict(prompt=prompt, sibling=sibling, reward=1.0 if evaluated == [-3] else 0.0)

        rewards.verdict = scored
        world.workers = [await world.start_worker(f"rollout-{i}") for i in range(2)]
        trainer = await world.start_trainer()
        trainer.directory = tmp_path
        await world.until(lambda: (tmp_path / "best").is_symlink() and len(trainer.spared) >= 4)
        assert (tmp_path / "best").readlink() == Path("step_000002")
        assert all(2 in spared for spared in trainer.spared[3:])
        (tmp_path / "best").unlink()  # as if the head had died before it could move it
        world.kill("head")
        await world.start_head()
        await world.until(lambda: (tmp_path / "best").is_symlink())
        assert (tmp_path / "best").readlink() == Path("step_000002")

    job = config(steps=8, checkpoint={"every": 0, "keep": 1, "keep_best": True}, eval=EVERY)
    play_in(World, job, scenario)


def test_a_checkpoint_that_is_still_being_stored_is_spared_though_its_evaluation_is_over(in_world: InWorld) -> None:
    """A trainer stores a checkpoint beside its next step, whose commit may come before ``CheckpointTaken``."""

    async def scenario(world: Any) -> None:
        await world.start_head()
        world.rewards = await world.start_rewards()
        world.workers = [await world.start_worker(f"rollout-{i}") for i in range(2)]
        trainer = await world.start_trainer()

        async def stored_later(*, final: bool) -> None:
            if final:
                await FakeTrainer.checkpoint(trainer, final=final)

        trainer.checkpoint = stored_later
        await finish(world)
        assert {0, 1, 2} < rows(world).keys(), "their evaluations are over"
        assert not trainer.spared[0] and set(trainer.spared[1]) == {1} and set(trainer.spared[2]) == {1, 2}

    in_world(scenario, steps=4, checkpoint={"every": 0, "keep": 1, "keep_best": True}, eval=EVERY | {"every": 1})


def test_a_job_that_is_cancelled_while_its_last_version_is_evaluated_ends_without(in_world: InWorld) -> None:
    async def scenario(world: Any) -> None:
        await world.start()
        await world.until(lambda: world.scheduler._ledger.ended)
        assert not world.job.state.over
        world.kill("rollout-0")
        world.kill("rollout-1")
        await world.systems["head"].ref(world.job_at).ask(CancelJob(job="j"), JobReport)
        assert await world.job.wait_over(60.0) == "finished", "all of its steps are done"
        assert 4 not in rows(world)

    in_world(scenario, eval=EVERY | {"every": 100})


def test_samples_without_a_verdict_are_left_out_and_counted(in_world: InWorld) -> None:
    async def scenario(world: Any) -> None:
        await world.start_head()
        rewards = await world.start_rewards()

        def verdict(prompt: int, sibling: int) -> Verdict:
            if sibling == 3 and world.scheduler._ledger.evaluations and prompt == 4:
                return Verdict(prompt, sibling, None, "data", "bad")
            return Verdict(prompt=prompt, sibling=sibling, reward=1.0)

        rewards.verdict = verdict
        await world.start_worker("rollout-0")
        await world.start_trainer()
        await finish(world)
        row = rows(world)[1]
        assert row["samples"] == 19 and row["samples_dropped"] == 1 and row["avg_at_k"] == 1.0
        assert not math.isnan(row["pass_at_k"]["4"])

    in_world(scenario, steps=1, eval=EVERY)


def test_an_evaluation_whose_prompts_are_gone_is_given_up_and_training_goes_on(in_world: InWorld) -> None:
    async def scenario(world: Any) -> None:
        await world.start()
        await world.until(lambda: 0 in rows(world))
        world.rewards.held_out = 0
        await finish(world)
        check_trained(world)
        assert sorted(rows(world)) == [0]
        told = [event.fields["message"] for event in world.events if event.kind == "trouble"]
        assert any("version 2 is not evaluated: eval.data: no prompt in it can be used" in text for text in told)

    in_world(scenario, eval=EVERY)


def test_a_job_without_a_prompt_to_evaluate_fails_before_its_first_step(in_world: InWorld) -> None:
    async def scenario(world: Any) -> None:
        await world.start_head()
        rewards = await world.start_rewards()
        rewards.held_out = 0
        await world.start_worker("rollout-0")
        await world.start_trainer()
        assert await world.job.wait_over(60.0) == "failed"
        assert "eval.data: no prompt in it can be used" in world.job.result()["error"]

    in_world(scenario, eval=EVERY)


def test_training_samples_are_the_same_with_and_without_evaluation() -> None:
    def trained(**changes: Any) -> dict[int, list[Any]]:
        async def scenario(world: World) -> None:
            await world.start()
            await finish(world)

        return play_in(World, config(**changes), scenario).trained

    assert trained() == trained(eval=EVERY | {"every": 1})
