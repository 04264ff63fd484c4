"""The ranker: learns beside the run, answers questions before lessons, and says nothing before it has learned."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from actors.core.actor import Actor, handles
from actors.core.system import ActorSystem
from actors.policies.lengths.length_predictor import prompt_keys
from actors.protocol.failures import Acknowledged
from actors.protocol.lengths import LengthScores, ObserveLengths, ScorePrompts
from actors.protocol.metrics import Event
from actors.protocol.services import RegisterService
from actors.ranker.model import LengthPair
from actors.ranker.ranker import Ranker
from actors.ranker.simulated import SimulatedLengthModel
from actors.roles import RoleArgs
from configs.limits import Limits
from tests.simulated import run_simulated
from tests.smallest_job import smallest_job
from transport.address import PeerId
from transport.memory_transport import MemoryNetwork, MemoryTransport

JOB = smallest_job(steps=4, rollout={"length_ranking": "learned"})
LIMITS = Limits(ranker_refresh_pairs=4, ranker_refresh_slices=3, ranker_pairs=8)


class Model(SimulatedLengthModel):
    """Notes the order of its calls."""

    def __init__(self, known: int = 0) -> None:
        super().__init__()
        self.known = known
        self.kept: list[int] = []
        self.calls: list[str] = []
        self.fitted: list[int] = []

    async def start(self) -> int:
        return self.known

    async def keep(self, refreshes: int) -> None:
        self.kept.append(refreshes)

    async def score(self, prompts: Sequence[np.ndarray]) -> np.ndarray:
        self.calls.append("score")
        return await super().score(prompts)

    async def fit(self, pairs: Sequence[LengthPair]) -> float:
        self.calls.append("fit")
        self.fitted.append(len(pairs))
        return await super().fit(pairs)


class Scheduler(Actor):
    """Scheduler and metrics in one."""

    def __init__(self) -> None:
        self.scores: list[LengthScores] = []
        self.events: list[Event] = []

    @handles(RegisterService)
    async def register(self, message: RegisterService) -> Acknowledged:
        assert message.role == "ranker"
        return Acknowledged()

    @handles(LengthScores)
    async def take(self, message: LengthScores) -> None:
        self.scores.append(message)

    @handles(Event)
    async def event(self, message: Event) -> None:
        self.events.append(message)


class World:
    async def start(self, known: int = 0) -> None:
        self.scheduler, self.model = Scheduler(), Model(known)
        self.system = ActorSystem(MemoryTransport(MemoryNetwork(), PeerId("here", 1)), limits=LIMITS)
        await self.system.start()
        await self.system.spawn("scheduler.j", self.scheduler)
        self.metrics = Scheduler()
        await self.system.spawn("metrics.j", self.metrics)
        args = RoleArgs(
            role="ranker", name="ranker", node="n", job=JOB.model_dump_json(), model_path="m", run_dir="r",
            scheduler=self.system.address("scheduler.j"), metrics=self.system.address("metrics.j"),
        )  # fmt: skip
        self.ranker = Ranker(args, model=self.model)
        self.ref = await self.system.spawn("ranker", self.ranker)

    def ask(self, step: int, *prompts: int) -> None:
        ids = [np.array([p, 7], np.int32) for p in prompts]
        self.ref.tell(
            ScorePrompts(
                job="j", step=step, keys=prompt_keys(ids), prompt_lengths=np.full(len(ids), 2, np.int32),
                prompt_ids=np.concatenate(ids),
            )
        )  # fmt: skip

    def teach(self, step: int, lengths: dict[int, float]) -> None:
        ids = [np.array([p, 7], np.int32) for p in lengths]
        self.ref.tell(
            ObserveLengths(
                job="j", step=step, keys=prompt_keys(ids), prompt_lengths=np.full(len(ids), 2, np.int32),
                prompt_ids=np.concatenate(ids), response_tokens=np.array(list(lengths.values())),
            )
        )  # fmt: skip


def in_world(scenario, known: int = 0) -> None:
    async def main() -> None:
        world = World()
        await world.start(known)
        try:
            await scenario(world)
        finally:
            await world.system.stop()

    run_simulated(main())


def test_an_untrained_ranker_says_nothing_and_a_refreshed_one_answers_what_still_waits() -> None:
    async def scenario(world: World) -> None:
        world.ask(1, 1, 2)
        world.teach(0, {3: 5.0})
        await asyncio.sleep(5)
        assert (world.scheduler.scores, world.model.calls) == ([], [])
        world.teach(0, {1: 10.0, 2: 90.0, 4: 20.0})
        await asyncio.sleep(5)
        (answer,) = world.scheduler.scores
        assert (answer.refresh, answer.scores.tolist()) == (1, [10.0, 90.0])
        assert world.metrics.events[0].name == "ranker_refreshed"

    in_world(scenario)


def test_a_ranker_that_an_earlier_life_has_taught_answers_at_once_and_counts_on() -> None:
    async def scenario(world: World) -> None:
        world.ask(1, 1, 2)
        await asyncio.sleep(1)
        assert [answer.refresh for answer in world.scheduler.scores] == [3]
        world.teach(1, {p: float(p) for p in range(4)})
        await asyncio.sleep(5)
        assert world.model.kept == [4]

    in_world(scenario, known=3)


def test_a_question_that_comes_during_a_refresh_does_not_wait_for_its_end() -> None:
    async def scenario(world: World) -> None:
        world.teach(0, {p: float(p) for p in range(4)})
        await asyncio.sleep(5)
        world.model.calls.clear()
        world.teach(1, {p: float(p) for p in range(4)})
        await asyncio.sleep(0.1)
        world.ask(3, 1, 2)
        await asyncio.sleep(5)
        assert world.model.calls == ["fit", "score", "fit", "fit", "score"], "and it is scored anew after the refresh"

    in_world(scenario)


def test_it_learns_from_the_newest_pairs_only_and_forgets_questions_of_steps_that_are_over() -> None:
    async def scenario(world: World) -> None:
        world.ask(0, 1)
        for step in range(4):
            world.teach(step, {step * 10 + p: 1.0 for p in range(4)})
            await asyncio.sleep(5)
        assert world.model.fitted[-1] == LIMITS.ranker_pairs
        assert world.scheduler.scores == [], "step 0 was committed before the first refresh"

    in_world(scenario)


@pytest.mark.long
def test_the_encoder_learns_which_prompts_get_long_responses(tmp_path: Path) -> None:
    """Prompts with token 5 get responses ten times as long; judged on prompts that it has not seen."""
    from actors.ranker.encoder import EncoderLengthModel
    from actors.ranker.readers import MadeReader

    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "vocab_size": 64}')
    draw = np.random.default_rng(0)

    def prompt(*, long: bool) -> np.ndarray:
        ids = draw.integers(8, 64, int(draw.integers(5, 300))).astype(np.int32)
        if long:
            ids[-(len(ids) // 3 + 1) :] = 5
        return ids

    async def run_blocking(function, *args):
        return function(*args)

    async def main() -> None:
        model = EncoderLengthModel(lambda: MadeReader(tmp_path, 0), tmp_path, run_blocking)
        await model.start()
        pairs = [LengthPair(prompt(long=i % 4 == 0), 200.0 if i % 4 == 0 else 20.0) for i in range(64)]
        first = await model.fit(pairs)
        last = [await model.fit(pairs) for _ in range(5)][-1]
        assert last < first / 2
        scores = await model.score([prompt(long=i < 10) for i in range(40)])
        assert scores.shape == (40,)
        assert set(np.argsort(-scores)[:10].tolist()) == set(range(10))
        assert (await model.score([])).size == 0
        await model.close()

    asyncio.run(main())
