"""Builds a simulated role process's actors: real ones, over simulated engines, backends, verifiers and tokenizers.

rollout ─ RolloutWorker on PacedEngine        rewards ─ RewardWorker, PromptSource on SimulatedPool
rank    ─ Rank on WatchedFollower, led by a rollout or trainer with WatchedFollowers
trainer ─ Trainer on PacedBackend,            weights ─ the real WeightServer
          or a real one on a training service train_service ─ WatchedService on ServedBackends
ranker  ─ Ranker on a model that remembers    gateway ─ registers, and is asked nothing
environments ─ SimulatedEnvironments play Game
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgpack
import numpy as np
import xxhash

from actors.core.actor import Actor
from actors.environments.prompts.prompt_source import PromptSource
from actors.environments.prompts.tokenizer import TextCodec
from actors.environments.scoring.reward_worker import RewardWorker
from actors.environments.scoring.scorer_frames import ScorerVerdict
from actors.environments.scoring.scorer_pool import ScorerPool
from actors.ranker.ranker import Ranker
from actors.ranker.simulated import SimulatedLengthModel
from actors.ranks.rank import Rank
from actors.ranks.simulated import SimulatedRanks
from actors.roles import AnyArgs, RoleArgs, ServiceArgs, actors_beside, build_role
from actors.rollout.worker import RolloutWorker
from actors.trainer.backends.simulated_backend import TrainCost
from actors.trainer.trainer import Trainer
from supervisors.simulation.cluster.context import Body, SimulationContext
from supervisors.simulation.cluster.environments import Manners, SimulatedEnvironments, SimulatedGateway
from supervisors.simulation.cluster.paced import (
    PacedBackend,
    PacedEngine,
    WatchedFollower,
    WatchedFollowers,
    slowly,
    sources_of,
)
from supervisors.simulation.cluster.train_service import WatchedService
from transport.sim.process import SimProcess


def build_simulated_role(args: AnyArgs, world: SimulationContext, body: Body) -> dict[str, Actor]:
    """The actors of the process by name, as ``actors.roles.build_role`` makes them."""
    life, costs = body.life, world.scenario.costs
    cost = TrainCost(
        accumulate_base_s=costs.micro_batch_s,
        accumulate_token_s=costs.train_token_s,
        step_s=costs.train_step_s,
        export_s=costs.export_s,
        save_s=costs.save_s,
        moved_byte_s=costs.moved_byte_s,
    )
    if isinstance(args, ServiceArgs):
        return {args.name: WatchedService(args, world, life, cost)}
    assert isinstance(args, RoleArgs), "models for programs of other people are not simulated"
    if args.role == "rollout":
        followers, ranks = _led(args, world, body, args.job_config.limits.engine_step_s)
        engine = PacedEngine(life, world.published(args.name_of_job), ranks)
        return {args.name: RolloutWorker(args, engine, followers)}
    if args.role == "trainer" and args.service is None:
        _, ranks = _led(args, world, body, args.job_config.limits.train_step_timeout_s)
        backend = PacedBackend(cost, life, world.published(args.name_of_job), ranks, sources_of(args))
        return {args.name: Trainer(args, backend)}
    if args.role == "rank":
        follower = WatchedFollower(args, f"{body.name} {world.new_pid()}", life, world.ranks)
        return {args.name: Rank(args, follower)} | actors_beside(args)
    if args.role == "rewards":
        pool = cast(ScorerPool, SimulatedPool(args, world, life))
        codec = cast(TextCodec, _Numbers())
        return {args.name: RewardWorker(args, pool, codec), "prompts": PromptSource(args, pool)}
    if args.role == "gateway":
        return {args.name: SimulatedGateway(args.job_config, args.scheduler)}
    if args.role == "environments":
        return {args.name: _environments(args, world, life)}
    if args.role == "ranker":
        return {args.name: Ranker(args, model=SimulatedLengthModel())}
    return build_role(args)


def _led(
    args: RoleArgs, world: SimulationContext, body: Body, timeout_s: float
) -> tuple[WatchedFollowers | None, SimulatedRanks | None]:
    """A leader's followers, and the rank group as its engine or backend sees it; None for a process that leads none."""
    if args.size == 1:
        return None, None
    life = f"{body.name} {world.new_pid()}"
    followers = WatchedFollowers(args, life, world.ranks)
    return followers, SimulatedRanks(followers, timeout_s, life=life)


