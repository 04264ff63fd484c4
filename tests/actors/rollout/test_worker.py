"""The rollout worker against a scheduler and a weight server played by fakes, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Self
from unittest.mock import patch

import numpy as np
import pytest
import structlog

from actors.core.actor import Actor, concurrent, handles
from actors.core.system import ActorSystem
from actors.core.tenure import LeaseRenewed, RenewLease
from actors.protocol.failures import FailureKind, NotAccepted
from actors.protocol.metrics import Event, Spans, TraceSpan
from actors.protocol.services import LookupService, ServiceFound
from actors.protocol.tokens import FinishReason, TokenReport
from actors.protocol.weights import Chunk, GetChunks, GetManifest, Manifest, ManifestReply
from actors.protocol.work import (
    Assign,
    Drain,
    EngineStats,
    PromptWork,
    PullVersion,
    ReportsTaken,
    Revoke,
    SampleWork,
    SamplingParams,
    SetAsleep,
)
from actors.protocol.workers import (
    AssignmentsFailed,
    Draining,
    Leaving,
    Registered,
    RegisterWorker,
    WorkerAsleep,
    WorkerVersion,
)
from actors.roles import RoleArgs
from actors.rollout.engine import EngineSpec, StepOutput
from actors.rollout.engines.simulated_engine import SimulatedEngine
from actors.rollout.errors import EngineUnavailable, ServerGone, TooManyEarlyCommands
from actors.rollout.reports import Reports
from actors.rollout.worker import RolloutWorker
from actors.weights.manifest import chunk_bounds, hash_chunks, layout
from actors.weights.segments import memory_of
from configs.limits import DEFAULT_LIMITS
from tests.broken_links import break_link
from tests.simulated import run_simulated
from transport.address import ActorAddress, PeerId
from transport.memory_transport import MemoryNetwork, MemoryTransport

JOB = "tale"
RUN_ID = f"{os.getpid():x}"
STEP_S = 0.1


class FakeScheduler(Actor):
    """Notes everything in order of arrival."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.term, self.version = 1, -1
        self.leases, self.mute, self.behind = 0, False, False
        self.answers_after_s = self.takes_s = 0.0
        self.weights: ActorAddress | None = None
        self.takes_up: dict[int, tuple[int, int]] = {}
        """Former number → the number under which it goes on, and how many of its tokens are known."""
        self.on_offer: Callable[[RegisterWorker], None] = lambda _: None
        self._changed = asyncio.Condition()

    @handles(RegisterWorker)
    async def register(self, message: RegisterWorker) -> Registered:
        await self.note(message)
        self.on_offer(message)
        await asyncio.sleep(self.answers_after_s)
        self.leases += 1
        kept = [number for number in message.holds.tolist() if number in self.takes_up]
        columns = np.array([self.takes_up[number] for number in kept], np.int64).reshape(-1, 2)
        return Registered(
            term=self.term, lease_s=10, lease=self.leases, policy_version=self.version, weights=self.weights,
            kept=np.array(kept, np.int64), numbers=columns[:, 0], lengths=columns[:, 1].astype(np.int32),
        )  # fmt: skip

    @handles(LookupService)
    async def lookup(self, message: LookupService) -> ServiceFound:
        weights = self.weights if message.role == "weights" else None
        return ServiceFound(address=weights, policy_version=self.version if weights is not None else -1)

    @handles(RenewLease)
    @concurrent
    async def renew(self, message: RenewLease) -> LeaseRenewed:
        if self.mute:
            await self.ctx.sleep(60.0)
        if message.lease != self.leases:
            raise NotAccepted("another lease")
        return LeaseRenewed(lease=message.lease, lease_s=10)

    @handles(TokenReport, WorkerVersion, WorkerAsleep, AssignmentsFailed, Draining, Leaving)
    async def note(self, message: Any) -> None:
        self.heard.append(message)
        await asyncio.sleep(self.takes_s)
        if isinstance(message, TokenReport) and message.confirm and not self.behind:
            worker = next(offer.worker for offer in reversed(self.heard) if isinstance(offer, RegisterWorker))
            self.ctx.ref(worker).tell(ReportsTaken(job=JOB, term=message.term, sequence=message.sequence))
        async with self._changed:
            self._changed.notify_all()

    def all(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.heard if isinstance(message, kind)]

    async def until(self, happened: Callable[[], bool], within_s: float = 60.0) -> None:
        async with asyncio.timeout(within_s), self._changed:
            await self._changed.wait_for(happened)

    async def finished(self, *assignments: int) -> dict[int, tuple[list[int], FinishReason]]:
        """Wait until all of ``assignments`` have ended; their tokens and reasons."""
        await self.until(lambda: set(assignments) <= {n for n, (_, reason) in self.samples().items() if reason})
        return {n: sample for n, sample in self.samples().items() if n in assignments}

    def samples(self) -> dict[int, tuple[list[int], FinishReason]]:
        samples: dict[int, tuple[list[int], FinishReason]] = {}
        said = -1
        for report in self.all(TokenReport):
            assert report.sequence > said, "a report is out of order"
            said, start = report.sequence, 0
            for row, count, code in zip(
                report.assignments.tolist(), report.counts.tolist(), report.finished.tolist(), strict=True
            ):
                tokens, _ = samples.get(row, ([], FinishReason.RUNNING))
                samples[row] = (tokens + report.tokens[start : start + count].tolist(), FinishReason(code))
                start += count
        return samples


class FakeWeights(Actor):
    """Serves versions over the wire; ``gate`` holds chunks back."""

    def __init__(self) -> None:
        self.versions: dict[int, tuple[Manifest, bytes]] = {}
        self.asked: list[int] = []
        self.gate = asyncio.Event()
        self.gate.set()

    def publish(self, version: int, rows: int = 4, *, adapter_of: str = "") -> None:
        entries, total = layout([("weight", "float32", (rows, 8))])
        data = np.full((rows, 8), version, np.float32).tobytes().ljust(total, b"\0")
        manifest = Manifest(job=JOB, policy_version=version, parent=version - 1, total_bytes=total, chunk_bytes=64,
                            chunk_hashes=hash_chunks(data, 64), tensors=entries, adapter_of=adapter_of)  # fmt: skip
        self.versions[version] = (manifest, data)

    @handles(GetManifest)
    async def manifest(self, message: GetManifest) -> ManifestReply:
        self.asked.append(message.policy_version)
        version = message.policy_version if message.policy_version >= 0 else max(self.versions, default=-1)
        manifest, _ = self.versions.get(version, (None, b""))
        path = f"/far/headrace-{RUN_ID}-v{max(version, 0)}"
        return ManifestReply(manifest=manifest, host="another host", path=path)

    @handles(GetChunks)
    @concurrent
    async def chunks(self, message: GetChunks) -> AsyncIterator[Chunk]:
        await self.gate.wait()
        manifest, data = self.versions[message.policy_version]
        for index in message.chunks.tolist():
            start, end = chunk_bounds(manifest, index)
            yield Chunk(
                policy_version=message.policy_version, index=index, data=np.frombuffer(data[start:end], np.uint8)
            )


