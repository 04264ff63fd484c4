"""What the prompt source answers when reading fails: for good, or for now."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from actors.core.actor import Actor, handles
from actors.core.errors import RemoteError, Unanswerable
from actors.core.system import ActorSystem
from actors.environments.errors import RewardError, ScorerBroken, ScorerTimedOut, SourceUnreadable
from actors.environments.prompts.prompt_source import PromptSource
from actors.environments.scoring.scorer_pool import ScorerPool
from actors.protocol.failures import Acknowledged
from actors.protocol.rewards import PromptsRead, ReadPrompts
from actors.protocol.services import RegisterService
from actors.roles import RoleArgs
from tests.smallest_job import smallest_job
from transport.address import PeerId
from transport.memory_transport import MemoryNetwork, MemoryTransport

READ: dict[str, Any] = {
    "exhausted": False, "rows": 9, "checked": 9, "seen": 4, "passed": {"long": 2}, "first": {"long": "row 1"},
    "replaced": False,
}  # fmt: skip


class Pool:
    """Fails as it is told, and notes how many read at once."""

    def __init__(self) -> None:
        self.errors: list[RewardError] = []
        self.reading = self.most = 0

    async def read(self, start: int, count: int, *, evaluation: bool = False) -> dict[str, Any]:
        self.reading += 1
        self.most = max(self.most, self.reading)
        await asyncio.sleep(0.01)
        self.reading -= 1
        if self.errors:
            raise self.errors.pop(0)
        return READ | {"prompts": [[start, b"\x01\0\0\0", "a", b"c"]]}


class Scheduler(Actor):
    @handles(RegisterService)
    async def register(self, _: RegisterService) -> Acknowledged:
        return Acknowledged()


class Stage:
    def __init__(self, system: ActorSystem, pool: Pool) -> None:
        self.system, self.pool = system, pool

    async def read(self, start: int = 0) -> PromptsRead:
        question = ReadPrompts(job="j", start=start, count=1)
        return await self.system.ref(self.system.address("prompts")).ask(question, PromptsRead)


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    system, pool = ActorSystem(MemoryTransport(MemoryNetwork(), PeerId("head", 1))), Pool()
    await system.start()
    await system.spawn("scheduler", Scheduler())
    scheduler = system.address("scheduler")
    args = RoleArgs(
        role="rewards", name="rewards", node="", job=smallest_job().model_dump_json(), model_path="", run_dir="",
        scheduler=scheduler, metrics=scheduler,
    )  # fmt: skip
    await system.spawn("prompts", PromptSource(args, cast(ScorerPool, pool)))
    yield Stage(system, pool)
    await system.stop()


async def test_what_the_data_set_cannot_give_is_refused_for_good_and_the_source_lives_on(stage: Stage) -> None:
    stage.pool.errors = [SourceUnreadable("row 3: no prompt")]
    with pytest.raises(Unanswerable, match="row 3: no prompt") as error:
        await stage.read()
    assert error.value.permanent
    assert (await stage.read()).prompts[0].token_ids.tolist() == [1]


async def test_a_process_that_fails_may_be_asked_again_but_not_for_ever(stage: Stage) -> None:
    """Something in the data kills it; a success between two failures shows that it does not."""
    most = stage.system.limits.read_attempts_max
    for failures in (most - 1, most):
        stage.pool.errors = [ScorerBroken("it died"), ScorerTimedOut("no answer")] * most
        del stage.pool.errors[failures:]
        for _ in range(most - 1):
            with pytest.raises(RemoteError) as error:
                await stage.read()
            assert not error.value.permanent
        if failures < most:
            assert (await stage.read()).passed == {"long": 2}
    with pytest.raises(Unanswerable, match=f"failed {most} times in a row, at prompt 7"):
        await stage.read(7)


async def test_one_reads_at_a_time(stage: Stage) -> None:
    """Two steps are asked for at once: the rows between them are tokenised once."""
    await asyncio.gather(*(stage.read(start) for start in range(5)))
    assert stage.pool.most == 1
