"""A leader's followers over actors: met once, ordered directly, lost once and for all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from actors.core.errors import RemoteError
from actors.core.message import Done
from actors.core.reason import is_permanent, reason_of
from actors.protocol.ranks import FollowLeader, RankDone, RankOrder
from actors.ranks.errors import LeaderLost, RankLost
from actors.ranks.followers import FOLLOWERS
from tests.actors.ranks.rank_world import RankWorld, orders
from tests.simulated import run_simulated
from transport.errors import HeadraceError
from transport.transport import DownReason

Scenario = Callable[[RankWorld], Coroutine[Any, Any, None]]


class NoSuchModel(HeadraceError):
    permanent = True


def play(scenario: Scenario, size: int = 3) -> None:
    async def main() -> None:
        async with RankWorld(size) as world:
            await scenario(world)

    run_simulated(main())


def test_orders_go_to_each_follower_and_answers_come_in_the_order_of_ranks() -> None:
    async def scenario(world: RankWorld) -> None:
        followers = await world.whole()
        assert followers.count == 2
        assert await followers.call(orders("a", "b"), timeout_s=5) == [b"\x0197", b"\x0298"]
        assert await followers.call(orders("", "bb"), timeout_s=5) == [b"\x010", b"\x02196"]
        assert world.adders[1].served == [b"a", b""]

    play(scenario)


def test_an_answer_that_ends_a_call_waits_for_nobody() -> None:
    async def scenario(world: RankWorld) -> None:
        followers = await world.whole()
        async with asyncio.timeout(5):
            assert await followers.call(orders("wait", "b"), timeout_s=900, ends=lambda a: a[0] == 2) == [b"\x0298"]

    play(scenario)


def test_an_order_of_many_megabytes_goes_through() -> None:
    async def scenario(world: RankWorld) -> None:
        followers = await world.whole()
        order = bytes(48 << 20)
        assert await followers.call([order], timeout_s=60) == [b"\x010"]

    play(scenario, size=2)


def test_a_leader_waits_for_followers_that_start_later_and_for_the_scheduler_that_knows_them() -> None:
    async def scenario(world: RankWorld) -> None:
        followers = await world.leader()
        asked = asyncio.create_task(followers.call(orders("a", "b"), timeout_s=5))
        await asyncio.sleep(20.0)
        await world.follower(1)
        await world.follower(2)
        assert await asked == [b"\x0197", b"\x0298"]

    play(scenario)


def test_a_leader_that_finds_a_former_life_of_a_follower_waits_for_the_present_one() -> None:
    async def scenario(world: RankWorld) -> None:
        await world.follower(1)
        former = world.ranks[1]
        followers = await world.leader()
        await former.kill()
        asked = asyncio.create_task(followers.call(orders("a"), timeout_s=5))
        await asyncio.sleep(15.0)
        await world.follower(1)
        assert await asked == [b"\x0197"]

    play(scenario, size=2)


def test_a_follower_that_never_comes_is_lost() -> None:
    async def scenario(world: RankWorld) -> None:
        followers = await world.leader()
        with pytest.raises(RankLost, match=r"trainer\.rank1 is lost: it has not registered"):
            await followers.call(orders("a"), timeout_s=5)

    play(scenario, size=2)


def test_what_has_met_needs_no_scheduler() -> None:
    async def scenario(world: RankWorld) -> None:
        followers = await world.whole()
        await followers.call(orders("a", "b"), timeout_s=5)
        await world.head.kill()
        await asyncio.sleep(500.0)
        assert await followers.call(orders("b", "a"), timeout_s=5) == [b"\x0198", b"\x0297"]

    play(scenario)


@pytest.mark.parametrize("busy", [True, False])
def test_the_leader_ends_when_a_follower_is_killed_whether_it_had_an_order_or_not(busy: bool) -> None:
    async def scenario(world: RankWorld) -> None:
        followers = await world.whole()
        await followers.call(orders("a", "b"), timeout_s=5)
        asked = asyncio.create_task(followers.call(orders("wait", "wait"), timeout_s=900)) if busy else None
        await asyncio.sleep(1.0)
        began_s = asyncio.get_running_loop().time()
        await world.ranks[2].kill()
        error = await world.end_of(0)
        assert isinstance(error, RankLost | BaseExceptionGroup) and reason_of(error).error == "RankLost"
        assert "trainer.rank2 is lost" in reason_of(error).message and not is_permanent(error)
        assert asyncio.get_running_loop().time() - began_s <= world.limits.rank_patience_s + 11.0
        if asked is not None:
            with pytest.raises(RankLost):
                await asked

    play(scenario)


@pytest.mark.parametrize(("failure", "permanent"), [(RuntimeError("a bug"), False), (NoSuchModel("no model"), True)])
def test_what_a_follower_raises_ends_it_and_its_leader_says_so(failure: Exception, permanent: bool) -> None:
    async def scenario(world: RankWorld) -> None:
        followers = await world.whole()
        world.adders[2].failure = failure
        with pytest.raises(RankLost, match=f"rank2 is lost.*{type(failure).__name__}: {failure}") as caught:
            await followers.call(orders("a", "b"), timeout_s=5)
        assert is_permanent(caught.value) is permanent
        assert await world.end_of(2) is failure
        assert world.adders[2].closed

    play(scenario)


def test_a_permanent_error_that_ends_an_idle_follower_is_permanent_for_its_leader() -> None:
    async def scenario(world: RankWorld) -> None:
        followers = await world.whole()
        await followers.call(orders("a", "b"), timeout_s=5)

        async def fail() -> None:
            raise NoSuchModel("no model")

        rank = world.ranks[1].system._router.cells["trainer.rank1"].actor  # type: ignore[attr-defined]
        rank.ctx.start_task(fail(), "fail")
        error = await world.end_of(0)
        assert error is not None and is_permanent(error)

    play(scenario)


def test_a_follower_that_does_not_answer_in_time_is_lost() -> None:
    async def scenario(world: RankWorld) -> None:
        followers = await world.whole()
        with pytest.raises(RankLost, match=r"rank1 is lost"):
            await followers.call(orders("wait", "b"), timeout_s=5)

    play(scenario)


def test_a_number_that_is_repeated_joins_the_order_under_way_and_later_gets_the_same_answer() -> None:
    async def scenario(world: RankWorld) -> None:
        await world.follower(1)
        await world.leader()
        address = world.registry.services["trainer.rank1"]
        ref = world.leads.system.ref(address)
        leader = world.leads.system._router.cells["trainer"].actor  # type: ignore[attr-defined]
        ref = leader.ctx.ref(address)
        await ref.ask(FollowLeader(job="j"), Done)
        first = RankOrder(number=1, order=np.frombuffer(b"wait", np.uint8))
        asked = [asyncio.create_task(ref.ask(first, RankDone, 900)) for _ in range(2)]
        await asyncio.sleep(1.0)
        with pytest.raises(RemoteError, match="is given order 2; 1 is still at it"):
            await ref.ask(RankOrder(number=2, order=first.order), RankDone)
        world.adders[1].may_go_on.set()
        answers = [(await one).result.tobytes() for one in asked] + [(await ref.ask(first, RankDone)).result.tobytes()]
        assert len(set(answers)) == 1 and world.adders[1].served == [b"wait"]
        with pytest.raises(RemoteError, match="is given order 3; 1 is done"):
            await ref.ask(RankOrder(number=3, order=first.order), RankDone)

    play(scenario, size=2)


def test_an_order_whose_asker_has_given_up_runs_on() -> None:
    """What computes on several machines at once is not cut off on one of them."""

    async def scenario(world: RankWorld) -> None:
        followers = await world.whole()
        asked = asyncio.create_task(followers.call(orders("wait", "wait"), timeout_s=900))
        await asyncio.sleep(1.0)
        asked.cancel()
        await asyncio.sleep(1.0)
        world.adders[1].may_go_on.set()
        await asyncio.sleep(1.0)
        assert "trainer.rank1" in world.ranks[1].system.actors()

    play(scenario)


def test_a_link_that_breaks_costs_nothing_if_it_is_soon_there_again() -> None:
    async def scenario(world: RankWorld) -> None:
        followers = await world.whole()
        await followers.call(orders("a", "b"), timeout_s=5)
        asked = asyncio.create_task(followers.call(orders("wait", "b"), timeout_s=900))
        await asyncio.sleep(1.0)
        world.leads.links.disconnect(world.ranks[1].links.peer, DownReason.UNREACHABLE)
        await asyncio.sleep(1.0)
        world.adders[1].may_go_on.set()
        assert (await asked)[1] == b"\x0298"
        assert world.adders[1].served == [b"a", b"wait"]
        await asyncio.sleep(500.0)
        assert await followers.call(orders("b", "a"), timeout_s=5) == [b"\x0198", b"\x0297"]

    play(scenario)


def test_a_follower_without_a_leader_ends_itself() -> None:
    async def scenario(world: RankWorld) -> None:
        await world.follower(1)
        error = await world.end_of(1)
        assert isinstance(error, LeaderLost) and "trainer has not come to trainer.rank1 within 600 s" in str(error)

    play(scenario)


def test_a_follower_outlives_its_leader_by_a_while_and_obeys_no_other_life_of_it() -> None:
    async def scenario(world: RankWorld) -> None:
        followers = await world.whole()
        await followers.call(orders("a", "b"), timeout_s=5)
        await world.leads.kill()
        began_s = asyncio.get_running_loop().time()
        asked = asyncio.create_task((await world.leader()).call(orders("b", "a"), timeout_s=5))
        assert isinstance(await world.end_of(1), LeaderLost)
        assert asyncio.get_running_loop().time() - began_s <= world.limits.rank_orphan_s + 5.0
        assert world.adders[1].served == [b"a"] and not asked.done()
        await world.follower(1)
        await world.follower(2)
        assert await asked == [b"\x0198", b"\x0297"], "the next life of the leader has waited for theirs"

    play(scenario)


def test_nobody_but_its_leaders_process_leads_a_follower() -> None:
    async def scenario(world: RankWorld) -> None:
        await world.follower(1)
        for stranger in ("head.j.weights", "n1.j.rollout-0"):
            with pytest.raises(RankLost, match="wants to lead"):
                await (await world.leader(stranger)).call(orders("a"), timeout_s=5)
        assert world.adders[1].served == []

    play(scenario, size=2)


@pytest.mark.parametrize("stranger", ["n1.j.trainer", "n2.j.trainer", "head.k.trainer"])
def test_a_rank_on_another_machine_obeys_the_heads_trainer_of_its_job_and_nobody_else(stranger: str) -> None:
    async def scenario(world: RankWorld) -> None:
        adder = await world.follower(1, node="n1")
        with pytest.raises(RankLost):
            await (await world.leader(stranger)).call(orders("a"), timeout_s=5)
        assert adder.served == []
        assert await (await world.leader()).call(orders("a"), timeout_s=5) == [b"\x0197"]

    play(scenario, size=2)


def test_every_kind_of_follower_says_where_it_stands() -> None:
    assert all(path.startswith("actors.") and path.count(":") == 1 for path in FOLLOWERS.values())