class FakeMetrics(Actor):
    def __init__(self) -> None:
        self.spans: list[TraceSpan] = []
        self.events: list[Event] = []

    @handles(Event)
    async def event(self, message: Event) -> None:
        self.events.append(message)

    @handles(Spans)
    async def take(self, message: Spans) -> None:
        assert message.track == "rollout-0"
        self.spans += message.spans


class Stage:
    """One head with the fakes, one worker, a network between them."""

    def __init__(self) -> None:
        self.network = MemoryNetwork()
        self.scheduler, self.weights, self.metrics = FakeScheduler(), FakeWeights(), FakeMetrics()
        self.engine = SimulatedEngine()

    def _system(self, name: str, incarnation: int, **limits: Any) -> ActorSystem:
        chosen = DEFAULT_LIMITS.model_copy(update=limits)
        links = MemoryTransport(self.network, PeerId(name, incarnation), limits=chosen)
        if name == "head":
            self.head_links = links
        return ActorSystem(links, limits=chosen)

    async def __aenter__(self) -> Self:
        self.head = self._system("head", 1)
        await self.head.start()
        self.scheduler_ref = await self.head.spawn("scheduler", self.scheduler)
        self.weights_address = (await self.head.spawn("weights", self.weights)).address
        await self.head.spawn("metrics", self.metrics)
        self.scheduler.weights = self.weights_address
        return self

    async def start_worker(self, slots: int = 8, **limits: Any) -> None:
        job = {
            "name": JOB, "steps": 1, "model": {"source": "tiny"}, "data": {"source": "jsonl", "path": "x.jsonl"},
            "reward": {"kind": "exact_match"},
            "rollout": {"engine": "simulated", "max_running": slots,
                        "engine_options": {"base_s": STEP_S, "load_s": 0.0}},
        }  # fmt: skip
        args = RoleArgs(role="rollout", name="rollout-0", node="n", job=json.dumps(job), model_path="", run_dir="",
                        scheduler=self.head.address("scheduler"), metrics=self.head.address("metrics"))  # fmt: skip
        self.host = self._system("n.tale.rollout-0", 2, **limits)
        await self.host.start()
        self.worker = RolloutWorker(args, self.engine)
        address = (await self.host.spawn("rollout-0", self.worker)).address
        self.worker_ref = self.head.ref(address)

    async def replace_head(
        self, term: int, takes_up: dict[int, tuple[int, int]] | None = None, *, after_s: float = 3.0
    ) -> None:
        """Kill the head and start another one at its place."""
        self.head_links.abort()
        self.scheduler, self.metrics = FakeScheduler(), FakeMetrics()
        self.scheduler.term, self.scheduler.takes_up = term, takes_up or {}
        await asyncio.sleep(after_s)
        self.head = self._system("head", 5 + term)
        await self.head.start()
        await self.head.spawn("metrics", self.metrics)
        self.worker_ref = self.head.ref(self.worker_ref.address)
        await self.head.spawn("scheduler", self.scheduler)

    async def __aexit__(self, *exception: object) -> None:
        await self.host.stop()
        await self.head.stop()
        shutil.rmtree(memory_of(RUN_ID), ignore_errors=True)

    async def have_version(self, version: int) -> None:
        self.weights.publish(version)
        self.worker_ref.tell(
            PullVersion(job=JOB, term=self.scheduler.term, policy_version=version, weights=self.weights_address)
        )
        await self.scheduler.until(lambda: any(m.policy_version == version for m in self.scheduler.all(WorkerVersion)))

    def assign(self, *assignments: int, tokens: int = 5, term: int = 1, min_version: int = -1,
               generated: tuple[int, ...] = (), prompt_ids: tuple[int, ...] = (1, 2, 3)) -> None:  # fmt: skip
        samples = [SampleWork(assignment=n, sibling=n, generated=np.array(generated, np.int32)) for n in assignments]
        work = PromptWork(step=0, prompt=0, prompt_ids=np.array(prompt_ids, np.int32), samples=samples)
        sampling = SamplingParams(max_tokens=tokens)
        self.worker_ref.tell(Assign(job=JOB, term=term, min_policy_version=min_version, sampling=sampling, work=[work]))

    def set_asleep(self, asleep: bool, term: int = 1) -> None:
        self.worker_ref.tell(SetAsleep(job=JOB, term=term, asleep=asleep))

    async def until_asleep(self, *said: bool) -> None:
        await self.scheduler.until(lambda: [news.asleep for news in self.scheduler.all(WorkerAsleep)] == [*said])


Scene = Callable[[Stage], Coroutine[Any, Any, None]]


def in_virtual_time(scene: Scene) -> Callable[[], None]:
    @functools.wraps(scene)
    def in_a_loop_of_its_own() -> None:
        async def play() -> None:
            async with Stage() as stage:
                await scene(stage)

        run_simulated(play())

    del in_a_loop_of_its_own.__wrapped__  # type: ignore[attr-defined]  # pytest would look for the scene's arguments
    return in_a_loop_of_its_own


@in_virtual_time
async def test_a_worker_registers_with_its_slots_and_streams_every_token_in_order(stage: Stage) -> None:
    await stage.start_worker(slots=8)
    registered = stage.scheduler.all(RegisterWorker)[0]
    assert (registered.engine, registered.slots, registered.policy_version) == ("simulated", 8, -1)
    stage.assign(1, 2, tokens=5)
    stage.assign(3, tokens=7)
    ended = await stage.scheduler.finished(1, 2, 3)
    assert {n: (len(tokens), reason) for n, (tokens, reason) in ended.items()} == {
        1: (5, FinishReason.LENGTH), 2: (5, FinishReason.LENGTH), 3: (7, FinishReason.LENGTH),
    }  # fmt: skip
    assert len(stage.scheduler.all(TokenReport)) == 7, "one message an engine step"


class PatientEngine(SimulatedEngine):
    """Its steps last until somebody comes, or for ten minutes."""

    def __init__(self) -> None:
        super().__init__()
        self._somebody = asyncio.Event()

    def hurry(self) -> None:
        self._somebody.set()

    async def step(self) -> StepOutput:
        self._somebody.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(600.0):
                await self._somebody.wait()
        return await super().step()


