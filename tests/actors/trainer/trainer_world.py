"""A small world for the trainer: a scripted scheduler, a bookkeeping weight server, a backend that notes its calls.

scheduler.j   grants the groups of each step in a scripted order, and remembers commits and checkpoints
weights       answers Publish and QueryVersions as the real one does
trainer       the real actor, on the simulated backend
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from actors.core.actor import Actor, concurrent, handles
from actors.core.errors import ReplyError
from actors.core.system import ActorSystem
from actors.core.tenure import LeaseRenewed, RenewLease
from actors.protocol.failures import Acknowledged
from actors.protocol.groups import EarlySamples, GrantGroups, GroupGrant
from actors.protocol.job_news import Trouble
from actors.protocol.metrics import Spans
from actors.protocol.services import LookupService, RegisterService, ServiceChanged, ServiceFound
from actors.protocol.steps import CheckpointTaken, CommitStep, Committed, OpenStep, StepGranted
from actors.protocol.weights import Manifest, Publish, Published, QueryVersions, Versions
from actors.roles import RoleArgs
from actors.trainer.backend import AdamStep, LossSpec, MicroBatch, MicroBatchStats, StepResult
from actors.trainer.backends.simulated_backend import SimulatedBackend, TrainCost
from actors.trainer.trainer import Trainer
from configs.limits import DEFAULT_LIMITS, Limits
from configs.schema import JobConfig
from tests.simulated import run_simulated
from tests.smallest_job import smallest_job
from transport.address import ActorAddress, PeerId
from transport.memory_transport import MemoryNetwork, MemoryTransport

PROMPTS, GROUP = 4, 2


def job_config(steps: int = 3, **changes: object) -> JobConfig:
    """A job of 4 prompts times 2 siblings a step; ``changes`` are whole sections."""
    sections: dict[str, object] = {
        "steps": steps, "algorithm": {"group_size": GROUP, "prompts_per_step": PROMPTS},
        "rollout": {"engine": "simulated", "max_tokens": 8},
        "trainer": {"backend": "simulated", "lr": 0.1, "micro_batch_tokens": 16, "window_prompts": 2},
        "sync": {"mode": "minibatch"}, "checkpoint": {"every": 0, "keep": 2},
    }  # fmt: skip
    return smallest_job(**sections | changes)


def grant(step: int, prompt: int, *, replay: bool = False, equal: bool = False) -> GroupGrant:
    """Group ``prompt`` of ``step``: a function of the two numbers, so that a replay grants the same bits."""
    rng = np.random.default_rng(1000 * step + prompt)
    lengths = rng.integers(1, 6, GROUP).astype(np.int32)
    total = int(lengths.sum())
    return GroupGrant(
        job="j", step=step, prompt=prompt, replay=replay, prompt_ids=rng.integers(0, 32, 3).astype(np.int32),
        siblings=np.arange(GROUP, dtype=np.int32), lengths=lengths, tokens=rng.integers(0, 32, total).astype(np.int32),
        logprobs=np.full(total, -3.4, np.float32), versions=np.full(total, step, np.int32),
        finished=np.ones(GROUP, np.uint8), rewards=np.zeros(GROUP) if equal else np.array([1.0, 0.0]),
    )  # fmt: skip


def grants(*groups: GroupGrant) -> GrantGroups:
    """``groups`` of one step as the message that carries them."""
    first = groups[0]
    ragged = {
        name: np.concatenate([getattr(group, name) for group in groups])
        for name in ("prompt_ids", "siblings", "lengths", "tokens", "logprobs", "versions", "finished", "rewards")
    }
    return GrantGroups(
        job=first.job, step=first.step, replay=first.replay,
        prompts=np.array([group.prompt for group in groups], np.int64),
        prompt_lengths=np.array([len(group.prompt_ids) for group in groups], np.int32),
        sizes=np.array([len(group.siblings) for group in groups], np.int32), **ragged,
    )  # fmt: skip


def early(group: GroupGrant, *siblings: int) -> EarlySamples:
    """Some samples of a group, before it is whole."""
    ends = np.cumsum(group.lengths)
    rows = list(siblings)
    return EarlySamples(
        job=group.job, step=group.step, prompts=np.array([group.prompt], np.int64),
        prompt_lengths=np.array([len(group.prompt_ids)], np.int32), prompt_ids=group.prompt_ids,
        sizes=np.array([len(rows)], np.int32), siblings=group.siblings[rows], lengths=group.lengths[rows],
        tokens=np.concatenate([group.tokens[ends[row] - group.lengths[row] : ends[row]] for row in rows]),
    )  # fmt: skip


def prompts_of(step: int) -> list[int]:
    return list(range(step * PROMPTS, (step + 1) * PROMPTS))


class ScriptedScheduler(Actor):
    """Grants each opened step at once, in an order drawn from ``seed``; stops the job after ``steps``."""

    def __init__(self, steps: int, *, seed: int = 0) -> None:
        self.steps = steps
        self.rng = random.Random(seed)
        self.opened: list[int] = []
        self.commits: dict[int, CommitStep] = {}
        self.commit_times: list[float] = []
        self.checkpoints: list[CheckpointTaken] = []
        self.troubles: list[Trouble] = []
        self.services: dict[str, ActorAddress] = {}
        self.registered = 0
        self.back = asyncio.Event()
        """Clear it, and nobody is registered and no lease renewed."""
        self.back.set()
        self.checkpoint_after: set[int] = set()
        self.stop_after: int | None = None
        self.refuse: ReplyError | None = None
        self.dropped: set[int] = set()
        self.equal: set[int] = set()
        self.on_open: Callable[[OpenStep], bool] = lambda message: True
        """Returns whether to grant now; a test may take over."""

    @handles(RegisterService)
    async def register(self, message: RegisterService) -> Acknowledged:
        await self.back.wait()
        self.services[message.role] = message.address
        self.registered += 1
        return Acknowledged()

    @handles(RenewLease)
    @concurrent
    async def renew(self, message: RenewLease) -> LeaseRenewed:
        await self.back.wait()
        return LeaseRenewed(lease=message.lease, lease_s=DEFAULT_LIMITS.lease_s)

    @handles(LookupService)
    async def lookup(self, message: LookupService) -> ServiceFound:
        return ServiceFound(address=self.services.get(message.role))

    @handles(OpenStep)
    async def open_step(self, message: OpenStep) -> Acknowledged:
        if self.refuse is not None:
            raise self.refuse
        self.opened.append(message.step)
        if self.on_open(message):
            self.grant_step(message.step, message.trainer)
        return Acknowledged()

    def grant_step(self, step: int, trainer: ActorAddress, *, sent: int | None = None) -> None:
        prompts = [p for p in prompts_of(step) if p not in self.dropped]
        self.rng.shuffle(prompts)
        ref = self.ctx.ref(trainer)
        for prompt in prompts:
            ref.tell(grants(grant(step, prompt, replay=step in self.commits, equal=prompt in self.equal)))
        groups = len(prompts) if sent is None else sent
        ref.tell(StepGranted(job="j", step=step, groups=groups, samples=groups * GROUP, dropped=0))

    @handles(CommitStep)
    async def commit(self, message: CommitStep) -> Committed:
        self.commits[message.step] = message
        self.commit_times.append(self.ctx.now())
        last = self.steps - 1 if self.stop_after is None else self.stop_after
        return Committed(step=message.step, stop=message.step >= last, checkpoint=message.step in self.checkpoint_after)

    @handles(CheckpointTaken)
    async def checkpoint_taken(self, message: CheckpointTaken) -> Acknowledged:
        self.checkpoints.append(message)
        return Acknowledged()

    @handles(Trouble)
    async def trouble(self, message: Trouble) -> None:
        self.troubles.append(message)


class BookkeepingWeights(Actor):
    """Remembers every version that was published, in order."""

    def __init__(self, held: tuple[int, ...] = (), delay_s: float = 0.0) -> None:
        self.held = list(held)
        self.delay_s = delay_s
        self.published: list[int] = []
        self.manifests: dict[int, Manifest] = {}
        self.times: list[float] = []

    @handles(Publish)
    async def publish(self, message: Publish) -> Published:
        await self.ctx.sleep(self.delay_s)
        version = message.manifest.policy_version
        self.published.append(version)
        self.times.append(self.ctx.now())
        self.manifests[version] = message.manifest
        self.held.append(version)
        Path(message.path).unlink()
        return Published(policy_version=version, newest=max(self.held))

    @handles(QueryVersions)
    async def versions(self, message: QueryVersions) -> Versions:
        return Versions(held=tuple(self.held))


class Metrics(Actor):
    def __init__(self) -> None:
        self.spans: list[Spans] = []

    @handles(Spans)
    async def take(self, message: Spans) -> None:
        self.spans.append(message)


class NotingBackend(SimulatedBackend):
    """Notes the order of its calls, and which tokens each micro-batch held."""

    def __init__(self, cost: TrainCost | None = None) -> None:
        super().__init__(cost)
        self.calls: list[str] = []
        self.batches: list[list[list[int]]] = []
        self.references: list[np.ndarray | None] = []
        self.scored_tokens = 0
        self.result: StepResult | None = None

    async def accumulate(self, batch: MicroBatch, loss: LossSpec) -> MicroBatchStats:
        self.calls.append("accumulate")
        self.batches.append(batch.input_ids.tolist())
        self.references.append(batch.reference_logprobs)
        return await super().accumulate(batch, loss)

    async def score(self, batch: MicroBatch, *, temperature: float, reference: bool) -> np.ndarray:
        self.calls.append("score")
        self.scored_tokens += int(batch.lengths.sum())
        return await super().score(batch, temperature=temperature, reference=reference)

    async def step(self, *, weight: float, adam: AdamStep | None = None) -> StepResult:
        self.calls.append(f"step {weight:g}")
        result = await super().step(weight=weight, adam=adam)
        return result if self.result is None else self.result

    async def export_segment(self, path: Path, *, job: str, policy_version: int, chunk_bytes: int) -> Manifest:
        self.calls.append(f"export {policy_version}")
        return await super().export_segment(path, job=job, policy_version=policy_version, chunk_bytes=chunk_bytes)


@dataclass
class World:
    """Everything in one process. ``start`` spawns what is not there yet."""

    run_dir: Path
    job: JobConfig = field(default_factory=job_config)
    scheduler: ScriptedScheduler = field(default_factory=lambda: ScriptedScheduler(3))
    weights: BookkeepingWeights = field(default_factory=BookkeepingWeights)
    backend: NotingBackend = field(default_factory=NotingBackend)
    metrics: Metrics = field(default_factory=Metrics)
    limits: Limits = field(default_factory=Limits)
    resume_from: str = ""
    model_path: str = "m"

    async def start(self) -> Trainer:
        self.system = ActorSystem(MemoryTransport(MemoryNetwork(), PeerId("here", 1)), limits=self.limits)
        await self.system.start()
        await self.system.spawn("scheduler.j", self.scheduler)
        weights = await self.system.spawn("weights", self.weights)
        self.scheduler.services.setdefault("weights", weights.address)
        await self.system.spawn("metrics.j", self.metrics)
        return await self.start_trainer()

    async def start_trainer(self) -> Trainer:
        args = RoleArgs(
            role="trainer", name="trainer", node="n", job=self.job.model_dump_json(), model_path=self.model_path,
            run_dir=str(self.run_dir), scheduler=self.system.address("scheduler.j"),
            metrics=self.system.address("metrics.j"), resume_from=self.resume_from,
        )  # fmt: skip
        self.trainer = Trainer(args, backend=self.backend)
        await self.system.spawn("trainer", self.trainer)
        return self.trainer

    async def kill_trainer(self) -> None:
        await self.system.stop_actor("trainer", "killed")

    async def weights_moved(self, successor: BookkeepingWeights) -> None:
        """Another weight server takes over, and the scheduler says so."""
        await self.system.stop_actor("weights")
        self.weights = successor
        ref = await self.system.spawn("weights", successor)
        self.system.ref(self.system.address("trainer")).tell(
            ServiceChanged(job="j", role="weights", address=ref.address)
        )

    async def finish(self, timeout_s: float = 3600.0):
        """Wait for the trainer's end and return its exit."""
        end = await self.system.wait_stopped("trainer", timeout_s)
        await asyncio.sleep(0.01)
        await self.system.stop()
        return end


def run_to_end(world: World) -> None:
    """Start everything, and wait for the last step, in virtual time."""

    async def main() -> None:
        await world.start()
        await world.finish()

    run_simulated(main())
