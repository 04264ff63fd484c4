"""A whole job around a real scheduler and a real job actor, on a virtual-time loop: each other part is a small fake.

Tokens and rewards are functions of (prompt, sibling, position), so whatever happens, the same samples must come out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from actors.core.actor import Actor, concurrent, handles
from actors.core.message import Message, message
from actors.core.system import ActorSystem
from actors.core.tenure import RenewLease, Tenure
from actors.jobs.job import Job
from actors.ledger.memory_journal import MemoryJournal
from actors.protocol.batches import Progress, QueryProgress, SetPaused
from actors.protocol.failures import Acknowledged
from actors.protocol.groups import EarlySamples, GrantGroups, GroupGrant
from actors.protocol.rewards import PromptsRead, ReadPrompts, Score, Scored, ShowSamples, SourcedPrompt, Verdict
from actors.protocol.services import RegisterService
from actors.protocol.steps import CheckpointTaken, CommitStep, Committed, OpenStep, StepGranted
from actors.protocol.tokens import FinishReason, TokenReport
from actors.protocol.weights import VersionAvailable
from actors.protocol.work import Assign, EngineStats, PullVersion, ReportsTaken, Revoke
from actors.protocol.workers import Registered, RegisterWorker, WorkerVersion
from actors.scheduler.scheduler import Scheduler
from configs.schema import JobConfig
from supervisors.jobs.job_news import JobListener
from tests.simulated import run_simulated
from tests.smallest_job import smallest_job
from transport.address import ActorAddress, PeerId
from transport.memory_transport import MemoryNetwork, MemoryTransport

STOP = 9
BUDGET = 8


def config(**changes: Any) -> JobConfig:
    base: dict[str, Any] = {
        "steps": 4,
        "algorithm": {"group_size": 4, "prompts_per_step": 4},
        "rollout": {"max_tokens": BUDGET, "max_running": 16},
        "checkpoint": {"every": 2},
    }
    return smallest_job(**base | changes)


def length(prompt: int, sibling: int) -> int:
    """How many tokens the response has, its stop token included."""
    return 1 + (prompt * 7 + sibling * 3) % BUDGET


def token(prompt: int, sibling: int, position: int) -> int:
    return STOP if position == length(prompt, sibling) - 1 else 10 + (prompt + sibling + position) % 50


def reward(prompt: int, sibling: int) -> float:
    return ((prompt + sibling) % 3) / 2


@message("test.turn")
class Turn(Message):
    pass


class FakeWorker(Actor):
    """One token a sample every ``step_s``; serves a version ``pull_s`` after it was told of it."""

    def __init__(self, scheduler: ActorAddress, slots: int = 16, step_s: float = 0.01, pull_s: float = 0.02) -> None:
        self.scheduler, self.slots, self.step_s, self.pull_s = scheduler, slots, step_s, pull_s
        self.version = -1
        self.held: dict[int, tuple[int, int, int, int]] = {}
        self.ahead: list[Assign] = []
        """Work that needs a version which is still being pulled."""
        self.sequence = 0
        self.busy = 0.0
        self.versions: list[int] = []
        self.assigned = 0
        self.revoked = 0
        self.poison: int | None = None
        """The prompt at which it crashes, as soon as it begins to generate for it."""
        self.taken: list[int] = []
        """Sequence numbers up to which the scheduler has said that it has taken what was told."""
        self.beside_trainer = self.again = False
        self.swallow = False
        """Lose a report, as no transport may: the ledger has to notice."""

    async def on_start(self) -> None:
        offer = RegisterWorker(
            job="j", worker=self.ctx.self_address, node="n", engine="fake", slots=self.slots, policy_version=-1,
            beside_trainer=self.beside_trainer, again=self.again,
        )  # fmt: skip
        asked_at_s, scheduler = self.ctx.now(), self.ctx.ref(self.scheduler)
        answer = await scheduler.ask(offer, Registered)
        self.term = answer.term
        renewal = RenewLease(job="j", holder=self.ctx.self_address.name, lease=answer.lease)
        Tenure(self.ctx, lambda: None).begin(scheduler, renewal, answer.lease_s, asked_at_s=asked_at_s)
        if answer.policy_version >= 0:
            self.ctx.start_task(self._pull(answer.policy_version), "pull")
        self.ctx.send_after(self.step_s, Turn())

    @handles(PullVersion)
    async def pull(self, order: PullVersion) -> None:
        self.ctx.start_task(self._pull(order.policy_version), "pull")

    async def _pull(self, version: int) -> None:
        await self.ctx.sleep(self.pull_s)
        if version > self.version:
            self.version = version
            ahead, self.ahead = self.ahead, []
            for order in ahead:
                await self.assign(order)
            news = WorkerVersion(
                job="j", worker=self.ctx.self_address.name, policy_version=version, pull_s=self.pull_s, pull_bytes=1
            )
            self.ctx.ref(self.scheduler).tell(news)

    @handles(Assign)
    async def assign(self, order: Assign) -> None:
        if order.min_policy_version > self.version:
            self.ahead.append(order)
            return
        for work in order.work:
            if work.step >= 0:
                self.versions.append(work.step - self.version)
            for sample in work.samples:
                self.assigned += 1
                at = len(sample.generated)
                assert sample.generated.tolist() == [token(work.prompt, sample.sibling, i) for i in range(at)]
                self.held[sample.assignment] = (work.prompt, sample.sibling, at, work.step)
        assert len(self.held) <= self.slots

    @handles(Revoke)
    async def revoke(self, order: Revoke) -> None:
        gone = set(order.assignments.tolist())
        self.revoked += len(gone)
        for number in gone:
            self.held.pop(number, None)
        self.ahead = [o for o in self.ahead if not gone & {s.assignment for work in o.work for s in work.samples}]

    @handles(ReportsTaken)
    async def reports_taken(self, news: ReportsTaken) -> None:
        assert news.term == self.term
        self.taken.append(news.sequence)

    @handles(Turn)
    async def turn(self, _: Turn) -> None:
        self.ctx.send_after(self.step_s, Turn())
        if not self.held:
            return
        self.busy += self.step_s
        if any(prompt == self.poison for prompt, *_ in self.held.values()):
            await self.crash()
        rows: list[tuple[int, int, int, int]] = []
        for number, (prompt, sibling, at, step) in list(self.held.items()):
            end = at + 1 == length(prompt, sibling)
            rows.append((number, at, FinishReason.STOP if end else 0, token(prompt, sibling, at)))
            self.held[number] = (prompt, sibling, at + 1, step)
            if end:
                del self.held[number]
        if self.swallow:
            self.swallow = False
            return
        self.ctx.ref(self.scheduler).tell(self.report(rows))

    async def crash(self) -> None:
        """What the poison does."""
        raise RuntimeError("the engine has crashed")

    def report(self, rows: list[tuple[int, int, int, int]]) -> TokenReport:
        n = len(rows)
        self.sequence += 1
        return TokenReport.of(
            job="j", worker=self.ctx.self_address.name, term=self.term, sequence=self.sequence - 1,
            policy_version=self.version, assignments=np.array([r[0] for r in rows], np.int64),
            offsets=np.array([r[1] for r in rows], np.int32), counts=np.ones(n, np.int32),
            finished=np.array([r[2] for r in rows], np.uint8), tokens=np.array([r[3] for r in rows], np.int32),
            logprobs=np.zeros(n, np.float32),
            stats=EngineStats(busy_s_total=self.busy, idle_s_total=self.ctx.now() - self.busy),
            confirm=self.sequence % 3 == 0,
        )  # fmt: skip


class FakeRewards(Actor):
    """Also the prompt source. ``verdict`` may be replaced to fail on purpose."""

    def __init__(self, scheduler: ActorAddress, prompts: int = 10_000) -> None:
        self.scheduler, self.prompts = scheduler, prompts
        self.verdict: Callable[[int, int], Verdict] = lambda p, s: Verdict(prompt=p, sibling=s, reward=reward(p, s))
        self.delay_s = 0.005
        self.asked: list[tuple[int, int]] = []
        self.shown: list[ShowSamples] = []
        self.held_out = 5
        """Prompts of the evaluation."""
        self.answers: list[int] = []
        """Lengths of reference answers, if any. With them every step has the prompts of the first."""

    async def on_start(self) -> None:
        for role in ("rewards", "prompts"):
            offer = RegisterService(job="j", role=role, address=self.ctx.self_address)
            await self.ctx.ref(self.scheduler).ask(offer, Acknowledged)

    @handles(Score)
    @concurrent
    async def score(self, question: Score) -> Scored:
        names = [(item.prompt, r.sibling) for item in question.items for r in item.responses]
        for item in question.items:
            for r in item.responses:
                want = [token(item.prompt, r.sibling, i) for i in range(length(item.prompt, r.sibling))]
                assert r.token_ids.tolist() == want
        self.asked += names
        await self.ctx.sleep(self.delay_s)
        return Scored(verdicts=[self.verdict(p, s) for p, s in names])

    @handles(ShowSamples)
    async def show(self, message: ShowSamples) -> None:
        self.shown.append(message)

    @handles(ReadPrompts)
    async def read(self, question: ReadPrompts) -> PromptsRead:
        there = self.held_out if question.evaluation else self.prompts
        last = min(question.start + question.count, there)
        prompts = [self.prompt(p) for p in range(question.start, last)]
        return PromptsRead(prompts=prompts, exhausted=last < question.start + question.count)

    def prompt(self, number: int) -> SourcedPrompt:
        epoch = len(self.answers)
        ids = np.array([number % epoch if epoch else number, 1], np.int32)
        return SourcedPrompt(number, ids, "", b"", self.answers[number % epoch] if epoch else -1)


class FakeTrainer(Actor):
    """Trains from ``step`` on; ``trained`` maps each committed step to its samples as the trainer saw them."""

    def __init__(self, scheduler: ActorAddress, step: int, trained: dict[int, list[Any]], steps: int) -> None:
        self.scheduler, self.step, self.trained, self.steps = scheduler, step, trained, steps
        self.groups: dict[int, GroupGrant] = {}
        self.early: list[tuple[int, int, int, tuple[int, ...]]] = []
        """Step, prompt, sibling and tokens of samples that it was told of before their groups were whole."""
        self.granted: StepGranted | None = None
        self.news = asyncio.Event()
        self.crash_before_commit = -1
        self.replays = 0
        self.train_s = 0.03
        self.checkpoint_s = 0.0
        self.metrics = {"kl": 0.5, "trainer_idle_fraction": 0.25}
        self.spared: list[tuple[int, ...]] = []
        """Checkpoints that were to stay, as it was told with each commit."""
        self.directory: Path | None = None
        """Where it makes directories of its checkpoints; None: they are names alone."""

    async def on_start(self) -> None:
        offer = RegisterService(job="j", role="trainer", address=self.ctx.self_address)
        await self.ctx.ref(self.scheduler).ask(offer, Acknowledged)
        self.publish()
        self.ctx.start_task(self.run(), "train")

    def publish(self) -> None:
        news = VersionAvailable(job="j", policy_version=self.step, weights=self.ctx.self_address)
        self.ctx.ref(self.scheduler).tell(news)

    @handles(GrantGroups)
    async def lease(self, message: GrantGroups) -> None:
        if message.step == self.step:
            self.groups.update({group.prompt: group for group in message.split()})

    @handles(EarlySamples)
    async def take_early(self, message: EarlySamples) -> None:
        assert message.step == self.step
        for prompt, sibling, _, tokens in message.split():
            assert prompt not in self.groups, "its group has been granted"
            self.early.append((message.step, prompt, sibling, tuple(tokens.tolist())))

    @handles(StepGranted)
    async def granted_all(self, news: StepGranted) -> None:
        if news.step == self.step:
            self.granted = news
            self.news.set()

    async def run(self) -> None:
        scheduler = self.ctx.ref(self.scheduler)
        while True:
            self.groups, self.granted = {}, None
            scheduler.tell(OpenStep(job="j", step=self.step, trainer=self.ctx.self_address))
            self.news.clear()
            await self.news.wait()
            assert self.granted is not None
            assert self.granted.never or self.granted.groups == len(self.groups)
            if self.granted.never:
                await self.checkpoint(final=True)
                return self.ctx.stop("completed")
            await self.ctx.sleep(self.train_s)
            if self.crash_before_commit == self.step:
                raise RuntimeError("crash on purpose")
            groups = sorted(self.groups.values(), key=lambda g: g.prompt)
            samples = [s for g in groups for s in _samples(g)]
            self.replays += any(g.replay for g in groups)
            before = self.trained.setdefault(self.step, samples)
            assert before == samples, "a replay must bring the same samples"
            self.step += 1
            self.publish()
            commit = CommitStep(
                job="j", step=self.step - 1, trainer=self.ctx.self_address,
                prompts=np.array([s[0] for s in samples], np.int64),
                siblings=np.array([s[1] for s in samples], np.int32),
                policy_version=self.step, metrics=self.metrics,
            )  # fmt: skip
            answer = await scheduler.ask(commit, Committed)
            self.spared.append(answer.spared)
            if answer.checkpoint:
                await self.ctx.sleep(self.checkpoint_s)
                await self.checkpoint(final=answer.stop)
            if answer.stop:
                return self.ctx.stop("completed")

    async def checkpoint(self, *, final: bool) -> None:
        name = f"step_{self.step:06d}"
        if self.directory is not None:
            (self.directory / name).mkdir(exist_ok=True)
            name = str(self.directory / name)
        taken = CheckpointTaken(job="j", step=self.step, path=name, final=final)
        await self.ctx.ref(self.scheduler).ask(taken, Acknowledged)


def _samples(group: GroupGrant) -> list[tuple[int, int, tuple[int, ...], float]]:
    ends = np.cumsum(group.lengths)
    return [
        (group.prompt, int(s), tuple(group.tokens[end - n : end].tolist()), float(r))
        for s, n, end, r in zip(group.siblings, group.lengths, ends, group.rewards, strict=True)
    ]


class World:
    """All parts of one job; each role in a peer of its own, so that it can be killed."""

    def __init__(self, job: JobConfig) -> None:
        self.config = job
        self.network = MemoryNetwork()
        self.systems: dict[str, ActorSystem] = {}
        self.transports: dict[str, MemoryTransport] = {}
        self.journal = MemoryJournal("j")
        self.vocabulary = 0
        self.route_bytes: int | None = None
        """Number of token ids that the scheduler believes the model to have; 0: not known."""
        self.trained: dict[int, list[Any]] = {}
        self.events: list[Any] = []
        self.worker_news: list[Any] = []
        self._lives = 0
        self.dead: list[ActorSystem] = []
        """Kept to the end: a task that is collected before its loop ends is an error to asyncio."""

    async def system(self, name: str) -> ActorSystem:
        self._lives += 1
        transport = MemoryTransport(self.network, PeerId(name, self._lives), limits=self.config.limits)
        system = ActorSystem(transport, limits=self.config.limits)
        await system.start()
        self.systems[name], self.transports[name] = system, transport
        return system

    async def start_head(self, *, resumed: bool = False) -> None:
        system = await self.system("head")
        self.scheduler = Scheduler(
            self.config, Path(), journal=self.journal, resumed=resumed, vocabulary=self.vocabulary,
            route_bytes=self.route_bytes,
        )  # fmt: skip
        self.scheduler_at = (await system.spawn("scheduler.j", self.scheduler)).address
        heard = JobListener(self.events.append, self.worker_news.append)
        listener = (await system.spawn("listener", heard)).address
        self.job = Job(self.config, self.scheduler_at, stop_token_ids=(STOP,), listener=listener)
        self.job_at = (await system.spawn("job.j", self.job)).address

    async def start_worker(self, name: str, **options: Any) -> FakeWorker:
        worker = FakeWorker(self.scheduler_at, **options)
        await (await self.system(name)).spawn(name, worker)
        return worker

    async def start_rewards(self, **options: Any) -> FakeRewards:
        rewards = FakeRewards(self.scheduler_at, **options)
        await (await self.system("rewards")).spawn("rewards", rewards)
        return rewards

    async def start_trainer(self, step: int = 0) -> FakeTrainer:
        trainer = FakeTrainer(self.scheduler_at, step, self.trained, self.config.steps)
        await (await self.system("trainer")).spawn("trainer", trainer)
        return trainer

    async def start(self, workers: int = 2) -> None:
        await self.start_head()
        self.rewards = await self.start_rewards()
        self.workers = [await self.start_worker(f"rollout-{i}") for i in range(workers)]
        self.trainer = await self.start_trainer()

    def kill(self, name: str) -> None:
        """As by a signal that cannot be caught: nothing is said, nothing is flushed."""
        self.transports.pop(name).abort()
        self.dead.append(self.systems.pop(name))

    async def progress(self) -> Progress:
        return await self.systems["head"].ref(self.scheduler_at).ask(QueryProgress(job="j"), Progress)

    async def pause(self, *, paused: bool) -> None:
        await self.systems["head"].ref(self.scheduler_at).ask(SetPaused(job="j", paused=paused), Acknowledged)

    async def until(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.005)

    async def close(self) -> None:
        for system in self.systems.values():
            await system.stop()


W = TypeVar("W", bound=World)


def play_in(
    kind: Callable[[JobConfig], W], job: JobConfig, scenario: Callable[[W], Awaitable[None]], seed: int = 0
) -> W:
    """Run ``await scenario(world)`` in virtual time; the world as it was left."""
    worlds: list[W] = []

    async def main() -> None:
        world = kind(job)
        worlds.append(world)
        try:
            await scenario(world)
        finally:
            await world.close()

    run_simulated(main(), seed=seed)
    return worlds[0]
