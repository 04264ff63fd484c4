"""The scheduler with fakes all around it, in virtual time: whatever dies, the same samples are trained, once each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from actors.core.errors import RemoteError
from actors.ledger.ledger import Ledger
from actors.protocol.failures import Acknowledged
from actors.protocol.jobs import CheckpointJob, CheckpointReport
from actors.protocol.rewards import Verdict
from actors.protocol.steps import CheckpointTaken, CommitStep, Committed, OpenStep
from actors.protocol.workers import WorkerVersion

InWorld = Callable[..., None]

REQUIRED = """
    step policy_version seconds reward_mean samples tokens_generated tokens_trained response_tokens_mean
    response_tokens_max staleness_max clip_fraction kl entropy grad_norm rollout_idle_fraction trainer_idle_fraction
    samples_migrated restarts prompts_lost samples_trained_twice
"""


async def finish(world: Any) -> None:
    assert await world.job.wait_over(60.0) == "finished"


def check(world: Any, steps: int = 4) -> None:
    """Every sample of every step was trained, none twice, none lost."""
    assert sorted(world.trained) == list(range(steps))
    names = [(s[0], s[1]) for step in sorted(world.trained) for s in world.trained[step]]
    assert names == [(p, s) for p in range(4 * steps) for s in range(4)]
    result = world.job.result()
    assert result["prompts_lost"] == 0 and result["samples_trained_twice"] == 0
    assert result["samples"] == 16 * steps and result["steps"] == steps


def test_a_job_runs_from_its_first_prompt_to_its_last_step(in_world: InWorld) -> None:
    async def scenario(world: Any) -> None:
        await world.start()
        await finish(world)
        check(world)
        rows = [e.fields for e in world.events if e.kind == "step"]
        assert [r["step"] for r in rows] == [0, 1, 2, 3]
        for row in rows:
            assert set(row) >= set(REQUIRED.split())
            assert row["samples"] == 16 and row["staleness_max"] == 0 and row["kl"] == 0.5 and row["seconds"] > 0
            assert row["trainer_idle_fraction"] == 0.25 and 0 <= row["rollout_idle_fraction"] <= 1
            assert row["tokens_generated"] == row["tokens_trained"], "in sync mode a step generates what it trains"
        assert sum(w.assigned for w in world.workers) == 64 and all(w.assigned == 32 for w in world.workers)
        assert world.job.result()["checkpoint"] == "step_000004"
        assert (await world.progress()).waiting_for == ""

    in_world(scenario)


def test_the_start_up_of_whoever_delivers_prompts_is_no_part_of_the_first_step(in_world: InWorld) -> None:
    """The trainer waits half a minute for its first prompt, and the step is said to have taken a moment."""

    async def scenario(world: Any) -> None:
        await world.start_head()
        world.workers = [await world.start_worker("rollout-0")]
        world.trainer = await world.start_trainer()
        await asyncio.sleep(30.0)
        world.rewards = await world.start_rewards()
        await finish(world)
        rows = [e.fields for e in world.events if e.kind == "step"]
        assert all(0 < row["seconds"] < 5.0 for row in rows), [row["seconds"] for row in rows]

    in_world(scenario)


def test_nobody_speaks_for_a_worker_but_its_present_life(in_world: InWorld) -> None:
    async def scenario(world: Any) -> None:
        await world.start(workers=1)
        news = WorkerVersion(job="j", worker="rollout-0", policy_version=99, pull_s=0.0, pull_bytes=0)
        await world.until(lambda: "rollout-0" in world.scheduler._workers.by_name)
        world.systems["head"].ref(world.scheduler_at).tell(news)  # nobody is the sender
        world.systems["rewards"].ref(world.scheduler_at).tell(news)  # nor does its process
        await asyncio.sleep(0.01)  # less than the worker takes to load a version and to say so
        assert world.scheduler._workers.by_name["rollout-0"].policy_version < 99

    in_world(scenario)


def test_prompts_are_read_as_soon_as_somebody_delivers_them(in_world: InWorld) -> None:
    """Not when the job would have looked again, which after half a minute is seconds apart."""

    async def scenario(world: Any) -> None:
        await world.start_head()
        world.workers = [await world.start_worker("rollout-0")]
        world.trainer = await world.start_trainer()
        await asyncio.sleep(30.0)
        assert not world.scheduler._ledger.batches
        world.rewards = await world.start_rewards()
        await world.until(lambda: 0 in world.scheduler._ledger.batches, timeout_s=0.05)
        await finish(world)

    in_world(scenario)


def test_sync_mode_gives_each_step_to_workers_of_exactly_its_version(in_world: InWorld) -> None:
    async def scenario(world: Any) -> None:
        await world.start()
        await finish(world)
        assert {lag for w in world.workers for lag in w.versions} == {0}

    in_world(scenario)


def test_work_that_was_given_ahead_to_a_worker_that_loads_slowly_goes_to_another(in_world: InWorld) -> None:
    async def scenario(world: Any) -> None:
        await world.start_head()
        await world.start_rewards()
        slow = await world.start_worker("rollout-0", pull_s=1e6)
        quick = await world.start_worker("rollout-1")
        await world.start_trainer()
        await finish(world)
        check(world)
        assert slow.assigned == 0 and slow.revoked > 0, "it was given a share, and that was taken back"
        assert quick.assigned == 64

    in_world(scenario)


def test_a_prompt_that_kills_engines_is_set_aside_after_the_second_and_no_other_sample_is_lost(
    in_world: InWorld,
) -> None:
    async def scenario(world: Any) -> None:
        await world.start_head()
        await world.start_rewards()
        await world.start_trainer()
        lives = 0

        async def keep_alive(name: str) -> None:
            nonlocal lives
            while True:
                worker = await world.start_worker(name)
                worker.poison = 5
                lives += 1
                await world.systems[name].wait_stopped(name)
                await world.systems[name].stop()

        keepers = [asyncio.create_task(keep_alive(f"rollout-{i}")) for i in range(2)]
        try:
            await finish(world)
        finally:
            for keeper in keepers:
                keeper.cancel()
        names = [(s[0], s[1]) for step in sorted(world.trained) for s in world.trained[step]]
        assert names == [(p, s) for p in range(16) for s in range(4) if p != 5]
        reasons = {row.reason for row in world.journal.samples if row.prompt == 5}
        assert reasons == {"data: poison, 2 engines crashed while they held prompt 5"}
        assert lives == 2 + 2, "each of the two kills cost one life"
        assert world.job.result()["prompts_lost"] == 0

    in_world(scenario)


def test_async_mode_runs_ahead_by_no_more_than_the_bound(in_world: InWorld) -> None:
    async def scenario(world: Any) -> None:
        await world.start()
        await finish(world)
        check(world, 8)
        lags = {lag for w in world.workers for lag in w.versions}
        assert max(lags) == 1 and min(lags) >= 0
        assert max(e.fields["staleness_max"] for e in world.events if e.kind == "step") == 1

    in_world(scenario, steps=8, sync={"mode": "async", "max_staleness": 1})


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_prompts_are_read_up_to_the_staleness_bound_and_one_step_ahead_of_what_is_trained(
    in_world: InWorld, staleness: int
) -> None:
    """A step that is with the trainer counts as trained."""

    async def scenario(world: Any) -> None:
        await world.start_head()
        await world.start_rewards()
        await world.start_worker("rollout-0")
        ledger, ahead = world.scheduler._ledger, staleness + 2
        await asyncio.sleep(10)
        assert ledger.issued_steps == ahead, "nobody trains"
        await world.start_trainer()
        await world.until(lambda: ledger.issued_steps == ahead + 1)
        assert ledger.committed_steps == 0 and world.scheduler._grants.all_sent
        most = 0
        while world.job.state == "running":
            most = max(most, ledger.issued_steps - ledger.committed_steps)
            await asyncio.sleep(0.001)
        assert most == ahead + 1

    mode = "async" if staleness else "sync"
    in_world(scenario, steps=8, sync={"mode": mode, "max_staleness": max(1, staleness)})


@pytest.mark.parametrize("after_s", [0.03, 0.06, 0.1, 0.15])
def test_a_killed_worker_costs_no_sample_and_its_tokens_go_on_elsewhere(in_world: InWorld, after_s: float) -> None:
    async def scenario(world: Any) -> None:
        await world.start()
        await asyncio.sleep(after_s)
        world.kill("rollout-0")
        await finish(world)
        check(world)

    in_world(scenario)


def test_a_moved_sample_is_counted_and_not_generated_anew(in_world: InWorld) -> None:
    async def scenario(world: Any) -> None:
        await world.start(workers=1)
        await world.until(lambda: any(at > 2 for _, _, at, _ in world.workers[0].held.values()))
        world.kill("rollout-0")
        world.workers = [await world.start_worker("rollout-0")]
        await finish(world)
        check(world)
        row = [e.fields for e in world.events if e.kind == "step"][-1]
        assert row["samples_migrated"] > 0 and row["restarts"] == 1
        assert world.job.result()["tokens"] == sum(len(s[2]) for step in world.trained.values() for s in step)

    in_world(scenario)


def test_a_worker_is_told_what_has_been_taken_of_what_it_asked_about(in_world: InWorld) -> None:
    async def scenario(world: Any) -> None:
        await world.start()
        await finish(world)
        for worker in world.workers:
            asked = list(range(2, worker.sequence, 3))  # of its reports 2, 5, 8 …
            assert len(asked) > 2
            assert set(worker.taken) <= set(asked)
            assert worker.taken == sorted(worker.taken)
            assert worker.taken[-1] >= asked[-2], "the last answer may be under way"

    in_world(scenario)


def test_a_report_that_was_lost_is_noticed_and_its_samples_are_moved(in_world: InWorld) -> None:
    async def scenario(world: Any) -> None:
        await world.start()
        await world.until(lambda: bool(world.workers[0].held))
        world.workers[0].swallow = True
        # Samples that ended in the lost report are known to no one but the ledger, until the worker dies.
        await asyncio.sleep(0.2)
        world.kill("rollout-0")
        await finish(world)
        check(world)

    in_world(scenario)


@pytest.mark.parametrize("crash_at", [0, 1, 3])
def test_a_trainer_that_restarts_from_an_older_checkpoint_gets_the_same_samples_again(
    in_world: InWorld, crash_at: int
) -> None:
    async def scenario(world: Any) -> None:
        await world.start()
        world.trainer.crash_before_commit = crash_at
        await world.until(lambda: "trainer" not in world.systems["trainer"].actors())
        trainer = await world.start_trainer(step=crash_at // 2 * 2)
        await finish(world)
        check(world)
        assert trainer.replays == crash_at % 2
        assert len([e for e in world.events if e.kind == "step"]) == 4

    in_world(scenario)


def test_a_killed_reward_worker_costs_time_only(in_world: InWorld) -> None:
    async def scenario(world: Any) -> None:
        await world.start()
        world.rewards.delay_s = 0.05
        await world.until(lambda: bool(world.rewards.asked))
        world.kill("rewards")
        await asyncio.sleep(0.5)
        await world.start_rewards()
        await finish(world)
        check(world)

    in_world(scenario)


def test_a_verifier_without_a_result_is_asked_again_and_then_the_sample_is_dropped(in_world: InWorld) -> None:
    async def scenario(world: Any) -> None:
        await world.start_head()
        rewards = await world.start_rewards()

        def verdict(prompt: int, sibling: int) -> Verdict:
            if (prompt, sibling) == (2, 1):
                return Verdict(prompt, sibling, None, "no_result", "slow")
            if prompt == 3:
                return Verdict(prompt, sibling, None, "data", "bad")
            return Verdict(prompt=prompt, sibling=sibling, reward=1.0)

        rewards.verdict = verdict
        await world.start_worker("rollout-0")
        await world.start_trainer()
        await finish(world)
        assert rewards.asked.count((2, 1)) == 1 + world.config.limits.score_retries
        assert rewards.asked.count((3, 0)) == 1
        names = [(s[0], s[1]) for s in world.trained[0]]
        assert names == [(p, s) for p in range(3) for s in range(4) if (p, s) != (2, 1)]
        dropped = [s for s in world.journal.samples if s.state == "dropped"]
        assert {(s.prompt, s.reason.split(":")[0]) for s in dropped} == {(2, "no_result"), (3, "data")}
        assert world.job.result()["prompts_lost"] == 0

    in_world(scenario, steps=1)


def test_tries_are_remembered_no_longer_than_it_takes_to_settle_a_sample(in_world: InWorld) -> None:
    """All but one get their reward at the second asking: in step 0 beside a bad one, in step 1 with no other."""

    async def scenario(world: Any) -> None:
        await world.start()
        good = world.rewards.verdict

        def verdict(prompt: int, sibling: int) -> Verdict:
            if sibling or prompt % 4 == 3:
                return good(prompt, sibling)
            if world.rewards.asked.count((prompt, 0)) < 2:
                return Verdict(prompt, 0, None, "no_result", "slow")
            return Verdict(prompt, 0, None, "data", "bad") if prompt == 2 else good(prompt, 0)

        world.rewards.verdict = verdict
        await finish(world)
        assert world.rewards.asked.count((0, 0)) == world.rewards.asked.count((2, 0)) == 2
        assert world.scheduler._scoring._tries == {}

    in_world(scenario, steps=2)


def test_a_group_with_a_single_reward_is_dropped_whole(in_world: InWorld) -> None:
    async def scenario(world: Any) -> None:
        await world.start()
        bad = Verdict(prompt=0, sibling=0, reward=None, failure_kind="bug")
        good = world.rewards.verdict
        world.rewards.verdict = lambda p, s: good(p, s) if p or not s else Verdict(p, s, None, bad.failure_kind, "x")
        await finish(world)
        assert {s[0] for s in world.trained[0]} == {1, 2, 3}

    in_world(scenario, steps=1)


def test_a_critic_learns_from_a_single_reward_too(in_world: InWorld) -> None:
    async def scenario(world: Any) -> None:
        await world.start()
        good = world.rewards.verdict
        world.rewards.verdict = lambda p, s: good(p, s) if p or not s else Verdict(p, s, None, "bug", "x")
        await finish(world)
        assert {(s[0], s[1]) for s in world.trained[0]} >= {(0, 0), (1, 0), (1, 1)}
        assert (0, 1) not in {(s[0], s[1]) for s in world.trained[0]}

    in_world(scenario, steps=1, algorithm={"name": "ppo", "group_size": 4, "prompts_per_step": 4})


@pytest.mark.parametrize("lost", [False, True])
def test_a_head_that_dies_goes_on_with_the_same_samples(in_world: InWorld, lost: bool) -> None:
    async def scenario(world: Any) -> None:
        await world.start()
        await world.until(lambda: 2 in world.trained)
        await asyncio.sleep(0.04)
        for name in ("head", "rollout-0", "rollout-1", "rewards", "trainer"):
            world.kill(name)
        if lost:
            world.journal.crash()
        await world.start_head()
        await world.start_rewards()
        await world.start_worker("rollout-0")
        trainer = await world.start_trainer(step=2)
        await finish(world)
        assert trainer.replays == 1
        assert sorted(world.trained) == [0, 1, 2, 3]
        assert [(s.step, s.prompt, s.sibling) for s in world.journal.samples] == [
            (p // 4, p, s) for p in range(16) for s in range(4)
        ]
        assert world.job.result()["samples_trained_twice"] == 0

    in_world(scenario)


def test_a_run_without_a_fault_has_ignored_no_row_and_its_pruned_journal_says_so_too(in_world: InWorld) -> None:
    async def scenario(world: Any) -> None:
        await world.start()
        await finish(world)
        floor, events = world.journal.read()
        assert floor > 0
        restored = Ledger(floor)
        restored.restore(events)
        assert restored.counters == world.scheduler._ledger.counters
        assert restored.counters.unknown_rows == 0

    in_world(scenario, steps=8, checkpoint={"every": 1, "keep": 2}, sync={"mode": "async", "max_staleness": 1})


def test_a_step_whose_commit_was_not_answered_any_more_still_gets_its_row_and_only_one(in_world: InWorld) -> None:
    """The head died between the commit and the job's row; the trainer repeats its question to the next one."""

    async def scenario(world: Any) -> None:
        await world.start()
        await world.until(lambda: world.scheduler._ledger.trainer_step == 2)
        for name in ("trainer", "head", "rollout-0", "rollout-1", "rewards"):
            world.kill(name)
        world.events.clear()
        await world.start_head()
        commit = CommitStep(job="j", step=1, trainer=world.job_at, prompts=np.arange(4, 8), policy_version=2,
                              siblings=np.zeros(4, np.int32), metrics={"kl": 0.5})  # fmt: skip
        for _ in range(2):
            await world.systems["head"].ref(world.scheduler_at).ask(commit, Committed)
        await asyncio.sleep(0.01)
        rows = [event.fields for event in world.events if event.kind == "step"]
        assert [(row["step"], row["kl"], row["samples"]) for row in rows] == [(1, 0.5, 16)]

    in_world(scenario)