@in_virtual_time
async def test_samples_aborts_and_versions_do_not_wait_for_a_long_step_to_end(stage: Stage) -> None:
    stage.engine = PatientEngine()
    await stage.start_worker()
    stage.assign(1, tokens=50)
    await asyncio.sleep(1.0)
    stage.assign(2, tokens=50)  # ends the step of the first
    await asyncio.sleep(1.0)
    stage.worker_ref.tell(Revoke(job=JOB, term=1, assignments=np.array([1], np.int64)))
    await asyncio.sleep(1.0)
    await asyncio.wait_for(stage.have_version(1), 10.0)
    tokens = {number: len(tokens) for number, (tokens, _) in stage.scheduler.samples().items()}
    assert tokens == {1: 2, 2: 2}, "a token for each who came behind it, until it was aborted"


@in_virtual_time
async def test_a_worker_whose_scheduler_is_behind_says_many_steps_at_once_and_loses_none(stage: Stage) -> None:
    stage.scheduler.behind = True
    await stage.start_worker(slots=8)
    stage.assign(1, 2, tokens=200)
    stage.assign(3, tokens=50)
    await asyncio.sleep(8 * STEP_S)
    told, limit = stage.scheduler.all(TokenReport), DEFAULT_LIMITS.reports_under_way
    assert [report.counts.max() for report in told] == [1] * limit, "no more than that may wait in its mailbox"
    await asyncio.sleep(DEFAULT_LIMITS.report_patience_s)
    assert len(stage.scheduler.all(TokenReport)) > limit, "its word may be lost: the worker says on all the same"
    await asyncio.sleep(4.0)
    stage.scheduler.behind = False
    ended = await stage.scheduler.finished(1, 2, 3)
    assert {n: len(tokens) for n, (tokens, _) in ended.items()} == {1: 200, 2: 200, 3: 50}
    rows = np.concatenate([report.rows for report in stage.scheduler.all(TokenReport)])
    for number in ended:
        mine = rows[rows["assignment"] == number]
        assert mine["offset"].tolist() == (np.cumsum(mine["count"]) - mine["count"]).tolist(), "without a gap"
    assert max(rows["count"]) > 3


@in_virtual_time
async def test_a_scheduler_that_is_slow_for_long_has_a_short_queue_and_misses_nothing(stage: Stage) -> None:
    await stage.start_worker()
    stage.scheduler.takes_s = 10 * STEP_S
    stage.assign(1, tokens=80)
    ended = await stage.scheduler.finished(1)
    assert len(ended[1][0]) == 80
    told = stage.scheduler.all(TokenReport)
    assert len(told) < 80 / 5, "most steps are said together"


@in_virtual_time
async def test_a_worker_that_leaves_says_all_of_it_also_to_a_scheduler_that_is_behind(stage: Stage) -> None:
    stage.scheduler.behind = True
    await stage.start_worker()
    stage.assign(1, tokens=100)
    await asyncio.sleep(8 * STEP_S)
    stage.worker_ref.tell(Drain(job=JOB, deadline_s=0.2, reason="spot"))
    await stage.scheduler.until(lambda: bool(stage.scheduler.all(Leaving)), within_s=0.5)
    tokens, reason = stage.scheduler.samples()[1]
    assert (len(tokens), reason) == (8, FinishReason.ABORTED)


@in_virtual_time
async def test_a_version_that_exists_at_registration_is_pulled_and_announced_when_it_is_loaded(stage: Stage) -> None:
    stage.weights.publish(3)
    stage.scheduler.version = 3
    await stage.start_worker()
    await stage.scheduler.until(lambda: bool(stage.scheduler.all(WorkerVersion)))
    assert stage.scheduler.all(WorkerVersion)[0].policy_version == stage.engine.policy_version == 3
    stage.assign(1, min_version=3)
    await stage.scheduler.finished(1)
    assert {report.policy_version for report in stage.scheduler.all(TokenReport)} == {3}


@in_virtual_time
async def test_the_newest_version_that_may_be_served_is_pulled_while_the_engine_starts(stage: Stage) -> None:
    start, had_it = stage.engine.start, list[bool]()

    async def slowly(spec: EngineSpec) -> None:
        await asyncio.sleep(20.0)
        had_it.append(stage.worker._generation._puller._ready is not None)
        await start(spec)

    stage.engine.start = slowly  # type: ignore[method-assign]
    for version in (2, 3, 4):  # nobody may serve 4 yet: a crash could still take samples that it is made of
        stage.weights.publish(version)
    stage.scheduler.version = 3
    await stage.start_worker()
    await stage.scheduler.until(lambda: bool(stage.scheduler.all(WorkerVersion)))
    assert had_it == [True]
    assert stage.weights.asked == [3], "and not once more for the scheduler that names it"
    assert [said.policy_version for said in stage.scheduler.all(WorkerVersion)] == [3]


@in_virtual_time
async def test_work_that_comes_ahead_of_its_version_waits_until_that_is_loaded(stage: Stage) -> None:
    await stage.start_worker()
    await stage.have_version(2)
    stage.assign(1, 2, min_version=3)
    stage.assign(3, min_version=2)
    await stage.scheduler.finished(3)
    assert not stage.engine.has_work
    assert not any(1 in report.assignments for report in stage.scheduler.all(TokenReport))
    await stage.have_version(3)
    await stage.scheduler.finished(1, 2)
    versions = {report.policy_version for report in stage.scheduler.all(TokenReport) if 1 in report.assignments}
    assert versions == {3}


@in_virtual_time
async def test_work_that_came_ahead_of_its_version_can_be_revoked(stage: Stage) -> None:
    await stage.start_worker()
    await stage.have_version(2)
    stage.assign(1, 2, min_version=3)
    stage.worker_ref.tell(Revoke(job=JOB, term=stage.scheduler.term, assignments=np.array([1], np.int64)))
    ended = await stage.scheduler.finished(1)
    assert ended[1] == ([], FinishReason.ABORTED)
    await stage.have_version(3)
    assert (await stage.scheduler.finished(2))[2][1] == FinishReason.LENGTH


@in_virtual_time
async def test_generation_goes_on_while_a_version_is_fetched_and_the_swap_falls_between_two_steps(stage: Stage) -> None:
    await stage.start_worker()
    stage.weights.gate.clear()
    stage.weights.publish(1)
    stage.assign(1, tokens=20)
    stage.worker_ref.tell(PullVersion(job=JOB, term=1, policy_version=1, weights=stage.weights_address))
    await stage.scheduler.until(lambda: len(stage.scheduler.all(TokenReport)) == 6)
    stage.weights.gate.set()
    await stage.scheduler.finished(1)
    versions = [report.policy_version for report in stage.scheduler.all(TokenReport)]
    assert versions == sorted(versions)
    assert versions[:6] == [0] * 6
    assert versions[-1] == 1
    said = [
        message.policy_version for message in stage.scheduler.heard if isinstance(message, TokenReport | WorkerVersion)
    ]
    assert said == sorted(said), "a version is announced behind all that the one before has made"


