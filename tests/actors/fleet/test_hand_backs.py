"""Workers that cannot go on with a sample, and what is said in another life's or another reign's name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from actors.core.actor import Actor, handles
from actors.protocol.failures import Failure, FailureKind
from actors.protocol.rewards import Verdict
from actors.protocol.tokens import TokenReport
from actors.protocol.work import Assign
from actors.protocol.workers import AssignmentsFailed
from tests.actors.scheduler_world import FakeWorker
from transport.address import ActorAddress

InWorld = Callable[..., None]
BAD_PROMPT = 1


class Failing(FakeWorker):
    """Hands ``BAD_PROMPT`` back each time, and says whose fault it is."""

    kind = FailureKind.DATA

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.tries: dict[int, int] = {}

    @handles(Assign)
    async def assign(self, order: Assign) -> None:
        await super().assign(order)
        bad = {number: sibling for number, (prompt, sibling, *_) in self.held.items() if prompt == BAD_PROMPT}
        for number, sibling in bad.items():
            del self.held[number]
            self.tries[sibling] = self.tries.get(sibling, 0) + 1
        if bad:
            failure = Failure(kind=self.kind, message="it does not fit", where="here")
            numbers, name = np.array(list(bad), np.int64), self.ctx.self_address.name
            self.ctx.ref(self.scheduler).tell(
                AssignmentsFailed(job="j", worker=name, assignments=numbers, failure=failure)
            )


class Says(Actor):
    """One report, as it starts."""

    def __init__(self, scheduler: ActorAddress, said: TokenReport) -> None:
        self.scheduler, self.said = scheduler, said

    async def on_start(self) -> None:
        self.ctx.ref(self.scheduler).tell(self.said)


@pytest.mark.parametrize(
    ("kind", "tries"),
    # data: data_retries + 1; infrastructure: each hand-out counts, one more than infrastructure_retries
    [(FailureKind.DATA, 3), (FailureKind.BUG, 3), (FailureKind.INFRASTRUCTURE, 5)],
)
def test_a_sample_that_fails_everywhere_is_dropped_with_its_reason_after_its_retries(
    in_world: InWorld, kind: FailureKind, tries: int
) -> None:
    async def scenario(world: Any) -> None:
        await world.start_head()
        await world.start_rewards()
        worker = Failing(world.scheduler_at)
        worker.kind = kind
        await (await world.system("rollout-0")).spawn("rollout-0", worker)
        await world.start_trainer()
        assert await world.job.wait_over(60.0) == "finished"
        assert worker.tries == dict.fromkeys(range(4), tries)
        dropped = [sample for sample in world.journal.samples if sample.state == "dropped"]
        assert [(s.prompt, s.sibling) for s in dropped] == [(BAD_PROMPT, sibling) for sibling in range(4)]
        assert all(s.reason for s in dropped)
        if kind is not FailureKind.INFRASTRUCTURE:
            assert {s.reason for s in dropped} == {f"{kind}: it does not fit"}
        assert {s[0] for s in world.trained[0]} == {0, 2, 3}
        assert world.job.result()["prompts_lost"] == 0

    in_world(scenario, steps=1, limits={"data_retries": 2, "infrastructure_retries": 4})


def test_tokens_of_an_older_reign_never_enter(in_world: InWorld) -> None:
    async def scenario(world: Any) -> None:
        await world.start()
        for worker in world.workers:
            worker.term -= 1  # as if it had been assigned by the life before
        await asyncio.sleep(1.0)
        assert sum(worker.sequence for worker in world.workers) > 2, "they have said something"
        assert world.scheduler.counters.tokens == 0

    in_world(scenario)


def test_tokens_in_the_name_of_another_worker_never_enter(in_world: InWorld) -> None:
    """The life that was replaced would say them under a name that is another's by now."""

    async def scenario(world: Any) -> None:
        await world.start_head()
        await world.start_rewards()
        await world.start_trainer()
        worker = await world.start_worker("rollout-0", step_s=100.0)
        await world.until(lambda: bool(worker.held))
        said = worker.report([(number, at, 0, 10) for number, (_, _, at, _) in worker.held.items()])
        await (await world.system("elsewhere")).spawn("rollout-0", Says(world.scheduler_at, said))
        await asyncio.sleep(1.0)
        assert world.scheduler.counters.tokens == 0
        worker.ctx.ref(world.scheduler_at).tell(said)
        await asyncio.sleep(1.0)
        assert world.scheduler.counters.tokens == len(worker.held), "of whom it was assigned to the very same is taken"

    in_world(scenario)


async def silent_worker(world: Any) -> FakeWorker:
    """One that has all of the first step and says nothing by itself."""
    await world.start_head()
    await world.start_rewards()
    await world.start_trainer()
    worker = await world.start_worker("rollout-0", step_s=100.0)
    await world.until(lambda: len(worker.held) == 16)
    return worker


def test_a_sample_of_which_a_token_is_missing_is_taken_back_there_and_handed_out_anew(in_world: InWorld) -> None:
    """Else the worker would go on with what nobody can take, and the sample would never end."""

    async def scenario(world: Any) -> None:
        worker = await silent_worker(world)
        broken, *others = worker.held
        prompt, sibling, *_ = worker.held[broken]
        worker.ctx.ref(world.scheduler_at).tell(worker.report([(broken, 1, 0, 10)]))
        await asyncio.sleep(1.0)
        assert world.scheduler.counters.gap_rows == 1 and world.scheduler.counters.tokens == 0
        assert worker.revoked == 1 and broken not in worker.held
        again = [number for number in worker.held if number not in others]
        assert [worker.held[number][:3] for number in again] == [(prompt, sibling, 0)]
        assert sorted(world.scheduler._ledger.in_flight("rollout-0").tolist()) == sorted(worker.held)

    in_world(scenario)


def test_of_a_worker_whose_report_cannot_be_read_all_samples_are_taken_back(in_world: InWorld) -> None:
    async def scenario(world: Any) -> None:
        worker = await silent_worker(world)
        former = set(worker.held)
        unreadable = msgspec.structs.replace(worker.report([(min(former), 0, 0, 10)]), row_bytes=b"half a row")
        worker.ctx.ref(world.scheduler_at).tell(unreadable)
        await asyncio.sleep(1.0)
        assert world.scheduler.counters.tokens == 0
        assert worker.revoked == 16 and not former & worker.held.keys()
        assert len(worker.held) == 16, "they have been handed out anew"

    in_world(scenario)


def test_a_scorer_whose_machine_fails_is_asked_again_and_that_is_never_a_reward(in_world: InWorld) -> None:
    async def scenario(world: Any) -> None:
        await world.start_head()
        rewards, asked = await world.start_rewards(), list[tuple[int, int]]()

        def verdict(prompt: int, sibling: int) -> Verdict:
            asked.append((prompt, sibling))
            if prompt == BAD_PROMPT and asked.count((prompt, sibling)) <= 5:
                return Verdict(prompt, sibling, None, FailureKind.INFRASTRUCTURE, "no memory there")
            return Verdict(prompt=prompt, sibling=sibling, reward=0.75)

        rewards.verdict = verdict
        await world.start_worker("rollout-0")
        await world.start_trainer()
        assert await world.job.wait_over(60.0) == "finished"
        assert asked.count((BAD_PROMPT, 0)) == 6, "more often than score_retries: it is not the verifier's fault"
        assert [s[3] for s in world.trained[0]] == [0.75] * 16

    in_world(scenario, steps=1)
