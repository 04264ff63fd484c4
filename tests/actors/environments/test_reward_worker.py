"""The reward worker on a system of its own: what it says of its verifier, and the samples that it decodes."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import msgpack
import numpy as np
import pytest

from actors.core.actor import Actor, handles
from actors.core.system import ActorSystem
from actors.environments.scoring.reward_worker import RewardWorker
from actors.environments.scoring.scorer_frames import ScorerVerdict
from actors.protocol.failures import Acknowledged
from actors.protocol.job_news import Trouble
from actors.protocol.metrics import Samples, ShownSample, ShownTurn
from actors.protocol.rewards import PromptResponses, Response, SampleToShow, Score, Scored, ShowSamples
from actors.protocol.services import RegisterService
from actors.protocol.tokens import FinishReason
from actors.roles import RoleArgs
from tests.smallest_job import smallest_job
from transport.address import PeerId
from transport.memory_transport import MemoryNetwork, MemoryTransport


class Hearer(Actor):
    """Stands for the scheduler and for the metrics actor."""

    def __init__(self) -> None:
        self.troubles: list[Trouble] = []
        self.samples: list[Samples] = []
        self.heard = asyncio.Event()

    @handles(RegisterService)
    async def register(self, _: RegisterService) -> Acknowledged:
        return Acknowledged()

    @handles(Trouble, Samples)
    async def hear(self, news: Trouble | Samples) -> None:
        if isinstance(news, Trouble):
            self.troubles.append(news)
        else:
            self.samples.append(news)
        self.heard.set()


class Pool:
    """Starts with a warning. Every response gets the next of ``verdicts``."""

    verdicts: tuple[ScorerVerdict, ...] = ()

    warnings = ("the verifier returned None",)

    async def start(self) -> None:
        """Nothing to start."""

    async def close(self) -> None:
        """Nothing to close."""

    async def score(self, items: list[tuple[str, bytes]]) -> list[ScorerVerdict]:
        return list(self.verdicts[: len(items)])

    async def answers(self, contexts: list[bytes]) -> list[str]:
        return ["42" for _ in contexts]


class Letters:
    """One letter a token."""

    def decode(self, token_ids: np.ndarray) -> str:
        return "".join(chr(97 + int(token)) for token in token_ids)


@pytest.fixture
async def played() -> Any:
    system, hearer = ActorSystem(MemoryTransport(MemoryNetwork(), PeerId("head", 1))), Hearer()
    await system.start()
    at = (await system.spawn("hearer", hearer)).address
    job = smallest_job(limits={"sample_text_chars": 3})
    args = RoleArgs(
        role="rewards", name="rewards", node="n", job=job.model_dump_json(), model_path="", run_dir="",
        scheduler=at, metrics=at,
    )  # fmt: skip
    worker = await system.spawn("rewards", RewardWorker(args, cast(Any, Pool()), cast(Any, Letters())))
    yield hearer, worker
    await system.stop()


async def until_heard(hearer: Hearer) -> None:
    async with asyncio.timeout(5):
        await hearer.heard.wait()
    hearer.heard.clear()


async def test_what_the_trial_found_is_told_on(played: Any) -> None:
    hearer, _ = played
    await until_heard(hearer)
    (trouble,) = hearer.troubles
    assert trouble.kind == "reward_trial" and trouble.text == "before the first step: the verifier returned None"


async def test_a_reward_beyond_the_limit_is_no_verdict(played: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum of two such rewards is infinite, and a group's mean no number."""
    hearer, worker = played
    await until_heard(hearer)
    given = [ScorerVerdict(-1e308, ""), ScorerVerdict(1e9, ""), ScorerVerdict(0.5, "", (1e308, 0.5))]
    monkeypatch.setattr(Pool, "verdicts", tuple(given))
    responses = [Response(i, np.zeros(1, np.int32), int(FinishReason.STOP)) for i in range(3)]
    scored = await worker.ask(Score("j", 0, [PromptResponses(5, b"", responses)]), Scored, timeout_s=5)
    assert [verdict.reward for verdict in scored.verdicts] == [None, 1e9, None]
    assert scored.verdicts[0].failure_kind == "no_result"
    assert scored.verdicts[0].failure_message == (
        "the scorer returned the reward -1e+308, which is beyond reward.limit 1e+09: scale rewards down, or raise the "
        "limit"
    )
    assert "the reward 1e+308" in scored.verdicts[2].failure_message


async def test_samples_are_decoded_for_people_turn_by_turn(played: Any) -> None:
    hearer, worker = played
    await until_heard(hearer)
    context = msgpack.packb(["raw", 42, 7, {}])
    sample = SampleToShow(
        chosen="best", prompt=5, sibling=2, prompt_ids=np.array([0, 1], np.int32),
        token_ids=np.array([2, 3, 4, 5], np.int32), versions=np.array([6, 6, -1, 7], np.int32),
        finish=FinishReason.LENGTH, reward=0.5, reason="", context=context,
    )  # fmt: skip
    worker.tell(ShowSamples(job="j", step=9, samples=[sample]))
    await until_heard(hearer)
    assert hearer.samples[0].step == 9
    assert hearer.samples[0].rows == [
        ShownSample(
            step=9, chosen="best", prompt=5, sibling=2, source="", row=7, reward=0.5, reward_parts={},
            finish="max_tokens", tokens=3, versions=[6, 7], reason="", prompt_text="ab", answer="42",
            turns=[ShownTurn("model", "cd", 2), ShownTurn("environment", "e", 1), ShownTurn("model", "f", 1)],
        )
    ]  # fmt: skip
