"""The actors of a simulated role process: the real ones, over simulated engines, backends, verifiers and tokenizers.

rollout ─ RolloutWorker on PacedEngine        rewards ─ RewardWorker, PromptSource on SimulatedPool
trainer ─ Trainer on PacedBackend             weights ─ WeightServer as it is
ranker  ─ Ranker on a model that remembers
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, cast

import msgpack
import numpy as np
import xxhash

from actors.core.actor import Actor
from actors.environments.prompts.prompt_source import PromptSource
from actors.environments.prompts.tokenizer import TextCodec
from actors.environments.scoring.scorer_handle import PoolVerdict
from actors.environments.scoring.scorer_pool import ScorerPool
from actors.environments.worker import RewardWorker
from actors.protocol.weights import Manifest
from actors.ranker.ranker import Ranker
from actors.ranker.simulated import SimulatedLengthModel
from actors.roles import AnyArgs, RoleArgs, ServiceArgs, build_role
from actors.rollout.engine import StepOutput, WeightTensors
from actors.rollout.engines.simulated_engine import SimulatedEngine
from actors.rollout.worker import RolloutWorker
from actors.trainer.backend import LossSpec, MicroBatch, MicroBatchStats, StepResult
from actors.trainer.backends.simulated_backend import SimulatedBackend, TrainCost
from actors.trainer.trainer import Trainer
from actors.weights.manifest import tensor_views
from supervisors.simulation.ground import Body, Ground
from supervisors.simulation.published import PublishedWeights
from transport.sim.process import SimProcess

R = TypeVar("R")

_LOOK_S: Final = 0.25
"""How soon a slow process notices that it is slow no more."""


def build_simulated_role(args: AnyArgs, world: Ground, body: Body) -> dict[str, Actor]:
    """The actors of the process, by name; as ``actors.roles.build_role``."""
    if isinstance(args, ServiceArgs):
        return build_role(args)
    life, costs = body.life, world.scenario.costs
    if args.role == "rollout":
        return {args.name: RolloutWorker(args, engine=PacedEngine(life, world.published(args.name_of_job)))}
    if args.role == "trainer":
        cost = TrainCost(
            accumulate_base_s=costs.micro_batch_s,
            accumulate_token_s=costs.train_token_s,
            step_s=costs.train_step_s,
            export_s=costs.export_s,
            save_s=costs.save_s,
        )
        return {args.name: Trainer(args, backend=PacedBackend(cost, life, world.published(args.name_of_job)))}
    if args.role == "rewards":
        pool = cast(ScorerPool, SimulatedPool(args, world, life))
        codec = cast(TextCodec, _Numbers())
        return {args.name: RewardWorker(args, pool, codec), "prompts": PromptSource(args, pool)}
    if args.role == "ranker":
        return {args.name: Ranker(args, model=SimulatedLengthModel())}
    return build_role(args)


async def _slowly(life: SimProcess, work: Coroutine[Any, Any, R]) -> R:
    """Await ``work``; in a process that has been slowed down it takes that much longer, for as long as it is slow."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    result = await work
    slowness = life.slowness
    owed_s = (slowness - 1.0) * (loop.time() - began_s)
    while owed_s > 0.0 and life.slowness > 1.0:
        await asyncio.sleep(min(owed_s, _LOOK_S))
        owed_s -= _LOOK_S
    if owed_s > 0.0:  # the rest of it at full speed
        await asyncio.sleep(owed_s / slowness)
    return result


class PacedEngine(SimulatedEngine):
    """This is a simulated engine whose process may be slow. What it loads must be what was published."""

    def __init__(self, life: SimProcess, published: PublishedWeights) -> None:
        super().__init__()
        self._life = life
        self._published = published

    async def load_weights(
        self,
        tensors: WeightTensors,
        dtypes: Mapping[str, str],
        policy_version: int,
        *,
        in_flight: Literal["keep", "recompute"],
    ) -> None:
        self._published.check(policy_version, {name: array.tobytes() for name, array in tensors.items()})
        await super().load_weights(tensors, dtypes, policy_version, in_flight=in_flight)

    async def step(self) -> StepOutput:
        return await _slowly(self._life, super().step())


