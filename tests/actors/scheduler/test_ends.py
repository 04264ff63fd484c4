"""How a job ends that ends early: its data ends, or its operator wants it to; whoever dies meanwhile, it does end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from actors.core.actor import concurrent, handles
from actors.environments.prompts.prompt_source import PromptsUnreadable
from actors.jobs.job import Job
from actors.protocol.batches import RequestCheckpoint
from actors.protocol.failures import Acknowledged
from actors.protocol.jobs import CancelJob, JobReport, PauseJob
from actors.protocol.rewards import PromptsRead, ReadPrompts
from actors.protocol.steps import CheckpointTaken
from tests.actors.episode_world import EpisodeWorld, episodes_config
from tests.actors.scheduler_world import FakeRewards, FakeWorker, Turn, World, play_in

InWorld = Callable[..., None]
LONG_S = 3600.0
STOP = RequestCheckpoint(job="j", stop=True)


class SlowSource(FakeRewards):
    """Takes ``last_s`` to find that its data has ended."""

    last_s = 7.0

    @handles(ReadPrompts)
    @concurrent
    async def read(self, question: ReadPrompts) -> PromptsRead:
        if question.start + question.count > self.prompts:
            await self.ctx.sleep(self.last_s)
            return PromptsRead(prompts=[], exhausted=True)
        return await super().read(question)


async def start(world: Any, source: FakeRewards) -> None:
    await (await world.system("rewards")).spawn("rewards", source)
    await world.start_worker("rollout-0")
    await world.start_trainer()


async def cancel(world: Any) -> None:
    await world.systems["head"].ref(world.job_at).ask(CancelJob(job="j"), JobReport)


def test_a_trainer_that_has_opened_a_step_which_never_comes_takes_its_checkpoint_and_ends(in_world: InWorld) -> None:
    async def scenario(world: Any) -> None:
        await world.start_head()
        await start(world, SlowSource(world.scheduler_at, prompts=8))
        assert await world.job.wait_over(LONG_S) == "finished"
        assert sorted(world.trained) == [0, 1]
        assert world.job.result()["checkpoint"] == "step_000002"

    in_world(scenario, steps=50)


class SpoiltSource(FakeRewards):
    """Its data has ``prompts`` rows that can be read, and then one that never can."""

    @handles(ReadPrompts)
    @concurrent
    async def read(self, question: ReadPrompts) -> PromptsRead:
        if question.start + question.count > self.prompts:
            raise PromptsUnreadable("row 8: no prompt")
        return await super().read(question)


@pytest.mark.parametrize("job_dies", [False, True])
def test_a_job_whose_data_cannot_be_read_on_takes_its_checkpoint_and_has_failed(
    in_world: InWorld, job_dies: bool
) -> None:
    """The steps whose prompts have come are trained. A job that is started again meanwhile has failed all the same."""

    async def scenario(world: Any) -> None:
        await world.start_head()
        source = SpoiltSource(world.scheduler_at, prompts=8)
        await (await world.system("rewards")).spawn("rewards", source)
        await world.start_worker("rollout-0")
        await asyncio.sleep(5)
        if job_dies:
            await world.systems["head"].stop_actor("job.j")
            world.job = Job(world.config, world.scheduler_at)
            await world.systems["head"].spawn("job.j", world.job)
        await world.start_trainer()
        assert await world.job.wait_over(LONG_S) == "failed"
        assert sorted(world.trained) == [0, 1]
        result = world.job.result()
        assert result["checkpoint"] == "step_000002" and "row 8: no prompt" in result["error"]

    in_world(scenario, steps=50)


def test_a_job_that_waits_for_prompts_ends_when_it_is_told_to(in_world: InWorld) -> None:
    async def scenario(world: Any) -> None:
        await world.start_head()
        source = SlowSource(world.scheduler_at, prompts=8)
        source.last_s = LONG_S
        await start(world, source)
        await world.until(lambda: 1 in world.trained)
        await asyncio.sleep(30)
        await cancel(world)
        assert await world.job.wait_over(10.0) == "interrupted"
        assert world.job.result()["checkpoint"] == "step_000002"

    in_world(scenario, steps=50)


def test_what_the_operator_wanted_is_not_forgotten_with_the_head(in_world: InWorld) -> None:
    """It dies before the step under way has been committed; nobody asks a second time."""

    async def scenario(world: Any) -> None:
        await world.start()
        await world.until(lambda: 1 in world.trained)
        await cancel(world)
        for name in ("head", "trainer", "rewards"):
            world.kill(name)
        await world.start_head()
        await world.start_rewards()
        await world.start_trainer()
        assert await world.job.wait_over(LONG_S) == "interrupted"
        assert len(world.trained) < 5

    in_world(scenario, steps=50)


def test_the_last_checkpoint_of_a_trainer_that_a_former_scheduler_has_stopped_ends_the_job(in_world: InWorld) -> None:
    """The head dies while it is being written; the trainer has its word to stop, tells the next one, and is gone."""

    async def scenario(world: Any) -> None:
        await world.start()
        await world.until(lambda: 1 in world.trained)
        world.trainer.checkpoint_s = LONG_S
        await cancel(world)
        await asyncio.sleep(10)
        for name in ("head", "trainer"):
            world.kill(name)
        await world.start_head()
        committed = world.scheduler._ledger.committed_steps
        assert committed == len(world.trained) < 5
        taken = CheckpointTaken(job="j", step=committed, path="step", final=True)
        await world.systems["head"].ref(world.scheduler_at).ask(taken, Acknowledged)
        assert await world.job.wait_over(LONG_S) == "interrupted"

    in_world(scenario, steps=50, checkpoint={"every": 0})


def test_a_run_that_is_resumed_goes_on_whatever_ended_it(in_world: InWorld) -> None:
    async def scenario(world: Any) -> None:
        await world.start()
        await world.until(lambda: 1 in world.trained)
        await cancel(world)
        assert await world.job.wait_over(LONG_S) == "interrupted"
        for name in list(world.systems):
            world.kill(name)
        trained = len(world.trained)
        await world.start_head(resumed=True)
        await world.start_rewards()
        await world.start_worker("rollout-0")
        await world.start_trainer(step=trained)
        assert await world.job.wait_over(LONG_S) == "finished"
        assert sorted(world.trained) == list(range(6))

    in_world(scenario, steps=6)


def test_a_paused_job_that_is_told_to_stop_goes_on_to_its_end_whoever_dies_in_between(in_world: InWorld) -> None:
    async def scenario(world: Any) -> None:
        await world.start()
        await world.until(lambda: 1 in world.trained)
        head = world.systems["head"]
        await head.ref(world.job_at).ask(PauseJob(job="j"), JobReport)
        await asyncio.sleep(5)
        await head.ref(world.scheduler_at).ask(STOP, Acknowledged)
        for name in list(world.systems):
            world.kill(name)
        await world.start_head()
        await world.start_rewards()
        await world.start_worker("rollout-0")
        await world.start_trainer(step=len(world.trained))
        assert await world.job.wait_over(LONG_S) == "interrupted"

    in_world(scenario, steps=50)


def test_a_job_that_was_not_there_when_it_ended_is_told_so_when_it_comes(in_world: InWorld) -> None:
    """Its trainer trains no more and is not started again: nobody else would say it."""

    async def scenario(world: Any) -> None:
        await world.start()
        await world.until(lambda: 1 in world.trained)
        await world.systems["head"].stop_actor("job.j", "crashed")
        await world.systems["head"].ref(world.scheduler_at).ask(STOP, Acknowledged)
        await world.until(lambda: world.scheduler._ledger.ended)
        for name in list(world.systems):
            world.kill(name)
        await world.start_head()
        assert await world.job.wait_over(LONG_S) == "interrupted"
        assert world.job.result()["checkpoint"] == f"step_{len(world.trained):06d}"

    in_world(scenario, steps=50)


def test_a_checkpoint_that_is_asked_for_during_a_replay_is_taken_once(in_world: InWorld) -> None:
    async def scenario(world: Any) -> None:
        await world.start()
        await world.until(lambda: 5 in world.trained)
        world.kill("trainer")
        await asyncio.sleep(1)
        committed = world.scheduler._ledger.committed_steps
        order = RequestCheckpoint(job="j", stop=False)
        await world.systems["head"].ref(world.scheduler_at).ask(order, Acknowledged)
        await world.start_trainer(step=0)
        await world.until(lambda: committed in world.trained)
        await asyncio.sleep(1)
        assert [step for kind, step, _ in world.journal._bodies if kind == "checkpointed"] == [committed + 1]

    in_world(scenario, steps=50, checkpoint={"every": 0})


@pytest.mark.parametrize("mode", ["sync", "async", "minibatch"])
def test_a_job_without_workers_ends_when_it_is_told_to_with_the_last_step_that_it_has(
    in_world: InWorld, mode: str
) -> None:
    """As after ``scale 0``: nobody will ever generate what the step lacks."""

    async def scenario(world: Any) -> None:
        await world.start(workers=1)
        await world.until(lambda: 1 in world.trained)
        world.kill("rollout-0")
        await asyncio.sleep(60)
        done = len(world.trained)
        await cancel(world)
        began_s = asyncio.get_running_loop().time()
        assert await world.job.wait_over(30.0) == "interrupted"
        assert asyncio.get_running_loop().time() - began_s >= 10, "a worker may have been about to come back"
        assert len(world.trained) == done
        assert world.job.result()["checkpoint"] == f"step_{done:06d}"

    in_world(scenario, steps=50, sync={"mode": mode})


def test_a_worker_that_comes_back_in_time_finishes_the_step_of_a_job_that_stops(in_world: InWorld) -> None:
    async def scenario(world: Any) -> None:
        await world.start(workers=1)
        await world.until(lambda: 1 in world.trained)
        world.kill("rollout-0")
        await asyncio.sleep(60)
        done = len(world.trained)
        await cancel(world)
        await asyncio.sleep(8)
        await world.start_worker("rollout-0")
        assert await world.job.wait_over(LONG_S) == "interrupted"
        assert len(world.trained) > done

    in_world(scenario, steps=50)


class Silent(FakeWorker):
    """Its engine hangs as soon as ``hang`` is set, and it renews its lease all the same."""

    hang = False

    @handles(Turn)
    async def turn(self, _: Turn) -> None:
        if self.hang:
            self.ctx.send_after(self.step_s, Turn())
        else:
            await super().turn(_)


@pytest.mark.parametrize("mode", ["sync", "async", "one_step_barrier", "minibatch"])
@pytest.mark.parametrize("who", ["judge", "engine"])
def test_a_job_that_is_told_to_stop_leaves_a_step_that_stands_still_as_it_is_and_names_what_it_waited_for(
    in_world: InWorld, who: str, mode: str
) -> None:
    """One request is enough: the step is left, and the checkpoint is that of the step before."""

    async def scenario(world: Any) -> None:
        await world.start_head()
        rewards = await world.start_rewards()
        worker = Silent(world.scheduler_at)
        await (await world.system("rollout-0")).spawn("rollout-0", worker)
        await world.start_trainer()
        await world.until(lambda: 1 in world.trained)
        if who == "judge":
            rewards.delay_s = LONG_S
        else:
            worker.hang = True
        await asyncio.sleep(300)
        done = len(world.trained)
        await cancel(world)
        began_s = asyncio.get_running_loop().time()
        assert await world.job.wait_over(LONG_S) == "interrupted"
        assert asyncio.get_running_loop().time() - began_s < world.config.limits.stop_silence_s + 10
        assert len(world.trained) == done
        assert world.job.result()["checkpoint"] == f"step_{done:06d}"
        (said,) = [event.fields["message"] for event in world.events if "the job is to stop" in str(event.fields)]
        assert ("verdicts on" if who == "judge" else "tokens from rollout-0") in said

    in_world(scenario, steps=50, sync={"mode": mode})


def test_a_step_that_moves_slowly_is_finished_by_a_job_that_is_told_to_stop(in_world: InWorld) -> None:
    async def scenario(world: Any) -> None:
        await world.start_head()
        await world.start_rewards()
        await world.start_worker("rollout-0", step_s=50.0)
        await world.start_trainer()
        await world.until(lambda: 0 in world.trained, LONG_S)
        await cancel(world)
        assert await world.job.wait_over(LONG_S) == "interrupted"
        assert len(world.trained) >= 1 and world.job.result()["checkpoint"] == f"step_{len(world.trained):06d}"
        assert not [event for event in world.events if "the job is to stop" in str(event.fields)]

    in_world(scenario, steps=50, limits={"lease_s": LONG_S, "stop_timeout_s": 5.0})


def test_an_external_job_whose_agents_are_gone_ends_when_it_is_told_to() -> None:
    job = episodes_config(steps=50, environment={"kind": "external", "path": None})

    async def scenario(world: EpisodeWorld) -> None:
        await World.start(world)
        await asyncio.sleep(100)
        await cancel(world)
        assert await world.job.wait_over(LONG_S) == "interrupted"
        (said,) = [event.fields["message"] for event in world.events if "the job is to stop" in str(event.fields)]
        assert "the environments of" in said and "a resumed run goes on with it" in said

    play_in(EpisodeWorld, job, scenario)