@in_virtual_time
async def test_what_a_step_has_made_is_said_while_the_next_one_runs_and_the_last_one_at_once(stage: Stage) -> None:
    await stage.start_worker()
    noted: list[str] = []
    step, deliver = stage.engine.step, Reports.deliver

    async def noted_step() -> StepOutput:
        noted.append("begins")
        output = await step()
        noted.append("ends")
        return output

    def noted_deliver(reports: Reports, output: StepOutput, stats: EngineStats) -> None:
        noted.append("said")
        assert stats.tokens_total == output.offsets[0] + 1, "the gauges are those of the step that is said"
        deliver(reports, output, stats)

    stage.engine.step = noted_step  # type: ignore[method-assign]
    with patch.object(Reports, "deliver", noted_deliver):
        stage.assign(1, tokens=3)
        await stage.scheduler.finished(1)
    assert noted == ["begins", "ends", "begins", "said", "ends", "begins", "said", "ends", "said"]


@in_virtual_time
async def test_the_newest_of_several_announced_versions_wins(stage: Stage) -> None:
    await stage.start_worker()
    stage.weights.gate.clear()
    for version in (1, 2, 3):
        stage.weights.publish(version)
        stage.worker_ref.tell(PullVersion(job=JOB, term=1, policy_version=version, weights=stage.weights_address))
        await asyncio.sleep(0.1)
    stage.weights.gate.set()
    await stage.scheduler.until(lambda: stage.engine.policy_version == 3)
    assert stage.weights.asked == [1, 3], "version 2 was never fetched"


@in_virtual_time
async def test_an_announcement_of_an_older_version_than_is_wanted_already_is_ignored(stage: Stage) -> None:
    await stage.start_worker()
    stage.weights.gate.clear()
    for version in (1, 3, 2):
        stage.weights.publish(version)
        stage.worker_ref.tell(PullVersion(job=JOB, term=1, policy_version=version, weights=stage.weights_address))
        await asyncio.sleep(0.1)
    stage.weights.gate.set()
    await stage.scheduler.until(lambda: stage.engine.policy_version == 3)
    assert stage.weights.asked == [1, 3]


@in_virtual_time
async def test_a_weight_server_that_has_lost_its_newest_versions_takes_no_worker_back(stage: Stage) -> None:
    """The newest that it has is older than what the worker serves, which asks until the wanted one is there."""
    await stage.start_worker()
    await stage.have_version(5)
    del stage.weights.versions[5]
    stage.weights.publish(3)
    stage.worker_ref.tell(PullVersion(job=JOB, term=1, policy_version=7, weights=stage.weights_address))
    await asyncio.sleep(5)
    assert stage.engine.policy_version == 5
    stage.weights.publish(7)
    await stage.scheduler.until(lambda: stage.engine.policy_version == 7)
    await stage.scheduler.until(lambda: len(stage.scheduler.all(WorkerVersion)) == 2)
    assert [said.policy_version for said in stage.scheduler.all(WorkerVersion)] == [5, 7]


@in_virtual_time
async def test_a_version_that_has_been_retired_is_replaced_by_the_newest(stage: Stage) -> None:
    await stage.start_worker()
    stage.weights.publish(9)
    stage.worker_ref.tell(PullVersion(job=JOB, term=1, policy_version=4, weights=stage.weights_address))
    await stage.scheduler.until(lambda: bool(stage.scheduler.all(WorkerVersion)))
    assert stage.engine.policy_version == 9


@in_virtual_time
async def test_a_pull_is_repeated_until_the_server_answers(stage: Stage) -> None:
    await stage.start_worker()
    stage.worker_ref.tell(PullVersion(job=JOB, term=1, policy_version=1, weights=stage.weights_address))
    await asyncio.sleep(5)
    assert not stage.scheduler.all(WorkerVersion)
    stage.weights.publish(1)
    await stage.scheduler.until(lambda: stage.engine.policy_version == 1)


@in_virtual_time
async def test_revoked_work_ends_aborted_with_the_tokens_that_it_has(stage: Stage) -> None:
    await stage.start_worker()
    stage.assign(1, 2, tokens=30)
    await stage.scheduler.until(lambda: len(stage.scheduler.all(TokenReport)) == 4)
    stage.worker_ref.tell(Revoke(job=JOB, term=1, assignments=np.array([2, 99])))
    ended = await stage.scheduler.finished(1, 2)
    assert (len(ended[1][0]), ended[1][1]) == (30, FinishReason.LENGTH)
    assert 4 <= len(ended[2][0]) < 10
    assert ended[2][1] == FinishReason.ABORTED
    stage.assign(3, tokens=30, generated=tuple(ended[2][0]))
    assert len((await stage.scheduler.finished(3))[3][0]) == 30 - len(ended[2][0])


@in_virtual_time
async def test_commands_of_an_older_term_are_refused_and_a_newer_term_voids_what_is_held(stage: Stage) -> None:
    await stage.start_worker()
    stage.assign(1, tokens=50)
    await stage.scheduler.until(lambda: len(stage.scheduler.all(TokenReport)) == 2)
    stage.assign(2, tokens=5, term=4)
    ended = await stage.scheduler.finished(2)
    assert ended[2][1] == FinishReason.LENGTH
    assert not stage.engine.has_work, "what the older term assigned has ended, silently"
    assert len(stage.scheduler.samples()[1][0]) <= 3
    stage.assign(3, tokens=5, term=3)
    await asyncio.sleep(10)
    assert 3 not in stage.scheduler.samples()
    assert stage.scheduler.all(TokenReport)[-1].term == 4


@in_virtual_time
async def test_a_prompt_that_the_engine_refuses_fails_alone_as_data(stage: Stage) -> None:
    await stage.start_worker()
    stage.assign(1, prompt_ids=(1, 2, 100_000))
    stage.assign(2)
    await stage.scheduler.finished(2)
    failed = stage.scheduler.all(AssignmentsFailed)[0]
    assert (failed.assignments.tolist(), failed.failure.kind) == ([1], FailureKind.DATA)
    assert "100000" in failed.failure.message


@in_virtual_time
async def test_more_samples_than_twice_the_slots_are_refused_whole_and_nothing_that_is_held_is_lost(
    stage: Stage,
) -> None:
    await stage.start_worker(slots=2)
    stage.assign(1, 2, 3, tokens=8)
    stage.assign(4, 5, tokens=8)
    stage.assign(6, tokens=8)
    ended = await stage.scheduler.finished(1, 2, 3, 6)
    assert {len(tokens) for tokens, _ in ended.values()} == {8}
    [failed] = stage.scheduler.all(AssignmentsFailed)
    assert (failed.assignments.tolist(), failed.failure.kind) == ([4, 5], FailureKind.INFRASTRUCTURE)
    assert failed.failure.message == "3 samples are held and 2 more offered: the worker has 2 slots"
    assert not {4, 5} & stage.scheduler.samples().keys()


