"""A batch whose prompts come late is waited for aloud; one whose prompts can never come ends the job and says why."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from actors.core.actor import Actor, handles
from actors.core.errors import ReplyError
from actors.core.kernel.links import MessageTooLarge
from actors.core.system import ActorSystem
from actors.environments.prompts.prompt_source import PromptsNotRead, PromptsUnreadable
from actors.jobs.job import Job
from actors.protocol.batches import BatchIssued, DataEnded, IssueBatch, Progress, QueryProgress
from actors.protocol.evaluations import NeedEvaluation
from actors.protocol.failures import Acknowledged
from actors.protocol.job_news import CheckpointStored, JobEvent, NeedBatch
from actors.protocol.metrics import Event
from actors.protocol.rewards import PromptsRead, ReadPrompts, SourcedPrompt
from actors.protocol.services import LookupService, RegisterService, ServiceFound
from configs.evaluation_schema import EvaluationConfig
from configs.limits import Limits
from configs.schema import JobConfig, SchedulingConfig
from configs.task_schema import DataConfig
from supervisors.jobs.job_news import JobListener, JobNews
from tests.simulated import run_simulated
from tests.smallest_job import smallest_job
from transport.address import PeerId
from transport.memory_transport import MemoryNetwork, MemoryTransport

CONFIG = smallest_job(steps=6, algorithm={"group_size": 2, "prompts_per_step": 4})

Answer = Callable[[int, ReadPrompts], PromptsRead | Awaitable[PromptsRead]]


def prompts(question: ReadPrompts, count: int | None = None, **told: Any) -> PromptsRead:
    """The first ``count`` of what is asked for; all without it."""
    numbers = range(question.start, question.start + (question.count if count is None else count))
    read = [SourcedPrompt(p, np.array([p], np.int32), "", b"c") for p in numbers]
    return PromptsRead(**({"prompts": read, "exhausted": False} | told))


class Scene(Actor):
    """Plays scheduler, prompt source and metrics; ``answer(n, question)`` answers the n-th reading."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.read: list[tuple[int, int]] = []
        self.issued: list[IssueBatch] = []
        self.ended: list[DataEnded] = []
        self.events: list[Event] = []
        self.said: list[dict[str, Any]] = []
        self.too_large = False
        self.starts_s = 0.0
        """Time from which on there is a prompt source."""

    @handles(RegisterService)
    async def register(self, _: RegisterService) -> Acknowledged:
        return Acknowledged()

    @handles(QueryProgress)
    async def progress(self, _: QueryProgress) -> Progress:
        return Progress("j", 0, 0, {}, {}, 0, 0, 0, waiting_for="")

    @handles(LookupService)
    async def lookup(self, _: LookupService) -> ServiceFound:
        here = self.ctx.now() >= self.starts_s
        return ServiceFound(address=self.ctx.self_address if here else None)

    @handles(ReadPrompts)
    async def on_read(self, question: ReadPrompts) -> PromptsRead:
        self.read.append((question.start, question.count))
        answer = self._answer(len(self.read), question)
        return answer if isinstance(answer, PromptsRead) else await answer

    @handles(IssueBatch)
    async def issue(self, batch: IssueBatch) -> BatchIssued:
        if self.too_large:
            raise TooLarge("it has 9 bytes, expected at most 8 (limits.message_max_bytes)")
        self.issued.append(batch)
        return BatchIssued(job="j", step=batch.step)

    @handles(DataEnded)
    async def on_end(self, news: DataEnded) -> Acknowledged:
        self.ended.append(news)
        return Acknowledged()

    @handles(Event)
    async def on_event(self, event: Event) -> None:
        self.events.append(event)

    def named(self, name: str) -> list[Event]:
        return [event for event in self.events if event.name == name]


class TooLarge(ReplyError):
    permanent = MessageTooLarge.permanent