def test_a_trainer_that_dies_as_its_commit_is_being_stored_takes_no_news_with_it(in_world: InWorld) -> None:
    """Its question is withdrawn by its death. The commit has been applied, so everybody has to hear of it."""

    async def scenario(world: Any) -> None:
        await world.start()
        learned: list[int] = []
        scheduler = world.scheduler
        learn, durable = scheduler._fleet.committed, scheduler._journal.durable

        def committed(batch: Any, trainer: Any, *, replay: bool) -> dict[str, float]:
            learned.extend([] if replay else [batch.step])
            return learn(batch, trainer, replay=replay)

        async def slowly_durable() -> None:
            await asyncio.sleep(0.05)
            await durable()

        scheduler._fleet.committed, scheduler._journal.durable = committed, slowly_durable
        await world.until(lambda: scheduler._ledger.committed_steps == 2)
        assert 1 not in learned, "the disk has not answered"
        await world.systems["trainer"].stop()  # in order, as before the machine goes: that withdraws its questions
        await world.start_trainer(step=0)
        await finish(world)
        check(world)
        assert learned == [0, 1, 2, 3]
        assert [event.fields["step"] for event in world.events if event.kind == "step"] == [0, 1, 2, 3]

    in_world(scenario)


def test_a_paused_job_stays_paused_over_the_death_of_its_head(in_world: InWorld) -> None:
    async def scenario(world: Any) -> None:
        from actors.protocol.jobs import JobReport, PauseJob, ResumeJob

        await world.start()
        await world.until(lambda: 1 in world.trained)
        report = await world.systems["head"].ref(world.job_at).ask(PauseJob(job="j"), JobReport)
        assert report.state == "paused"
        for name in ("head", "rollout-0", "rollout-1", "rewards", "trainer"):
            world.kill(name)
        world.journal.crash()
        await world.start_head()
        await world.start_rewards()
        worker = await world.start_worker("rollout-0")
        await world.start_trainer(step=0)
        await asyncio.sleep(20)
        assert worker.assigned == 0 and world.job.state == "paused"
        report = await world.systems["head"].ref(world.job_at).ask(ResumeJob(job="j"), JobReport)
        assert report.state == "running"
        await finish(world)

    in_world(scenario)


