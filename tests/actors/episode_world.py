"""The scheduler's world with episodes: simulated environments play a guessing game against a real scheduler.

What the model says is a function of (prompt, sibling, position in the row), so that whatever happens, a deterministic
game comes to the same rows.
"""

from __future__ import annotations

import random
from typing import Any

import msgpack
import numpy as np

from actors.core.actor import handles
from actors.core.system import ActorSystem
from actors.protocol.rewards import SourcedPrompt
from actors.protocol.tokens import FinishReason
from actors.protocol.work import Assign
from configs.schema import JobConfig
from supervisors.simulation.cluster.environments import Manners, SimulatedEnvironments
from supervisors.simulation.cluster.game import Game
from tests.actors.scheduler_world import STOP, FakeRewards, FakeWorker, Turn, World
from tests.smallest_job import smallest_job


def episodes_config(environment: dict[str, Any] | None = None, **changes: Any) -> JobConfig:
    base: dict[str, Any] = {
        "steps": 3,
        "reward": {},
        "environment": {"kind": "agent", "path": "game:play", "turns_max": 4, "slots": 8} | (environment or {}),
        "algorithm": {"group_size": 4, "prompts_per_step": 4},
        "rollout": {"max_tokens": 40, "max_running": 16},
        "checkpoint": {"every": 0},
    }
    return smallest_job(**base | changes)


def said(prompt: int, sibling: int, position: int) -> int:
    """What the model says at ``position`` of a row."""
    drawn = random.Random(f"{prompt}/{sibling}/{position}").randrange(60)
    return STOP if drawn < 15 else 4 + drawn


THINK_S = (0.01, 0.1)


class TalkingWorker(FakeWorker):
    """A turn ends with a stop token, or where the scheduler says."""

    @handles(Assign)
    async def assign(self, order: Assign) -> None:
        if order.min_policy_version > self.version:
            self.ahead.append(order)
            return
        for work in order.work:
            self.versions.append(work.step - self.version)
            for sample in work.samples:
                self.assigned += 1
                at = sample.first + len(sample.generated)
                self.held[sample.assignment] = (work.prompt, sample.sibling, at, sample.limit)
        assert len(self.held) <= self.slots

    @handles(Turn)
    async def turn(self, _: Turn) -> None:
        self.ctx.send_after(self.step_s, Turn())
        rows: list[tuple[int, int, int, int]] = []
        for number, (prompt, sibling, at, limit) in list(self.held.items()):
            token = said(prompt, sibling, at)
            finish = FinishReason.STOP if token == STOP else FinishReason.LENGTH if at + 1 >= limit else 0
            rows.append((number, at, finish, token))
            self.held[number] = (prompt, sibling, at + 1, limit)
            if finish:
                del self.held[number]
        if rows:
            self.ctx.ref(self.scheduler).tell(self.report(rows))


class FakeTasks(FakeRewards):
    """The prompt source of tasks: no tokens, and a context that names the row."""

    def prompt(self, number: int) -> SourcedPrompt:
        context = msgpack.packb([f"task {number}", "", number, {}])
        assert context is not None
        return SourcedPrompt(number, np.empty(0, np.int32), "", context)


class EpisodeWorld(World):
    """A world whose rows are episodes. ``refused``: what the scheduler said to an environment it contradicts."""

    def __init__(self, job: JobConfig) -> None:
        super().__init__(job)
        self.ends: list[tuple[int, np.ndarray, float]] = []
        self.refused: list[str] = []
        self.manners = Manners(THINK_S)

    async def start_rewards(self, **options: Any) -> FakeRewards:
        tasks = FakeTasks(self.scheduler_at, **options)
        await (await self.system("rewards")).spawn("rewards", tasks)
        return tasks

    async def start_worker(self, name: str, **options: Any) -> FakeWorker:
        worker = TalkingWorker(self.scheduler_at, **options)
        await (await self.system(name)).spawn(name, worker)
        return worker

    async def start_environments(self, name: str = "environments-0") -> SimulatedEnvironments:
        system: ActorSystem = await self.system(name)
        environments = SimulatedEnvironments(
            self.config, self.scheduler_at, self.manners, draw=random.Random(name).random,
            ended=lambda *end: self.ends.append(end), refused=self.refused.append,
        )  # fmt: skip
        await system.spawn(name, environments)
        return environments

    async def start(self, workers: int = 2, environments: int = 1) -> None:
        await super().start(workers)
        self.environments = [await self.start_environments(f"environments-{i}") for i in range(environments)]

    async def restart_head(self) -> None:
        """The head dies, and with it what it has not written; all but the environments begin anew."""
        for name in [name for name in self.systems if not name.startswith("environments")]:
            self.kill(name)
        self.journal.crash()
        await self.start_head()
        self.rewards = await self.start_rewards()
        self.workers = [await self.start_worker(f"rollout-{i}") for i in range(2)]
        self.trainer = await self.start_trainer(step=self.scheduler._ledger.committed_steps)

    def game(self, prompt: int, sibling: int) -> Game:
        job = self.config
        return Game(job.seed, prompt, sibling, job.environment.turns_max, self.manners.drift)

    def whole_row(self, prompt: int, sibling: int) -> list[int]:
        """The row that a deterministic game comes to, whatever happens."""
        job, game, row, turns = self.config, self.game(prompt, sibling), list[int](), list[np.ndarray]()
        left = job.rollout.max_tokens
        while (word := game.say(turns, 1)) is not None:
            end = len(row) + len(word.tokens)
            room = min(left, job.episode_tokens - end)
            if room < 1:
                break
            row += word.tokens.tolist()
            turn: list[int] = []
            while len(turn) < room and turn[-1:] != [STOP]:
                turn.append(said(prompt, sibling, end + len(turn)))
            row += turn
            left -= len(turn)
            turns.append(np.array(turn, np.int32))
        return row