def play(
    answer: Answer,
    act: Callable[[Scene, Any, Job], Coroutine[Any, Any, None]],
    config: JobConfig = CONFIG,
    **limits: float,
) -> Scene:
    """A job with ``answer`` as its prompts, in virtual time."""

    async def main() -> Scene:
        system = ActorSystem(MemoryTransport(MemoryNetwork(), PeerId("head", 1)), limits=Limits(**limits))
        await system.start()
        scene = Scene(answer)
        await system.spawn("scene", scene)
        news = JobNews(system, "j")  # type: ignore[arg-type]
        news.subscribe(scene.said.append)  # type: ignore[arg-type]

        def hear(event: JobEvent) -> None:
            news.tell(event)

        await system.spawn("listener", JobListener(hear))
        at = system.address("scene")
        job = Job(config, at, at, listener=system.address("listener"))
        ref = await system.spawn("job.j", job)
        await act(scene, ref, job)
        await asyncio.sleep(0.1)
        await system.stop()
        return scene

    return run_simulated(main())


def waited(scene: Scene) -> list[str]:
    return [said["waiting_for"] for said in scene.said if "waiting_for" in said]


def messages(scene: Scene) -> list[str]:
    return [said["message"] for said in scene.said if "message" in said]


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(600):
        while not true():
            await asyncio.sleep(0.05)


def refuse(error: Exception) -> Awaitable[PromptsRead]:
    async def raising() -> PromptsRead:
        raise error

    return raising()


@pytest.mark.parametrize(("starts_s", "said"), [(20.0, []), (40.0, ["a prompt source: none has registered", ""])])
def test_a_prompt_source_that_is_still_being_started_is_missed_aloud_only_after_its_grace(
    starts_s: float, said: list[str]
) -> None:
    async def act(scene: Scene, ref: Any, job: Job) -> None:
        scene.starts_s = starts_s
        ref.tell(NeedBatch(job="j", step=0))
        await until(lambda: scene.issued)

    assert waited(play(lambda _, question: prompts(question), act, first_service_s=30.0)) == said


def test_what_may_pass_is_tried_again_and_after_a_few_seconds_the_terminal_says_what_is_waited_for() -> None:
    """The reader's machine is away for twenty seconds; a failure that is over at once is not worth a word."""

    def answer(n: int, question: ReadPrompts) -> Any:
        slow = asyncio.get_running_loop().time() < 20 and question.start == 4
        return refuse(PromptsNotRead("the disk is away")) if slow or n == 1 else prompts(question)

    async def act(scene: Scene, ref: Any, job: Job) -> None:
        ref.tell(NeedBatch(job="j", step=0))
        await until(lambda: scene.issued)
        assert not waited(scene)
        ref.tell(NeedBatch(job="j", step=1))
        await until(lambda: len(scene.issued) == 2)

    scene = play(answer, act)
    assert waited(scene) == ["the prompts of step 1: the disk is away", ""]
    assert not scene.ended


@pytest.mark.parametrize("step", [0, 3])
def test_prompts_that_can_never_be_read_end_the_job_after_the_steps_that_can_be_trained(step: int) -> None:
    """Asked once; told once; failed at once or, with the reason, when the last whole step has its checkpoint."""

    def answer(_: int, question: ReadPrompts) -> Any:
        return refuse(PromptsUnreadable("rows.jsonl, row 30: column 'prompt' is null"))

    async def act(scene: Scene, ref: Any, job: Job) -> None:
        ref.tell(NeedBatch(job="j", step=step))
        if step:
            await until(lambda: scene.ended)
            assert not job.state.over
            ref.tell(CheckpointStored("j", step, "p", final=True, failed=scene.ended[0].failed))
        await until(lambda: job.state.over)
        assert job.state == "failed" and "row 30" in str(job.result()["error"])
        await asyncio.sleep(60)

    scene = play(answer, act)
    assert len(scene.read) == 1
    why = f"the prompts of step {step} cannot be read: rows.jsonl, row 30: column 'prompt' is null"
    assert messages(scene) == ([why] if step else []), "at step 0 the job fails at once, and that says why"
    assert [event.fields["step"] for event in scene.named("prompts_unreadable")] == [step]


def test_a_batch_that_no_message_carries_ends_the_job_with_the_limit() -> None:
    async def act(scene: Scene, ref: Any, job: Job) -> None:
        scene.too_large = True
        ref.tell(NeedBatch(job="j", step=0))
        await until(lambda: job.state.over)
        assert "limits.message_max_bytes" in str(job.result()["error"])

    assert len(play(lambda _, question: prompts(question), act).read) == 1


