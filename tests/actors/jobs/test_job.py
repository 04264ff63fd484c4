"""The job actor against a scripted scheduler: prompts by ordinal, one row a step, states that only go forward."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest

from actors.core.actor import Actor, handles
from actors.core.errors import RemoteError
from actors.core.system import ActorSystem
from actors.jobs.job import Job
from actors.jobs.stop_tokens import BadStopToken, stop_token_ids
from actors.jobs.summary import Summary, read_rows, row_of
from actors.metrics.recorder import Metrics
from actors.protocol import jobs as jm
from actors.protocol.batches import BatchIssued, IssueBatch, Progress, QueryProgress, RequestCheckpoint, SetPaused
from actors.protocol.failures import Acknowledged
from actors.protocol.job_news import (
    CheckpointStored,
    GenerationEnded,
    JobEvent,
    NeedBatch,
    StepCommitted,
    StepPlanned,
    WorkerNews,
    WorkerReleased,
    WorkerWoken,
)
from actors.protocol.metrics import Flush, Flushed
from actors.protocol.rewards import PromptsRead, ReadPrompts, SourcedPrompt
from actors.protocol.services import LookupService, RegisterService, ServiceFound
from configs.limits import Limits
from configs.schema import MetricsConfig
from supervisors.jobs.cost_meter import CostMeter
from supervisors.jobs.job_news import JobListener
from tests.smallest_job import smallest_job
from transport.address import ActorAddress, PeerId
from transport.memory_transport import MemoryNetwork, MemoryTransport

CONFIG = smallest_job(
    seed=3,
    steps=6,
    algorithm={"group_size": 2, "prompts_per_step": 3},
    rollout={"max_tokens": 8, "temperature": 0.5},
)


class ScriptedScheduler(Actor):
    """Notes what it is asked; serves prompts as well, once ``ready``."""

    def __init__(self) -> None:
        self.heard: list[object] = []
        self.job: ActorAddress | None = None
        self.ready = asyncio.Event()
        self.prompts = 1_000_000

    @handles(RegisterService)
    async def register(self, offer: RegisterService) -> Acknowledged:
        self.job = offer.address
        return Acknowledged()

    @handles(LookupService)
    async def lookup(self, question: LookupService) -> ServiceFound:
        return ServiceFound(address=self.ctx.self_address if self.ready.is_set() else None)

    @handles(ReadPrompts)
    async def read(self, question: ReadPrompts) -> PromptsRead:
        numbers = range(question.start, min(question.start + question.count, self.prompts))
        return PromptsRead(
            prompts=[SourcedPrompt(p, np.array([p], np.int32), "", b"c") for p in numbers],
            exhausted=len(numbers) < question.count,
        )

    @handles(IssueBatch)
    async def issue(self, batch: IssueBatch) -> BatchIssued:
        self.heard.append(batch)
        return BatchIssued(job="j", step=batch.step)

    @handles(SetPaused, RequestCheckpoint)
    async def order(self, order: SetPaused | RequestCheckpoint) -> Acknowledged:
        self.heard.append(order)
        return Acknowledged()

    @handles(QueryProgress)
    async def progress(self, _: QueryProgress) -> Progress:
        return Progress(
            job="j", committed_steps=0, policy_version=0, states={}, workers={}, prompts_lost=0,
            samples_trained_twice=0, samples_migrated=0, waiting_for="the moon",
        )  # fmt: skip


class Stage:
    """One system with a scheduler, a metrics actor and a job."""

    def __init__(self, system: ActorSystem, run_dir: Path) -> None:
        self.system, self.run_dir, self.scheduler = system, run_dir, ScriptedScheduler()

    async def start(self, take_cost: Callable[[], float] | None = None) -> None:
        await self.system.spawn("scheduler.j", self.scheduler)
        await self.system.spawn("metrics.j", Metrics("j", self.run_dir, MetricsConfig(tensorboard=False)))
        await self.start_job(take_cost)

    async def start_job(self, take_cost: Callable[[], float] | None) -> None:
        scheduler, metrics = self.system.address("scheduler.j"), self.system.address("metrics.j")
        self.job = Job(
            CONFIG, scheduler, metrics, run_dir=self.run_dir, stop_token_ids=(7,), take_cost=take_cost,
            listener=self.system.address("listener"),
        )  # fmt: skip
        self.ref = await self.system.spawn("job.j", self.job)

    def commit(self, step: int, reward: float = 0.5, replay: bool = False) -> None:
        metrics = {"step": step, "reward_mean": reward, "samples": 6, "tokens_generated": 40, "prompts_lost": 0}
        self.ref.tell(
            StepCommitted(job="j", step=step, replay=replay, metrics={k: float(v) for k, v in metrics.items()})
        )

    async def order(self, order: object) -> jm.JobReport:
        return await self.ref.ask(order, jm.JobReport)  # type: ignore[arg-type]

    async def flush(self) -> None:
        await self.system.ref(self.system.address("metrics.j")).ask(Flush(job="j"), Flushed)

    async def until_heard(self, count: int) -> None:
        async with asyncio.timeout(10):
            while len(self.scheduler.heard) < count:
                await asyncio.sleep(0)


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    system = ActorSystem(MemoryTransport(MemoryNetwork(), PeerId("head", 1)))
    await system.start()
    stage = Stage(system, tmp_path)
    yield stage
    await system.stop()


async def test_a_batch_is_read_by_ordinal_and_issued_once_prompts_are_to_be_had(stage: Stage) -> None:
    await stage.start()
    stage.ref.tell(NeedBatch(job="j", step=2))
    stage.ref.tell(NeedBatch(job="j", step=2))
    assert (await stage.order(jm.JobStatus(job="j"))).state == "running"
    stage.scheduler.ready.set()
    await stage.until_heard(1)
    batch = stage.scheduler.heard[0]
    assert isinstance(batch, IssueBatch) and [p.prompt for p in batch.prompts] == [6, 7, 8]
    assert batch.group_size == 2 and batch.sampling.stop_token_ids == (7,) and batch.sampling.seed == 3
    assert batch.sampling.temperature == 0.5 and batch.sampling.max_tokens == 8


class SlowPrompts(ScriptedScheduler):
    """Reads for longer than a question may take that computes nothing long."""

    @handles(ReadPrompts)
    async def read(self, question: ReadPrompts) -> PromptsRead:
        await asyncio.sleep(2 * HASTY.ask_timeout_s)
        return await super().read(question)


HASTY = Limits(ask_timeout_s=0.3)


async def test_reading_prompts_may_take_as_long_as_the_limits_say(tmp_path: Path) -> None:
    """A large data set is read anew after a restart: given up at every try, the batch would never be issued."""
    system = ActorSystem(MemoryTransport(MemoryNetwork(), PeerId("head", 1)), limits=HASTY)
    await system.start()
    stage = Stage(system, tmp_path)
    stage.scheduler = SlowPrompts()
    stage.scheduler.ready.set()
    await stage.start()
    stage.ref.tell(NeedBatch(job="j", step=0))
    await stage.until_heard(1)
    await system.stop()
    batch = stage.scheduler.heard[0]
    assert isinstance(batch, IssueBatch) and [p.prompt for p in batch.prompts] == [0, 1, 2]


async def test_what_the_scheduler_says_of_workers_reaches_whoever_runs_the_job_in_order(stage: Stage) -> None:
    heard: list[WorkerNews] = []
    await stage.system.spawn("listener", JobListener(lambda event: None, heard.append))
    await stage.start()
    told: list[WorkerNews] = [
        StepPlanned(job="j", step=1, workers=["rollout-0"], more=2),
        WorkerReleased(job="j", worker="rollout-0", step=1),
        GenerationEnded(job="j", step=1),
        WorkerWoken(job="j", worker="rollout-0", step=2),
    ]
    for news in told:
        stage.ref.tell(news)
    async with asyncio.timeout(10):
        while len(heard) < len(told):
            await asyncio.sleep(0)
    assert heard == told


async def test_each_step_is_one_row_and_a_replay_none(stage: Stage) -> None:
    await stage.start()
    for step, replay in ((0, False), (1, False), (0, True), (1, True), (2, False)):
        stage.commit(step, replay=replay)
    stage.ref.tell(CheckpointStored(job="j", step=6, path="p", final=True))
    assert await stage.job.wait_over(10) == "finished"
    rows = [json.loads(line) for line in (stage.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows] == [0, 1, 2] and isinstance(rows[0]["samples"], int)
    assert stage.job.result() | {"seconds": 0} == {
        "job": "j", "state": "finished", "steps": 3, "reward_first": 0.5, "reward_last": 0.5, "samples": 18,
        "samples_dropped": 0, "tokens_discarded": 0,
        "tokens": 120, "seconds": 0, "restarts": 0, "prompts_lost": 0, "samples_trained_twice": 0,
        "policy_version": 0, "checkpoint": "p",
    }  # fmt: skip


async def test_a_resumed_run_counts_the_rows_of_its_earlier_part(stage: Stage) -> None:
    (stage.run_dir / "metrics.jsonl").write_text(
        '{"step": 0, "reward_mean": 0.1, "samples": 6, "tokens_generated": 40, "seconds": 2.5}\n'
    )
    await stage.start()
    stage.commit(1, 0.3)
    await stage.order(jm.JobStatus(job="j"))
    result = stage.job.result()
    assert result["steps"] == 2 and result["samples"] == 12 and result["reward_first"] == pytest.approx(0.2)
    assert result["seconds"] >= 2.5, "the time of all steps, whichever life of the job has taken them"


async def test_a_job_that_restarts_in_the_same_head_bills_what_was_spent_once_and_its_own_absence_too(
    stage: Stage,
) -> None:
    now_s = 0.0
    meter = CostMeter({"reserved": 3600.0}, lambda: now_s)
    meter.see(["reserved"])
    await stage.start(meter.take)
    for step in range(3):
        now_s += 1.0
        stage.commit(step)
        await stage.order(jm.JobStatus(job="j"))
    await stage.flush()
    await stage.system.stop_actor("job.j")
    now_s += 4.0
    await stage.start_job(meter.take)
    now_s += 1.0
    stage.commit(3)
    await stage.order(jm.JobStatus(job="j"))
    await stage.flush()
    assert stage.job.result()["cost"] == pytest.approx(meter.spent()) == pytest.approx(8.0)
    assert [row["cost"] for row in read_rows(stage.run_dir / "metrics.jsonl")] == pytest.approx([1.0, 1.0, 1.0, 5.0])


async def test_pause_resume_and_cancel_reach_the_scheduler(stage: Stage) -> None:
    await stage.start()
    stage.commit(0)
    assert (await stage.order(jm.PauseJob(job="j"))).state == "paused"
    assert (await stage.order(jm.ResumeJob(job="j"))).state == "running"
    assert (await stage.order(jm.PauseJob(job="j"))).waiting_for == "the moon"
    assert (await stage.order(jm.CancelJob(job="j"))).state == "stopping"
    orders = stage.scheduler.heard
    assert [o.paused for o in orders if isinstance(o, SetPaused)] == [True, False, True], "to stop ends a pause"
    assert [o.stop for o in orders if isinstance(o, RequestCheckpoint)] == [True]
    stage.ref.tell(CheckpointStored(job="j", step=1, path="p", final=True))
    assert await stage.job.wait_over(10) == "interrupted"
    with pytest.raises(RemoteError, match="interrupted cannot resume"):
        await stage.order(jm.ResumeJob(job="j"))


async def test_a_checkpoint_on_request_answers_once_it_is_durable(stage: Stage) -> None:
    await stage.start()
    stage.commit(0)
    asked = asyncio.ensure_future(stage.ref.ask(jm.CheckpointJob(job="j"), jm.CheckpointReport))
    await stage.until_heard(1)
    assert not asked.done()
    stage.ref.tell(CheckpointStored(job="j", step=2, path="somewhere", final=False))
    assert await asked == jm.CheckpointReport(step=2, path="somewhere")


async def test_an_older_checkpoint_that_is_still_being_stored_is_no_answer_unless_it_is_the_last(stage: Stage) -> None:
    await stage.start()
    stage.commit(0)
    first = asyncio.ensure_future(stage.ref.ask(jm.CheckpointJob(job="j"), jm.CheckpointReport))
    await stage.until_heard(1)
    stage.ref.tell(CheckpointStored(job="j", step=1, path="older", final=False))
    stage.commit(1)
    await stage.order(jm.JobStatus(job="j"))
    assert not first.done()
    second = asyncio.ensure_future(stage.ref.ask(jm.CheckpointJob(job="j"), jm.CheckpointReport))
    await stage.until_heard(2)
    stage.ref.tell(CheckpointStored(job="j", step=2, path="newer", final=False))
    assert await first == jm.CheckpointReport(step=2, path="newer")
    await stage.order(jm.JobStatus(job="j"))
    assert not second.done()
    stage.ref.tell(CheckpointStored(job="j", step=2, path="last", final=True))
    assert await second == jm.CheckpointReport(step=2, path="last")


async def test_a_checkpoint_that_will_not_come_is_answered_when_the_job_ends(stage: Stage) -> None:
    await stage.start()
    stage.commit(0)
    asked = asyncio.ensure_future(stage.ref.ask(jm.CheckpointJob(job="j"), jm.CheckpointReport))
    await stage.until_heard(1)
    stage.scheduler.prompts = 2
    stage.scheduler.ready.set()
    stage.ref.tell(NeedBatch(job="j", step=0))
    with pytest.raises(RemoteError, match="no further checkpoint"):
        await asked
    report = await stage.order(jm.JobStatus(job="j"))
    assert report.state == "failed"
    assert report.reason.startswith("data: fewer than algorithm.prompts_per_step=3 prompts")


async def test_its_listener_hears_of_the_beginning_then_states_and_steps_then_the_end_with_the_result(
    stage: Stage,
) -> None:
    seen: list[JobEvent] = []
    await stage.system.spawn("listener", JobListener(seen.append))
    await stage.start()
    stage.commit(0)
    stage.ref.tell(CheckpointStored(job="j", step=6, path="p", final=True))
    async with asyncio.timeout(10):
        while not seen or seen[-1].kind != "ended":
            await asyncio.sleep(0)
    assert [(event.kind, event.fields.get("step", event.fields.get("state"))) for event in seen] == [
        ("begun", None), ("state", "running"), ("step", 0), ("checkpoint", 6), ("state", "finished"), ("ended", None),
    ]  # fmt: skip
    assert [(event.result["state"], event.result["steps"]) for event in seen[::5]] == [
        ("submitted", 0),
        ("finished", 1),
    ]
    assert seen[-1].result == stage.job.result()


def test_the_summary_takes_the_means_of_the_first_and_last_five_steps() -> None:
    summary = Summary()
    for step in range(12):
        summary.add({"step": step, "reward_mean": float(step)})
    assert (summary.reward_first, summary.reward_last, summary.steps) == (2.0, 9.0, 12)


def test_counts_are_whole_numbers_and_the_last_row_of_a_step_wins(tmp_path: Path) -> None:
    assert row_of({"step": 3.0, "kl": 1.0}) == {"step": 3, "kl": 1.0}
    assert isinstance(row_of({"step": 3.0})["step"], int)
    (tmp_path / "m").write_text('{"step": 1, "a": 1}\n{"step": 0}\n{"step": 1, "a": 2}\n{"st')
    assert read_rows(tmp_path / "m") == [{"step": 0}, {"step": 1, "a": 2}]


def test_a_damaged_row_costs_itself_alone(tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(b'{"step": 0}\n{"step": \xff1}\n\0\n[1]\n{"step": 2}\n')
    assert read_rows(tmp_path / "m") == [{"step": 0}, {"step": 2}]


def test_stop_tokens_are_the_model_s_own_and_those_named_by_text(tmp_path: Path) -> None:
    with pytest.raises(BadStopToken, match="eos_token_id"):
        stop_token_ids(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 2]}')
    assert stop_token_ids(tmp_path) == (2, 5)
    with pytest.raises(BadStopToken, match=r"tokenizer\.json"):
        stop_token_ids(tmp_path, ["\n"])
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"stop": 11, "two": 12, "words": 13, "?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert stop_token_ids(tmp_path, ["stop"]) == (2, 5, 11)
    with pytest.raises(BadStopToken, match="'two words' is 2 tokens"):
        stop_token_ids(tmp_path, ["two words"])