def test_a_stop_request_ends_the_job_after_a_checkpoint_of_the_step_under_way(in_world: InWorld) -> None:
    async def scenario(world: Any) -> None:
        from actors.protocol.jobs import CancelJob, JobReport

        await world.start()
        await world.until(lambda: 1 in world.trained)
        await world.systems["head"].ref(world.job_at).ask(CancelJob(job="j"), JobReport)
        assert await world.job.wait_over(30.0) == "interrupted"
        assert world.job.result()["checkpoint"] == f"step_{len(world.trained):06d}"
        assert len(world.trained) < 50

    in_world(scenario, steps=50)


def test_a_checkpoint_on_request_is_not_an_older_one_that_is_still_being_stored(in_world: InWorld) -> None:
    """A trainer stores a checkpoint beside the next step, and may tell of it after another one was asked for."""

    async def scenario(world: Any) -> None:
        await world.start()
        head, ledger = world.systems["head"], world.scheduler._ledger
        await world.until(lambda: ledger.committed_steps == 2)
        asked = asyncio.create_task(head.ref(world.job_at).ask(CheckpointJob(job="j"), CheckpointReport))
        await asyncio.sleep(0.001)
        older = CheckpointTaken(job="j", step=2, path="older")
        await head.ref(world.scheduler_at).ask(older, Acknowledged)
        assert ledger.committed_steps == 2
        assert await asked == CheckpointReport(step=3, path="step_000003")
        assert [step for step, _ in ledger.checkpoints] == [2, 3]
        await finish(world)
        assert [step for step, _ in ledger.checkpoints] == [2, 3, 6]

    in_world(scenario, steps=6, checkpoint={"every": 0, "keep": 9})


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_every_whole_batch_of_data_that_ends_is_trained(in_world: InWorld, mode: str) -> None:
    async def scenario(world: Any) -> None:
        await world.start_head()
        await world.start_rewards(prompts=11)
        await world.start_worker("rollout-0")
        await world.start_trainer()
        await finish(world)
        assert sorted(world.trained) == [0, 1]

    in_world(scenario, sync={"mode": mode, "max_staleness": 1})