@in_virtual_time
async def test_a_drained_worker_hands_everything_back_says_leaving_and_stops(stage: Stage) -> None:
    await stage.start_worker()
    stage.assign(1, 2, tokens=500)
    await stage.scheduler.until(lambda: len(stage.scheduler.all(TokenReport)) == 3)
    stage.worker_ref.tell(Drain(job=JOB, deadline_s=5.0, reason="preempted by the provider"))
    stage.assign(3)
    ended = await stage.host.wait_stopped("rollout-0", timeout_s=5.0)
    assert (ended.reason, ended.error) == ("preempted", None)
    await stage.scheduler.until(lambda: bool(stage.scheduler.all(Leaving)))
    assert {reason for _, reason in stage.scheduler.samples().values()} == {FinishReason.ABORTED}
    assert stage.scheduler.all(AssignmentsFailed)[0].assignments.tolist() == [3]
    assert isinstance(stage.scheduler.heard[-1], Leaving), "nothing comes after the goodbye"


@in_virtual_time
async def test_with_notice_a_worker_goes_on_with_what_it_has_and_goes_as_soon_as_nothing_is_left(stage: Stage) -> None:
    await stage.start_worker()
    stage.assign(1, 2, tokens=8)
    await stage.scheduler.until(lambda: len(stage.scheduler.all(TokenReport)) == 3)
    began_s = asyncio.get_running_loop().time()
    stage.worker_ref.tell(Drain(job=JOB, deadline_s=30.0, reason="spot", notice=True))
    stage.assign(3)
    ended = await stage.host.wait_stopped("rollout-0", timeout_s=5.0)
    assert (ended.reason, ended.error) == ("preempted", None)
    assert asyncio.get_running_loop().time() - began_s < 10 * STEP_S
    assert {(len(tokens), reason) for tokens, reason in stage.scheduler.samples().values()} == {
        (8, FinishReason.LENGTH)
    }
    assert stage.scheduler.all(AssignmentsFailed)[0].assignments.tolist() == [3], "nothing new is begun"
    [told] = stage.scheduler.all(Draining)
    assert (told.left_s, told.reason) == (30.0, "spot")


@in_virtual_time
async def test_what_the_scheduler_does_not_take_back_in_time_a_worker_hands_back_before_its_end(stage: Stage) -> None:
    """The scheduler is silent, so it goes on until half of ``hand_over_s`` is left."""
    await stage.start_worker()
    stage.assign(1, tokens=500)
    await stage.scheduler.until(lambda: len(stage.scheduler.all(TokenReport)) == 3)
    began_s = asyncio.get_running_loop().time()
    stage.worker_ref.tell(Drain(job=JOB, deadline_s=5.0, reason="spot", notice=True))
    await stage.scheduler.until(lambda: bool(stage.scheduler.all(Leaving)))
    left_s = 5.0 - (asyncio.get_running_loop().time() - began_s)
    assert DEFAULT_LIMITS.hand_over_s / 2 - 2 * STEP_S < left_s <= DEFAULT_LIMITS.hand_over_s / 2
    tokens, reason = stage.scheduler.samples()[1]
    assert reason is FinishReason.ABORTED
    assert len(tokens) == pytest.approx(3 + (5.0 - DEFAULT_LIMITS.hand_over_s / 2) / STEP_S, abs=2)


async def noticed_while_it_runs(stage: Stage) -> None:
    await stage.start_worker()
    stage.assign(1, tokens=500)
    await stage.scheduler.until(lambda: len(stage.scheduler.all(TokenReport)) == 3)
    stage.worker_ref.tell(Drain(job=JOB, deadline_s=30.0, reason="spot", notice=True))
    await asyncio.sleep(3 * STEP_S)


async def goes_within(stage: Stage, seconds: float) -> None:
    ended = await stage.host.wait_stopped("rollout-0", timeout_s=seconds)
    assert (ended.reason, ended.error) == ("preempted", None)


@in_virtual_time
async def test_an_order_to_go_at_once_ends_a_notice(stage: Stage) -> None:
    await noticed_while_it_runs(stage)
    stage.worker_ref.tell(Drain(job=JOB, deadline_s=5.0, reason="again"))
    await goes_within(stage, 3 * STEP_S)


@in_virtual_time
async def test_a_second_notice_without_any_time_ends_the_first(stage: Stage) -> None:
    await noticed_while_it_runs(stage)
    stage.worker_ref.tell(Drain(job=JOB, deadline_s=0.0, reason="again", notice=True))
    await goes_within(stage, 3 * STEP_S)


@in_virtual_time
async def test_with_notice_and_without_a_scheduler_there_is_nobody_to_go_on_for(stage: Stage) -> None:
    await noticed_while_it_runs(stage)
    break_link(stage.network, "head", "n.tale.rollout-0")
    await goes_within(stage, 3.0)


@in_virtual_time
async def test_a_cut_link_voids_what_was_assigned_and_the_worker_offers_itself_again(stage: Stage) -> None:
    await stage.start_worker()
    await stage.have_version(1)
    stage.assign(1, 2, tokens=60)
    await stage.scheduler.until(lambda: len(stage.scheduler.all(TokenReport)) == 5)
    break_link(stage.network, "head", "n.tale.rollout-0")
    await stage.scheduler.until(lambda: len(stage.scheduler.all(RegisterWorker)) == 2)
    assert [(offer.policy_version, offer.again) for offer in stage.scheduler.all(RegisterWorker)] == [
        (-1, False),
        (1, True),
    ]
    before, reason = stage.scheduler.samples()[1]
    stage.assign(3, tokens=60, generated=tuple(before))
    ended = await stage.scheduler.finished(3)
    assert len(before) + len(ended[3][0]) == 60
    assert reason == stage.scheduler.samples()[1][1] == FinishReason.RUNNING
    later = np.concatenate([report.assignments for report in stage.scheduler.all(TokenReport)[6:]])
    assert 1 not in later, "voided work is silent"


@in_virtual_time
async def test_a_worker_finds_the_scheduler_of_a_head_that_was_started_again(stage: Stage) -> None:
    """Another incarnation at the same place: what the old one had assigned is void, the new one is served at once."""
    await stage.start_worker()
    await stage.have_version(1)
    stage.assign(1, 2, tokens=60)
    await stage.scheduler.until(lambda: len(stage.scheduler.all(TokenReport)) == 5)
    await stage.replace_head(term=2)
    await stage.scheduler.until(lambda: len(stage.scheduler.all(RegisterWorker)) == 1)
    assert stage.scheduler.all(RegisterWorker)[0].holds.tolist() == [1, 2]
    stage.assign(3, tokens=10, term=2)
    await stage.scheduler.until(lambda: any(d.finished.any() for d in stage.scheduler.all(TokenReport)), within_s=5.0)
    reports = stage.scheduler.all(TokenReport)
    assert {report.term for report in reports} == {2}
    assert {n for report in reports for n in report.assignments.tolist()} == {3}, "what it did not take up is silent"
    await asyncio.sleep(2.0)
    assert stage.metrics.spans, "the trace goes on in the new head's file"