def test_a_long_search_is_gone_on_with_where_it_is_and_seen_to_get_on() -> None:
    """Each answer has what has been found in two seconds: none, for a while, then some, then the rest."""

    def answer(n: int, question: ReadPrompts) -> Any:
        async def slowly() -> PromptsRead:
            await asyncio.sleep(2.0)
            count = 0 if n < 6 else min(1, question.count)
            return prompts(question, count, rows=9000, checked=9000, seen=1000 * n)

        return slowly()

    async def act(scene: Scene, ref: Any, job: Job) -> None:
        ref.tell(NeedBatch(job="j", step=1))
        await until(lambda: scene.issued)

    scene = play(answer, act)
    assert [p.prompt for p in scene.issued[0].prompts] == [4, 5, 6, 7]
    assert scene.read == [(4, 4)] * 6 + [(5, 3), (6, 2), (7, 1)]
    assert waited(scene) == [
        "prompts that fit: 0 of 4 found, 3,000 of 9,000 rows looked at",
        "prompts that fit: 1 of 4 found, 6,000 of 9,000 rows looked at",
        "",
    ]


def test_rows_that_are_passed_over_are_told_with_the_first_and_again_when_they_are_twice_as_many() -> None:
    counts = iter([0, 1, 1, 2, 3, 4])

    def answer(_: int, question: ReadPrompts) -> Any:
        n = next(counts)
        passed = {"refused": n} if n else {}
        return prompts(question, rows=100, checked=100, seen=10, passed=passed, first={"refused": "row 3: no"})

    async def act(scene: Scene, ref: Any, job: Job) -> None:
        for step in range(6):
            ref.tell(NeedBatch(job="j", step=step))
            await until(lambda step=step: len(scene.issued) > step)

    scene = play(answer, act)
    assert [event.fields["passed"] for event in scene.named("prompts_passed_over")] == [1, 2, 4]
    assert messages(scene)[0] == "prompts passed over: 1 of 10 rows looked at so far (1 refused, first row 3: no)"


def test_rows_of_the_evaluation_that_are_passed_over_are_told_too() -> None:
    def answer(_: int, question: ReadPrompts) -> Any:
        told = {"passed": {"too long": 3}, "first": {"too long": "row 3"}} if question.evaluation else {}
        return prompts(question, 2, exhausted=True, rows=5, checked=5, seen=5, **told)

    async def act(scene: Scene, ref: Any, job: Job) -> None:
        for version in (0, 1):
            ref.tell(NeedEvaluation(job="j", version=version))
            await until(lambda version=version: len(scene.issued) > version)

    held_out = EvaluationConfig(data=DataConfig(path="x.jsonl"))
    scene = play(answer, act, CONFIG.model_copy(update={"eval": held_out}))
    told = "prompts of eval.data passed over: 3 of 5 rows looked at so far (3 too long, first row 3)"
    assert messages(scene) == [told], "once"


def test_data_that_have_been_replaced_since_the_run_began_are_told_of_once() -> None:
    def answer(_: int, question: ReadPrompts) -> Any:
        return prompts(question, rows=100, replaced=True)

    async def act(scene: Scene, ref: Any, job: Job) -> None:
        for step in range(2):
            ref.tell(NeedBatch(job="j", step=step))
        await until(lambda: len(scene.issued) == 2)

    scene = play(answer, act)
    assert len(scene.named("data_replaced")) == 1 and "other data" in messages(scene)[0]


@pytest.mark.parametrize(("rows", "told"), [(24, 1), (23, 0)])
def test_a_planned_job_whose_prompts_come_once_is_told_once_that_there_is_no_history(rows: int, told: int) -> None:
    """Six steps of four prompts."""
    planned = {"policy": "planned", "workers_max": 2}

    async def act(scene: Scene, ref: Any, job: Job) -> None:
        for step in range(2):
            ref.tell(NeedBatch(job="j", step=step))
        await until(lambda: len(scene.issued) == 2)

    def answer(_: int, question: ReadPrompts) -> Any:
        return prompts(question, rows=rows)

    scene = play(answer, act, CONFIG.model_copy(update={"scheduling": SchedulingConfig.model_validate(planned)}))
    assert len(scene.named("lengths_without_history")) == told
    assert ["no prompt of the 24 comes twice" in said for said in messages(scene)] == [True] * told
    assert play(answer, act).named("lengths_without_history") == [], "other jobs have no plans"