def test_a_commit_that_names_other_samples_is_refused_and_changes_nothing(in_world: InWorld) -> None:
    async def scenario(world: Any) -> None:
        import numpy as np

        await world.start()
        await world.until(lambda: world.scheduler._ledger.committed_steps == 1)
        world.kill("trainer")
        commit = CommitStep(
            job="j", step=1, trainer=world.job_at, prompts=np.array([0]), siblings=np.array([0], np.int32),
            policy_version=2, metrics={},
        )  # fmt: skip
        with pytest.raises(RemoteError, match="not of its batch"):
            await world.systems["head"].ref(world.scheduler_at).ask(commit, Committed)
        await world.start_trainer(step=0)
        await finish(world)
        check(world)

    in_world(scenario)


KL = {"group_size": 4, "prompts_per_step": 4, "kl_coefficient": 0.1}


@pytest.mark.parametrize("mode", ["dynamic", "async"])
def test_scored_samples_whose_siblings_are_not_are_told_ahead_each_once(in_world: InWorld, mode: str) -> None:
    async def scenario(world: Any) -> None:
        await world.start_head()
        await world.start_rewards()
        await world.start_worker("rollout-0", step_s=0.2)  # verdicts come after each token, not all at once
        world.trainer = await world.start_trainer()
        await finish(world)
        check(world)
        early = world.trainer.early
        assert len(early) > 4 and len(set(early)) == len(early)
        trained = {(step, *s[:3]) for step, samples in world.trained.items() for s in samples}
        assert set(early) <= trained, "with the tokens that are trained"

    in_world(scenario, algorithm=KL, sync={"mode": mode})


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": KL, "sync": {"mode": "sync"}},
        {"algorithm": KL, "sync": {"mode": "dynamic"}, "trainer": {"score_early": False}},
        {"sync": {"mode": "dynamic"}},
    ],
    ids=["a mode that repeats bit for bit", "not wanted", "no reference model"],
)
def test_nobody_is_told_ahead_where_nothing_can_be_made_of_it(in_world: InWorld, changes: dict[str, Any]) -> None:
    async def scenario(world: Any) -> None:
        await world.start()
        await finish(world)
        check(world)
        assert world.trainer.early == []

    in_world(scenario, **changes)