async def overtaken(stage: Stage, commands: int) -> None:
    """The worker registers anew, and ``commands`` that were sent after the answer come before it."""
    await stage.start_worker(early_commands=4)
    await stage.have_version(1)

    def overtake(offer: RegisterWorker) -> None:
        for number in range(commands):
            stage.assign(10 + number)

    stage.scheduler.on_offer, stage.scheduler.answers_after_s = overtake, 1.0
    break_link(stage.network, "head", "n.tale.rollout-0")
    await stage.scheduler.until(lambda: len(stage.scheduler.all(RegisterWorker)) == 2)


@in_virtual_time
async def test_commands_that_overtake_the_answer_to_an_offer_are_obeyed_after_it(stage: Stage) -> None:
    await overtaken(stage, commands=4)
    assert len(await stage.scheduler.finished(10, 11, 12, 13)) == 4


@in_virtual_time
async def test_an_early_command_of_a_scheduler_that_its_successor_answers_for_is_dropped(stage: Stage) -> None:
    await stage.start_worker()
    await stage.have_version(1)

    def overtake(offer: RegisterWorker) -> None:
        stage.assign(10, term=1)
        stage.assign(11, term=2)

    stage.scheduler.on_offer, stage.scheduler.answers_after_s, stage.scheduler.term = overtake, 1.0, 2
    break_link(stage.network, "head", "n.tale.rollout-0")
    assert (await stage.scheduler.finished(11)).keys() == {11}


@in_virtual_time
async def test_more_early_commands_than_a_healthy_scheduler_sends_crash_the_worker(stage: Stage) -> None:
    await overtaken(stage, commands=5)
    ended = await stage.host.wait_stopped("rollout-0", timeout_s=5.0)
    assert isinstance(ended.error, TooManyEarlyCommands)


async def undisturbed(number: int, tokens: int) -> list[int]:
    """What a worker makes of an assignment that nothing happens to."""
    async with Stage() as stage:
        await stage.start_worker()
        stage.assign(number, tokens=tokens)
        return (await stage.scheduler.finished(number))[number][0]


@in_virtual_time
async def test_what_is_generated_without_a_head_is_said_to_the_next_one_and_not_generated_again(stage: Stage) -> None:
    """The next head knows 3 tokens of one sample, as many as the worker has said of the other, nothing of a third."""
    await stage.start_worker()
    await stage.have_version(1)
    stage.assign(1, 2, 3, tokens=60)
    stage.assign(4, tokens=20)
    await stage.scheduler.until(lambda: len(stage.scheduler.all(TokenReport)) == 5)
    said = {n: tokens for n, (tokens, _) in stage.scheduler.samples().items()}
    await stage.replace_head(2, {1: (101, 3), 2: (102, len(said[2])), 4: (104, 5)})
    ended = await stage.scheduler.finished(101, 102, 104)
    for number, before, tokens in ((1, said[1][:3], 60), (2, said[2], 60), (4, said[4], 20)):
        whole = before + ended[100 + number][0]
        assert (whole, ended[100 + number][1]) == (await undisturbed(number, tokens), FinishReason.LENGTH)
    assert {n for report in stage.scheduler.all(TokenReport) for n in report.assignments.tolist()} == {101, 102, 104}
    assert {report.term for report in stage.scheduler.all(TokenReport)} == {2}
    wasted = stage.engine.stats().tokens_total - (60 + 60 + 20)
    assert wasted < 60, "of the sample that was not taken up, and only until that was known"
    [event] = stage.metrics.events
    assert event.fields["samples"] == 3 and int(event.fields["generated_alone"]) > 60
    print(f"{event.fields['generated_alone']} tokens were generated without a head, {event.fields['tokens']} were told")


@in_virtual_time
async def test_a_worker_outlives_two_heads_in_a_row_and_obeys_the_third(stage: Stage) -> None:
    await stage.start_worker()
    stage.assign(1, 2, tokens=90)
    await stage.scheduler.until(lambda: len(stage.scheduler.all(TokenReport)) == 5)
    said = stage.scheduler.samples()[1][0]
    await stage.replace_head(2, {1: (101, len(said)), 2: (102, 0)})
    await stage.scheduler.until(lambda: len(stage.scheduler.samples().get(101, ([], 0))[0]) > 8)
    said += stage.scheduler.samples()[101][0]
    await stage.replace_head(3, {101: (201, len(said)), 102: (202, 0)})
    await stage.scheduler.until(lambda: 202 in stage.scheduler.samples())
    stage.worker_ref.tell(Revoke(job=JOB, term=3, assignments=np.array([202])))
    ended = await stage.scheduler.finished(201, 202)
    assert said + ended[201][0] == await undisturbed(1, 90)
    assert ended[202][1] == FinishReason.ABORTED
    assert ended[202][0] == (await undisturbed(2, 90))[: len(ended[202][0])]


@in_virtual_time
async def test_a_worker_whose_lease_lapses_without_a_head_lets_go_of_all_and_claims_nothing(stage: Stage) -> None:
    await stage.start_worker(orphan_grace_s=60.0)
    stage.assign(1, 2, tokens=500)
    await stage.scheduler.until(lambda: len(stage.scheduler.all(TokenReport)) == 5)
    await stage.replace_head(2, {1: (101, 0), 2: (102, 0)}, after_s=15.0)
    await stage.scheduler.until(lambda: len(stage.scheduler.all(RegisterWorker)) == 1, within_s=30.0)
    assert stage.scheduler.all(RegisterWorker)[0].holds.tolist() == []
    assert stage.worker.holds == 0
    assert stage.engine.stats().tokens_total < 2 * 110, "10 s of 10 steps a second"


@in_virtual_time
async def test_what_a_next_head_wants_and_is_not_remembered_is_handed_back_to_it(stage: Stage) -> None:
    """Its end has been said, but the new head has lost it, and the worker remembers the newest tokens only."""
    await stage.start_worker(replay_tokens=4)
    stage.assign(1, tokens=3)
    stage.assign(2, tokens=60)
    await stage.scheduler.until(lambda: len(stage.scheduler.all(TokenReport)) == 4)
    await stage.replace_head(2, {1: (101, 1), 2: (102, 0)})
    await stage.scheduler.until(lambda: bool(stage.scheduler.all(TokenReport)))
    holds = stage.scheduler.all(RegisterWorker)[0].holds.tolist()
    samples = stage.scheduler.samples()
    assert 2 in holds
    assert 1 not in holds or samples[101] == ([], FinishReason.ABORTED)
    first = stage.scheduler.all(TokenReport)[0]
    assert 102 not in first.assignments or first.offsets[first.assignments.tolist().index(102)] > 0, "a gap is seen"