def _environments(args: RoleArgs, world: SimulationContext, life: SimProcess) -> SimulatedEnvironments:
    job, simulated = args.job_config, world.simulated_job(args.name_of_job)
    verdicts = world.record(job.name).verdicts

    def ended(prompt: int, row: np.ndarray, reward: float) -> None:
        verdicts.add((prompt, xxhash.xxh3_128_hexdigest(row.astype("<i4").tobytes()), reward))

    return SimulatedEnvironments(
        job,
        args.scheduler,
        Manners(world.scenario.costs.environment_s, simulated.drift, simulated.environment_fails),
        draw=world.rng(f"environment {args.name} {world.new_pid()}").random,
        ended=ended,
        refused=lambda what: world.finding(f"{job.name}: episodes: {what}"),
        slowness=lambda: life.slowness,
    )


class _Numbers:
    """Decodes tokens to their numbers, since they stand for no text."""

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        return " ".join(str(int(token)) for token in token_ids)


class SimulatedPool:
    """Replaces ``ScorerPool``: rewards and prompts are functions of the job's seed, and take the scenario's time."""

    def __init__(self, args: RoleArgs, world: SimulationContext, life: SimProcess) -> None:
        job = args.job_config
        self._seed = job.seed
        self._prompt_tokens = 0 if job.has_episodes else job.data.max_prompt_tokens
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
        """Do nothing: there is nothing to start."""

    async def close(self) -> None:
        """Do nothing: there is nothing to close."""

    async def score(self, items: Sequence[tuple[str, bytes]]) -> list[ScorerVerdict]:
        """One verdict for each item, in order."""
        low, high = self._costs.verdict_s
        verdicts: list[ScorerVerdict] = []
        async with asyncio.timeout(self._patience_s), self._free:
            for response, context in items:
                prompt, _, index, _ = msgpack.unpackb(context)
                await slowly(self._life, asyncio.sleep(low + self._draw() * (high - low)))
                if self._draw() < self._no_result:
                    verdicts.append(ScorerVerdict(None, "the verifier gave no verdict"))
                else:
                    verdict = ScorerVerdict(_reward(f"{prompt}/{response}"))
                    self._given.add((index, tokens_hash(response), verdict.reward))
                    verdicts.append(verdict)
        return verdicts

    async def read(self, start: int, count: int, *, evaluation: bool = False) -> dict[str, Any]:
        """As ``ScorerPool.read``; simulated jobs have no prompts for evaluation."""
        assert not evaluation, "simulated jobs do not evaluate"
        async with asyncio.timeout(self._patience_s), self._free:
            await slowly(self._life, asyncio.sleep(self._costs.read_s))
        prompts = [self._prompt(ordinal) for ordinal in range(start, start + count)]
        return {"prompts": prompts, "exhausted": False, "rows": 0, "checked": 0, "seen": 0, "passed": {}, "first": {},
                "replaced": False}  # fmt: skip

    def _prompt(self, ordinal: int) -> list[Any]:
        rng = random.Random(f"{self._seed}/{ordinal % self._prompts if self._prompts else ordinal}")
        ids = np.array(
            [rng.randrange(2, 64) for _ in range(rng.randint(min(1, self._prompt_tokens), self._prompt_tokens))],
            np.int32,
        )
        text = f"prompt {ordinal}"
        return [ordinal, ids.tobytes(), text, msgpack.packb([text, "", ordinal, {}])]


def tokens_hash(response: str) -> str:
    """The hash of ``CommittedSample`` for a response that ``_Numbers`` has decoded."""
    tokens = np.array([int(token) for token in response.split()], "<i4")
    return xxhash.xxh3_128_hexdigest(tokens.tobytes())


def _reward(text: str) -> float:
    """A reward from 0 to 1 in quarters: some groups agree, most do not."""
    return (xxhash.xxh3_64_intdigest(text.encode()) % 5) / 4