class PacedBackend(SimulatedBackend):
    """This is a simulated backend whose process may be slow. It keeps account of what it lays out."""

    def __init__(self, cost: TrainCost, life: SimProcess, published: PublishedWeights) -> None:
        super().__init__(cost)
        self._life = life
        self._published = published

    async def export_segment(self, path: Path, *, job: str, policy_version: int, chunk_bytes: int) -> Manifest:
        manifest = await super().export_segment(path, job=job, policy_version=policy_version, chunk_bytes=chunk_bytes)
        views = tensor_views(manifest, path.read_bytes())
        self._published.add(policy_version, {name: array.tobytes() for name, array in views.items()})
        return manifest

    async def accumulate(self, batch: MicroBatch, loss: LossSpec) -> MicroBatchStats:
        return await _slowly(self._life, super().accumulate(batch, loss))

    async def step(self, *, weight: float) -> StepResult:
        result = await _slowly(self._life, super().step(weight=weight))
        self._published.reached(*self.state())
        return result

    async def load(self, directory: Path) -> None:
        await super().load(directory)
        self._published.reached(*self.state())

    async def save(self, directory: Path) -> None:
        await _slowly(self._life, super().save(directory))


class _Numbers:
    """This is a tokenizer for tokens that stand for nothing."""

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        return " ".join(str(int(token)) for token in token_ids)


class SimulatedPool:
    """It replaces ``ScorerPool``: rewards and prompts are functions of the job's seed, in the time that they cost."""

    def __init__(self, args: RoleArgs, world: Ground, life: SimProcess) -> None:
        job = args.job_config
        self._seed = job.seed
        self._prompt_tokens = job.data.max_prompt_tokens
        self._prompts = world.simulated_job(job.name).prompts
        self._costs = world.scenario.costs
        self._no_result = world.simulated_job(job.name).no_result
        self._draw: Callable[[], float] = world.rng(f"verdicts {args.name} {world.new_pid()}").random
        self._life = life
        self._given = world.record(job.name).verdicts
        self._free = asyncio.Semaphore(job.reward.workers)
        self._patience_s = job.limits.ready_timeout_s

    warnings: Sequence[str] = ()

    async def start(self) -> None:
        """Nothing to start."""

    async def close(self) -> None:
        """Nothing to close."""

    async def score(self, items: Sequence[tuple[str, bytes]]) -> list[PoolVerdict]:
        """One verdict per item, in order."""
        low, high = self._costs.verdict_s
        verdicts: list[PoolVerdict] = []
        async with asyncio.timeout(self._patience_s), self._free:
            for response, context in items:
                prompt, _, index, _ = msgpack.unpackb(context)
                await _slowly(self._life, asyncio.sleep(low + self._draw() * (high - low)))
                if self._draw() < self._no_result:
                    verdicts.append(PoolVerdict(None, "the verifier gave no verdict"))
                else:
                    verdict = PoolVerdict(_reward(f"{prompt}/{response}"))
                    self._given.add((index, tokens_hash(response), verdict.reward))
                    verdicts.append(verdict)
        return verdicts

    async def read(self, start: int, count: int) -> dict[str, Any]:
        """As ``PromptStream.read``."""
        async with asyncio.timeout(self._patience_s), self._free:
            await _slowly(self._life, asyncio.sleep(self._costs.read_s))
        prompts = [self._prompt(ordinal) for ordinal in range(start, start + count)]
        return {"prompts": prompts, "exhausted": False, "rows": 0, "checked": 0, "seen": 0, "passed": {}, "first": {},
                "replaced": False}  # fmt: skip

    def _prompt(self, ordinal: int) -> list[Any]:
        rng = random.Random(f"{self._seed}/{ordinal % self._prompts if self._prompts else ordinal}")
        ids = np.array([rng.randrange(2, 64) for _ in range(rng.randint(1, self._prompt_tokens))], np.int32)
        text = f"prompt {ordinal}"
        return [ordinal, ids.tobytes(), text, msgpack.packb([text, "", ordinal, {}])]


def tokens_hash(response: str) -> str:
    """As in ``CommittedSample``, of a response as ``_Numbers`` decodes it."""
    tokens = np.array([int(token) for token in response.split()], "<i4")
    return xxhash.xxh3_128_hexdigest(tokens.tobytes())


def _reward(text: str) -> float:
    """Between 0 and 1, in quarters: some groups are of one mind, most are not."""
    return (xxhash.xxh3_64_intdigest(text.encode()) % 5) / 4