@in_virtual_time
async def test_commands_that_overtake_the_answer_of_a_new_head_void_nothing(stage: Stage) -> None:
    await stage.start_worker()
    stage.assign(1, tokens=60)
    await stage.scheduler.until(lambda: len(stage.scheduler.all(TokenReport)) == 5)
    said = stage.scheduler.samples()[1][0]
    killed = asyncio.create_task(stage.replace_head(2, {1: (101, len(said))}))
    await asyncio.sleep(1.0)
    stage.scheduler.on_offer = lambda _: stage.assign(9, tokens=4, term=2)
    await killed
    ended = await stage.scheduler.finished(101, 9)
    assert said + ended[101][0] == await undisturbed(1, 60)
    assert len(ended[9][0]) == 4


@in_virtual_time
async def test_without_its_scheduler_a_worker_goes_on_up_to_its_bound_and_stops_after_the_grace(stage: Stage) -> None:
    await stage.start_worker(orphan_grace_s=20.0, ask_timeout_s=1.0, orphan_tokens=50, replay_tokens=4)
    stage.assign(1, tokens=500)
    await stage.scheduler.until(lambda: len(stage.scheduler.all(TokenReport)) == 3)
    cut_at_s = asyncio.get_running_loop().time()
    await stage.head.stop()
    ended = await stage.host.wait_stopped("rollout-0", timeout_s=60.0)
    assert ended.reason == "orphaned"
    assert 10 < asyncio.get_running_loop().time() - cut_at_s <= 25
    assert 50 <= stage.engine.stats().tokens_total <= 58, "20 s would have been 200"


@in_virtual_time
async def test_idle_time_is_accounted_and_spans_tell_idle_generate_and_pull(stage: Stage) -> None:
    await stage.start_worker()
    await stage.have_version(1)
    await asyncio.sleep(20)
    stage.assign(1, tokens=30)
    await stage.scheduler.finished(1)
    stats = stage.scheduler.all(TokenReport)[-1].stats
    assert stats.idle_s_total == pytest.approx(20, abs=0.5)
    assert stats.busy_s_total == pytest.approx(3, abs=0.1)
    await asyncio.sleep(3)
    assert {span.name for span in stage.metrics.spans} == {"idle", "generate", "pull"}
    made = [span.args for span in stage.metrics.spans if span.name == "generate"]
    assert sum(int(args["tokens"]) for args in made) == 30 and {args["version"] for args in made} == {1}
    assert [(args["running"], args["queued"]) for args in made] == [(1, 0)] * (len(made) - 1) + [(0, 0)]


@in_virtual_time
async def test_what_a_worker_did_since_its_last_spans_is_told_when_it_stops(stage: Stage) -> None:
    await stage.start_worker(span_interval_s=3600.0)
    await stage.have_version(1)
    stage.assign(1, tokens=30)
    await stage.scheduler.finished(1)
    told = {span.name for span in stage.metrics.spans}
    await stage.host.stop()
    await asyncio.sleep(1)
    assert "generate" in {span.name for span in stage.metrics.spans} - told


@in_virtual_time
async def test_a_server_that_is_gone_takes_the_worker_along_and_accuses_no_sample(stage: Stage) -> None:
    """Its end is no crash, after which the scheduler would suspect what the worker held."""
    await stage.start_worker()

    async def gone() -> Any:
        raise ServerGone("the server does not answer")

    stage.engine.step = gone  # type: ignore[method-assign]
    stage.assign(1)
    ended = await stage.host.wait_stopped("rollout-0", timeout_s=5.0)
    assert (ended.reason, ended.error) == ("preempted", None)


class AwayEngine(SimulatedEngine):
    """An engine whose server is away for the first ``lives`` starts, each of which waits for a minute."""

    def __init__(self, lives: int) -> None:
        super().__init__()
        self.away, self.starts = lives, 0

    async def start(self, spec: EngineSpec) -> None:
        self.starts += 1
        if self.starts <= self.away:
            await asyncio.sleep(60.0)
            raise ServerGone("no server answers at http://there:8000")
        await super().start(spec)


@in_virtual_time
async def test_a_worker_waits_for_a_server_that_is_away_says_where_and_generates_when_it_is_there(stage: Stage) -> None:
    """It is ready meanwhile: whoever started it sees no failed start, so many at once spend no restarts."""
    stage.engine = engine = AwayEngine(3)
    with structlog.testing.capture_logs() as said:
        await stage.start_worker()
        assert engine.starts == 1 and not stage.scheduler.all(RegisterWorker)
        await stage.scheduler.until(lambda: bool(stage.scheduler.all(RegisterWorker)), within_s=300.0)
    assert engine.starts == 4 and stage.scheduler.all(RegisterWorker)[0].engine_start_s >= 180.0
    warned = [line for line in said if line["event"] == "the server is waited for"]
    assert len(warned) == 3 and all("http://there:8000" in line["error"] for line in warned)
    stage.assign(1)
    assert len((await stage.scheduler.finished(1))[1][0]) == 5


@in_virtual_time
async def test_a_worker_that_has_waited_for_its_server_for_long_enough_fails_and_names_the_limit(stage: Stage) -> None:
    stage.engine = AwayEngine(99)
    await stage.start_worker(server_absence_s=600.0)
    ended = await stage.host.wait_stopped("rollout-0", timeout_s=700.0)
    assert isinstance(ended.error, EngineUnavailable) and stage.engine.starts == 10
    assert "http://there:8000" in str(ended.error) and "limits.server_absence_s" in str(ended.error)


@in_virtual_time
async def test_a_worker_that_waits_for_its_server_leaves_when_it_is_told_to(stage: Stage) -> None:
    stage.engine = AwayEngine(99)
    await stage.start_worker()
    stage.worker_ref.tell(Drain(job=JOB, deadline_s=5.0, reason="scaled down"))
    ended = await stage.host.wait_stopped("rollout-0", timeout_s=6.0)
    assert (ended.reason, ended.error) == ("preempted", None)


@in_virtual_time
async def test_an_engine_that_raises_crashes_the_worker(stage: Stage) -> None:
    await stage.start_worker()

    async def broken() -> Any:
        raise RuntimeError("the device is gone")

    stage.engine.step = broken  # type: ignore[method-assign]
    stage.assign(1)
    ended = await stage.host.wait_stopped("rollout-0", timeout_s=5.0)
    assert ended.reason == "crashed"
    assert "the device is gone" in str(ended.error)


@in_virtual_time
async def test_an_adapter_of_another_model_is_never_served(stage: Stage) -> None:
    stage.weights.publish(3, adapter_of="1234")
    stage.scheduler.version = 3
    await stage.start_worker()
    ended = await stage.host.wait_stopped("rollout-0", timeout_s=5.0)
    assert "is an adapter of the model with xxh3 1234, and this worker serves a whole model" in str(ended.error)
    assert stage.engine.policy_version == 0


