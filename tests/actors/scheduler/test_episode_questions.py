"""What the gateway and agents outside ask of the scheduler: each question as often as they like, with one answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import numpy as np
import pytest

from actors.core.errors import RemoteError
from actors.core.message import Message
from actors.protocol.endings import Ending
from actors.protocol.episodes import (
    ENVIRONMENT,
    FRESH,
    CutTurn,
    EpisodeEnded,
    EpisodeLeased,
    EpisodeName,
    EpisodeRecord,
    GetEpisode,
    LeaseEpisode,
    TakeTurn,
    TurnTaken,
)
from actors.protocol.failures import Acknowledged, EndedBefore, Failure, FailureKind
from actors.protocol.services import RegisterService
from actors.protocol.tokens import FinishReason
from tests.actors.episode_world import EpisodeWorld, episodes_config, said
from tests.actors.scheduler_world import STOP, play_in

R = TypeVar("R", bound=Message)
HELLO, MORE = np.array([5, 6, 7], np.int32), np.array([8, 5], np.int32)


class Outside(EpisodeWorld):
    """A world in which the test is the agent outside, and the gateway."""

    async def start(self, workers: int = 1, environments: int = 0) -> None:
        await super().start(workers, environments)
        self.gateway = await self.system("gateway")
        await self.until(lambda: bool(self.scheduler._ledger.batches) and self.scheduler._fleet.versions.newest == 0)

    async def ask(self, question: Message, answer: type[R]) -> R:
        return await self.gateway.ref(self.scheduler_at).ask(question, answer)

    async def begin(self) -> EpisodeName:
        leased = await self.ask(LeaseEpisode("j"), EpisodeLeased)
        assert leased.work is not None
        return leased.work.name

    async def take(
        self, name: EpisodeName, offset: int, tokens: np.ndarray, *, fresh: bool = False, diverged: bool = False,
        turn_tokens: int = 40,
    ) -> TurnTaken:  # fmt: skip
        return await self.ask(TakeTurn("j", name, offset, fresh, tokens, turn_tokens, diverged), TurnTaken)

    async def record(self, name: EpisodeName) -> EpisodeRecord:
        return await self.ask(GetEpisode("j", name), EpisodeRecord)

    async def end(self, name: EpisodeName, reward: float | None, failure: Failure | None = None) -> None:
        await self.ask(EpisodeEnded("j", name, reward, failure=failure), Acknowledged)

    @property
    def turns(self) -> int:
        """Turns that were handed to engines."""
        return sum(worker.assigned for worker in self.workers)


def play(
    scenario: Callable[[Outside], Awaitable[None]], environment: dict[str, Any] | None = None, **changes: Any
) -> None:
    config = episodes_config({"kind": "external", "path": None} | (environment or {}), **changes)

    async def started(world: Outside) -> None:
        await world.start()
        await scenario(world)

    play_in(Outside, config, started)


def turn_of(name: EpisodeName, start: int) -> list[int]:
    tokens: list[int] = []
    while tokens[-1:] != [STOP]:
        tokens.append(said(name.prompt, name.sibling, start + len(tokens)))
    return tokens


def test_an_episode_is_begun_and_ended_from_outside() -> None:
    async def scenario(world: Outside) -> None:
        name = await world.begin()
        assert name == EpisodeName(0, 0, 0, 1)
        first = await world.take(name, 0, HELLO, fresh=True)
        assert first.status == "taken"
        assert (first.offset, first.tokens.tolist()) == (3, turn_of(name, 3))
        assert first.versions.tolist() == [0] * len(first.tokens)
        assert first.finish == FinishReason.STOP
        at = 3 + len(first.tokens)
        second = await world.take(name, at, MORE)
        assert second.tokens.tolist() == turn_of(name, at + 2)
        record = await world.record(name)
        assert record.tokens.tolist() == [*HELLO, *first.tokens, *MORE, *second.tokens]
        marks = [FRESH, ENVIRONMENT, ENVIRONMENT, *[0] * len(first.tokens), ENVIRONMENT, ENVIRONMENT]
        assert record.versions.tolist() == marks + [0] * len(second.tokens)
        assert record.turns_left == 2
        assert record.model_tokens_left == 40 - len(first.tokens) - len(second.tokens)
        assert record.tokens_left == 160 - len(record.tokens)
        await world.end(name, 0.5)
        assert (await world.record(name)).status == "ended"
        assert (await world.take(name, len(record.tokens), MORE)).status == "ended"

    play(scenario)


def test_a_whole_job_is_driven_from_outside() -> None:
    async def scenario(world: Outside) -> None:
        async def agent() -> None:
            while not world.scheduler._ledger.ended:
                leased = await world.ask(LeaseEpisode("j"), EpisodeLeased)
                if leased.work is None:
                    assert leased.retry_after_s > 0
                    await asyncio.sleep(leased.retry_after_s)
                    continue
                await world.take(leased.work.name, 0, HELLO, fresh=True)
                await world.end(leased.work.name, 1.0)

        agents = [asyncio.create_task(agent()) for _ in range(5)]
        await world.until(lambda: bool(world.scheduler._ledger.ended))
        for task in agents:
            task.cancel()
        await asyncio.gather(*agents, return_exceptions=True)
        assert [len(samples) for samples in world.trained.values()] == [16, 16, 16]

    play(scenario)


def test_a_turn_that_is_asked_for_again_is_joined_while_it_runs_and_answered_afterwards() -> None:
    async def scenario(world: Outside) -> None:
        name = await world.begin()
        both = [asyncio.create_task(world.take(name, 0, HELLO, fresh=True)) for _ in range(2)]
        await asyncio.sleep(0.015)
        record = await world.record(name)
        assert not len(record.tokens), "a turn under way is not in it"
        one, other = await asyncio.gather(*both)
        again = await world.take(name, 0, HELLO, fresh=True)
        assert one.tokens.tolist() == other.tokens.tolist() == again.tokens.tolist() == turn_of(name, 3)
        assert world.turns == 1

    play(scenario)


def test_what_contradicts_the_ledger_is_refused_and_changes_nothing() -> None:
    async def scenario(world: Outside) -> None:
        name = await world.begin()
        with pytest.raises(RemoteError, match="begins with a fresh one"):
            await world.take(name, 0, HELLO)
        taken = await world.take(name, 0, HELLO, fresh=True)
        before = (await world.record(name)).tokens.tolist()
        end = len(before)
        for offset, tokens, fresh in ((0, MORE, True), (2, MORE, False), (end - 1, MORE, False), (end + 1, MORE, False),
                                      (0, HELLO, False), (0, HELLO[:2], True), (-1, MORE, False)):  # fmt: skip
            if offset == end - 1 and len(taken.tokens) == 1:
                continue
            with pytest.raises(RemoteError, match="NotAccepted"):
                await world.take(name, offset, tokens, fresh=fresh)
        with pytest.raises(RemoteError, match="at least 1"):
            await world.take(name, end, HELLO[:0])
        assert (await world.record(name)).tokens.tolist() == before
        assert world.turns == 1

    play(scenario)


def test_budgets_end_in_spent_and_nothing_is_appended() -> None:
    async def scenario(world: Outside) -> None:
        name = await world.begin()
        at, fresh = 0, True
        for _ in range(2):
            taken = await world.take(name, at, HELLO, fresh=fresh, turn_tokens=3)
            assert 1 <= len(taken.tokens) <= 3
            at, fresh = taken.offset + len(taken.tokens), False
        assert (await world.take(name, at, HELLO)).status == "spent"
        assert len((await world.record(name)).tokens) == at
        other = await world.begin()
        long = np.full(160, 5, np.int32)
        assert (await world.take(other, 0, long, fresh=True)).status == "spent"

    play(scenario, {"turns_max": 2})


def test_a_cut_turn_ends_where_it_was_cut_and_what_is_gone_is_counted() -> None:
    async def scenario(world: Outside) -> None:
        name = await world.begin()
        while len((taken := await world.take(name, 0, HELLO, fresh=True)).tokens) < 3:
            await world.end(name, 1.0)
            name = await world.begin()
        for _ in range(2):  # said twice, it is cut once
            await world.ask(CutTurn("j", name, 5), Acknowledged)
        assert world.scheduler.counters.tokens_discarded == len(taken.tokens) - 2
        again = await world.take(name, 0, HELLO, fresh=True)
        assert again.tokens.tolist() == taken.tokens[:2].tolist()
        with pytest.raises(RemoteError, match="its last turn is 3 to 5"):
            await world.ask(CutTurn("j", name, 2), Acknowledged)
        after = await world.take(name, 5, MORE)
        assert after.offset == 7
        with pytest.raises(RemoteError, match="its last turn is 7 to"):
            await world.ask(CutTurn("j", name, 4), Acknowledged)

    play(scenario)


def test_a_turn_that_was_cut_to_nothing_is_answered_so_and_the_episode_goes_on() -> None:
    async def scenario(world: Outside) -> None:
        name = await world.begin()
        await world.take(name, 0, HELLO, fresh=True)
        await world.ask(CutTurn("j", name, 3), Acknowledged)
        assert (await world.record(name)).tokens.tolist() == []
        assert (await world.take(name, 0, HELLO, fresh=True)).tokens.tolist() == []
        other = await world.take(name, 0, MORE, fresh=True)
        assert other.tokens.tolist() == turn_of(name, 2)

    play(scenario)


def test_a_failed_life_is_followed_by_another_and_what_the_older_one_says_changes_nothing() -> None:
    async def scenario(world: Outside) -> None:
        old = await world.begin()
        taken = await world.take(old, 0, HELLO, fresh=True)
        await world.end(old, None, Failure(FailureKind.INFRASTRUCTURE, "its server is gone"))
        await asyncio.sleep(1.0)
        new = await world.begin()
        assert new == EpisodeName(old.step, old.prompt, old.sibling, 2)
        assert (await world.record(old)).status == "replaced"
        assert (await world.take(old, 3 + len(taken.tokens), MORE)).status == "replaced"
        await world.end(old, 1.0)
        assert (await world.record(new)).status == "live"
        assert (await world.take(new, 0, HELLO, fresh=True)).tokens.tolist() == taken.tokens.tolist()
        assert world.turns == 1, "a replay costs no token"
        other = await world.take(new, 0, MORE, fresh=True, diverged=True)
        assert other.tokens.tolist() == turn_of(new, 2)
        assert world.scheduler.counters.tokens_discarded == len(taken.tokens)
        await world.end(new, 0.25)
        with pytest.raises(RemoteError, match=r"ended with the reward 0\.25"):
            await world.end(new, 0.75)
        assert world.scheduler._ledger.batches[0].reward[0] == 0.25

    play(scenario)


@pytest.mark.parametrize("turns", [0, 1])
def test_an_episode_that_ends_in_mid_turn_is_an_answer_with_what_the_model_has_said_and_stops_the_engine(
    turns: int,
) -> None:
    """Also in its first turn: else a model that rambles would escape the reward that its agent gives for that."""

    async def scenario(world: Outside) -> None:
        name, at = await world.begin(), 0
        for _ in range(turns):
            at = 3 + len((await world.take(name, 0, HELLO, fresh=True)).tokens)
        said_at = next(end for end in range(at + 1, 99) if len(turn_of(name, end)) > 5)  # a turn that takes a while
        spoken = np.full(said_at - at, 5, np.int32)
        under_way = asyncio.create_task(world.take(name, at, spoken, fresh=not turns))
        batch = world.scheduler._ledger.batches[0]
        await world.until(lambda: bool(batch.length[0] > said_at))
        await world.end(name, -0.5)
        assert (await under_way).status == "ended"
        kept = int(batch.length[0])
        assert kept > said_at
        assert batch.held(0)[said_at:kept].tolist() == turn_of(name, said_at)[: kept - said_at]
        assert batch.reward[0] == -0.5 and batch.finish[0] == Ending.MID_TURN
        assert world.scheduler.counters.tokens_discarded == 0
        await world.until(lambda: not world.workers[0].held)
        assert world.scheduler.credit()[0][2:] == (0, 0)

    play(scenario)


def test_whoever_waits_for_a_turn_hears_that_its_episode_was_set_aside_though_nobody_drives_it() -> None:
    async def scenario(world: Outside) -> None:
        name = await world.begin()
        await world.end(name, None, Failure(FailureKind.INFRASTRUCTURE, "its server is gone"))
        under_way = asyncio.create_task(world.take(name, 0, HELLO, fresh=True))
        await world.until(lambda: bool(world.workers[0].held))
        began_s = asyncio.get_running_loop().time()
        batch = world.scheduler._ledger.batches[0]
        world.scheduler._fleet.returns._drop(batch, np.array([0], np.int32), "it has moved too often")
        assert (await under_way).status == "ended"
        assert asyncio.get_running_loop().time() - began_s < 1.0

    play(scenario)


def test_a_gateway_that_has_moved_ends_the_life_of_every_episode_and_its_keys_with_it() -> None:
    async def scenario(world: Outside) -> None:
        names = [await world.begin() for _ in range(3)]
        for name in names:
            await world.take(name, 0, HELLO, fresh=True)
        await world.end(names[0], 0.25)
        at = world.gateway.address("gateway")
        await world.ask(RegisterService("j", "gateway", at), Acknowledged)
        assert (await world.record(names[1])).status == "live"
        await world.ask(RegisterService("j", "gateway", at, moved=True), Acknowledged)
        assert [(await world.record(name)).status for name in names] == ["ended", "replaced", "replaced"]
        await world.end(names[1], 1.0)  # changes nothing
        again = await world.begin()
        assert (again.prompt, again.sibling) in {(name.prompt, name.sibling) for name in names[1:]}
        record = await world.record(again)
        assert (record.status, len(record.tokens) > 0) == ("live", True)  # no token is lost

    play(scenario)


def test_an_episode_that_has_ended_takes_the_same_end_again_and_no_other() -> None:
    async def scenario(world: Outside) -> None:
        name = await world.begin()
        await world.take(name, 0, HELLO, fresh=True)
        for _ in range(2):
            await world.end(name, 0.25)
        no_result = Failure(FailureKind.NO_RESULT, "lost")
        for reward, failure in ((0.75, None), (None, no_result)):
            with pytest.raises(RemoteError, match=r"ended with the reward 0\.25, which stays") as refused:
                await world.end(name, reward, failure)
            assert isinstance(refused.value.raised, EndedBefore)
        failed = await world.begin()
        await world.take(failed, 0, HELLO, fresh=True)
        for _ in range(2):
            await world.end(failed, None, no_result)

    play(scenario)


def test_an_episode_in_which_the_model_said_nothing_has_no_result() -> None:
    async def scenario(world: Outside) -> None:
        name = await world.begin()
        await world.end(name, 1.0)
        batch = world.scheduler._ledger.batches[0]
        assert batch.drop_reasons[0].startswith(
            "no_result: its environment ended it before the model had said anything"
        )

    play(scenario, {"attempts": 1})


def test_an_episode_whose_reward_is_beyond_the_limit_has_no_result() -> None:
    async def scenario(world: Outside) -> None:
        name = await world.begin()
        await world.take(name, 0, HELLO, fresh=True)
        await world.end(name, 101.0)
        batch = world.scheduler._ledger.batches[0]
        assert batch.drop_reasons[0].startswith(
            "no_result: its environment gave the reward 101, which is beyond reward.limit 100"
        )

    play(scenario, {"attempts": 1}, reward={"limit": 100.0})


def test_nobody_knows_an_episode_that_was_never_begun() -> None:
    async def scenario(world: Outside) -> None:
        for odd in (
            EpisodeName(0, 0, 0, 1),
            EpisodeName(9, 0, 0, 1),
            EpisodeName(0, 99, 0, 1),
            EpisodeName(0, 0, 9, 1),
        ):
            assert (await world.record(odd)).status == "unknown"
            assert (await world.take(odd, 0, HELLO, fresh=True)).status == "unknown"
            await world.end(odd, 1.0)

    play(scenario)


def test_a_job_with_environments_of_its_own_gives_none_away() -> None:
    async def scenario(world: Outside) -> None:
        with pytest.raises(
            RemoteError, match=r"environment\.kind is agent: only an external one is driven from outside"
        ):
            await world.begin()

    play(scenario, {"kind": "agent", "path": "game:play"})