def test_a_trainer_that_opens_its_step_again_is_told_ahead_again(in_world: InWorld) -> None:
    async def scenario(world: Any) -> None:
        await world.start()
        await world.until(lambda: bool(world.trainer.early))
        seen, step = set(world.trainer.early), world.trainer.step
        assert world.trainer.granted is None
        opened = OpenStep(job="j", step=step, trainer=world.trainer.ctx.self_address)
        world.trainer.ctx.ref(world.scheduler_at).tell(opened)
        world.trainer.early.clear()
        await finish(world)
        check(world)
        again = {sample for sample in world.trainer.early if sample[0] == step}
        assert again & seen

    in_world(scenario, algorithm=KL, sync={"mode": "dynamic"})


def test_a_job_without_workers_says_what_it_waits_for(in_world: InWorld) -> None:
    async def scenario(world: Any) -> None:
        await world.start_head()
        await asyncio.sleep(6)
        assert "prompts of step 0: no prompt source" in (await world.progress()).waiting_for
        await world.start_rewards()
        await asyncio.sleep(20)
        assert "rollout worker" in (await world.progress()).waiting_for
        await world.start_worker("rollout-0")
        await asyncio.sleep(6)
        assert "version 0 of the weights" in (await world.progress()).waiting_for
        await world.start_trainer()
        await finish(world)

    in_world(scenario)


def test_a_paused_job_assigns_nothing_until_it_is_resumed(in_world: InWorld) -> None:
    async def scenario(world: Any) -> None:
        await world.start_head()
        await world.pause(paused=True)
        await world.start_rewards()
        worker = await world.start_worker("rollout-0")
        await world.start_trainer()
        await asyncio.sleep(5)
        assert worker.assigned == 0 and "paused" in (await world.progress()).waiting_for
        await world.pause(paused=False)
        await finish(world)

    in_world(scenario)