@in_virtual_time
async def test_an_engine_whose_step_never_ends_crashes_the_worker(stage: Stage) -> None:
    await stage.start_worker(engine_step_s=30.0)

    async def hangs() -> Any:
        await asyncio.Event().wait()

    stage.engine.step = hangs  # type: ignore[method-assign]
    stage.assign(1)
    began_s = asyncio.get_running_loop().time()
    ended = await stage.host.wait_stopped("rollout-0", timeout_s=60.0)
    assert isinstance(ended.error, TimeoutError)
    assert asyncio.get_running_loop().time() - began_s == pytest.approx(30.0, abs=2.0)


@in_virtual_time
async def test_a_worker_whose_lease_is_not_renewed_fences_itself_registers_anew_and_pulls(stage: Stage) -> None:
    """The link is up and nobody renews: as behind a partition that lets heartbeats through."""
    await stage.start_worker()
    await stage.have_version(1)
    stage.assign(1, tokens=10_000)
    await asyncio.sleep(1.0)
    stage.scheduler.mute = True
    muted_s = asyncio.get_running_loop().time()
    stage.weights.publish(2)
    stage.scheduler.version = 2
    registered = len(stage.scheduler.all(RegisterWorker))
    await stage.scheduler.until(lambda: len(stage.scheduler.all(RegisterWorker)) > registered)
    lapsed_after_s = asyncio.get_running_loop().time() - muted_s
    assert (
        10 - 10 / 4 - DEFAULT_LIMITS.lease_margin_s - 0.5 < lapsed_after_s <= 10 - DEFAULT_LIMITS.lease_margin_s + 0.1
    )
    assert stage.worker.holds == 0
    tokens = len(stage.scheduler.samples()[1][0])
    await stage.scheduler.until(lambda: any(v.policy_version == 2 for v in stage.scheduler.all(WorkerVersion)))
    await asyncio.sleep(2.0)
    assert len(stage.scheduler.samples()[1][0]) == tokens, "nothing more is said of what was let go"


@in_virtual_time
async def test_a_worker_whose_lease_is_renewed_goes_on_for_as_long_as_it_takes(stage: Stage) -> None:
    await stage.start_worker()
    await stage.have_version(1)
    stage.assign(1, tokens=500)
    assert len((await stage.scheduler.finished(1))[1][0]) == 500
    assert len(stage.scheduler.all(RegisterWorker)) == 1


@in_virtual_time
async def test_a_worker_that_its_scheduler_does_not_know_any_more_registers_at_once(stage: Stage) -> None:
    await stage.start_worker()
    await stage.have_version(1)
    stage.assign(1, tokens=10_000)
    stage.scheduler.leases += 1
    began_s = asyncio.get_running_loop().time()
    await stage.scheduler.until(lambda: len(stage.scheduler.all(RegisterWorker)) == 2)
    assert asyncio.get_running_loop().time() - began_s < 10 / 4 + 0.5
    assert stage.worker.holds == 0


@in_virtual_time
async def test_a_worker_that_is_told_to_sleep_does_so_once_it_holds_nothing_and_says_so_behind_its_last_token(
    stage: Stage,
) -> None:
    await stage.start_worker()
    stage.assign(1, tokens=20)
    await stage.scheduler.until(lambda: len(stage.scheduler.all(TokenReport)) == 3)
    stage.set_asleep(True)
    await stage.scheduler.until(lambda: len(stage.scheduler.all(TokenReport)) == 6)
    assert not stage.scheduler.all(WorkerAsleep), "what it holds keeps it awake"
    stage.worker_ref.tell(Revoke(job=JOB, term=1, assignments=np.array([1], np.int64)))
    await stage.until_asleep(True)
    assert stage.scheduler.samples()[1][1] == FinishReason.ABORTED
    assert isinstance(stage.scheduler.heard[-1], WorkerAsleep)
    assert stage.engine._level == 1, "the weights stay on the host"


@in_virtual_time
async def test_a_sleeping_worker_pulls_and_loads_when_it_wakes(stage: Stage) -> None:
    await stage.start_worker()
    await stage.have_version(1)
    stage.set_asleep(True)
    await stage.until_asleep(True)
    stage.weights.publish(2)
    stage.worker_ref.tell(PullVersion(job=JOB, term=1, policy_version=2, weights=stage.weights_address))
    await asyncio.sleep(5.0)
    assert stage.weights.asked[-1] == 2
    assert stage.engine.policy_version == 1
    stage.set_asleep(False)
    await stage.until_asleep(True, False)
    await stage.scheduler.until(lambda: stage.engine.policy_version == 2)
    stage.assign(1, min_version=2)
    assert (await stage.scheduler.finished(1))[1][1] == FinishReason.LENGTH


@in_virtual_time
async def test_a_sleeping_worker_keeps_its_lease_and_its_sleep_is_not_idle_time(stage: Stage) -> None:
    await stage.start_worker()
    stage.set_asleep(True)
    await stage.until_asleep(True)
    await asyncio.sleep(60.0)
    assert len(stage.scheduler.all(RegisterWorker)) == 1
    stage.set_asleep(False)
    stage.assign(1, tokens=2)
    await stage.scheduler.finished(1)
    assert stage.scheduler.all(TokenReport)[-1].stats.idle_s_total < 1.0
    assert "asleep" in {span.name for span in stage.metrics.spans}


@in_virtual_time
async def test_work_wakes_a_sleeping_worker_which_sleeps_again_after_it(stage: Stage) -> None:
    """No scheduler gives it any; an engine that was asked for a step in its sleep would crash."""
    await stage.start_worker()
    stage.set_asleep(True)
    await stage.until_asleep(True)
    stage.assign(1, tokens=3)
    await stage.scheduler.finished(1)
    await asyncio.sleep(STEP_S)
    assert stage.engine._level == 1


@in_virtual_time
async def test_every_order_to_sleep_is_answered_also_one_that_changes_nothing(stage: Stage) -> None:
    """A next scheduler does not know what the one before it has said."""
    await stage.start_worker()
    stage.set_asleep(True)
    await stage.until_asleep(True)
    await stage.replace_head(term=2)
    await stage.scheduler.until(lambda: bool(stage.scheduler.all(RegisterWorker)))
    assert stage.engine._level == 1, "it stays as it is until it is told"
    stage.set_asleep(True, term=2)
    await stage.until_asleep(True)
    stage.set_asleep(False, term=1)
    await asyncio.sleep(1.0)
    assert stage.engine._level == 1, "an order of an older term"


@in_virtual_time
async def test_a_sleeping_worker_can_be_drained(stage: Stage) -> None:
    await stage.start_worker()
    stage.set_asleep(True)
    await stage.until_asleep(True)
    stage.worker_ref.tell(Drain(job=JOB, deadline_s=5.0, reason="spot"))
    await stage.scheduler.until(lambda: bool(stage.scheduler.all(Leaving)), within_s=1.0)
