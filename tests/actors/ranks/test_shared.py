"""One rank group for the bundles of several jobs: who waits for whom, and when ranks are no longer in agreement."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from actors.core.context import Context
from actors.core.watch import Down
from actors.ranks.errors import RankLost
from actors.ranks.followers import NOBODY
from actors.ranks.shared import SharedFollower, SharedGroup
from tests.simulated import run_simulated

SETTLE_S = 5.0


class Summing:
    """A follower that answers with the sum of its orders so far, or sleeps, or fails, as it is told."""

    def __init__(self) -> None:
        self.sum = 0

    async def serve(self, order: bytes) -> bytes:
        text = order.decode()
        if text.startswith("sleep"):
            await asyncio.sleep(float(text.removeprefix("sleep")))
            return b"slept"
        if text == "fail":
            return b"failed"
        self.sum += int(text)
        return str(self.sum).encode()

    async def close(self) -> None:
        self.sum = -1


class Ranks:
    """Implements ``Followers``: each has a ``SharedFollower``, and none may get two orders at once."""

    def __init__(self, count: int = 2) -> None:
        self.made: list[Summing] = []
        self.followers = [SharedFollower(self._make) for _ in range(count)]
        self._busy = [False] * count

    def _make(self) -> Summing:
        self.made.append(Summing())
        return self.made[-1]

    @property
    def count(self) -> int:
        return len(self.followers)

    def connect(self, ctx: Context) -> None: ...

    def heard(self, message: Down) -> None: ...

    async def call(
        self, orders: Sequence[bytes], *, timeout_s: float, ends: Callable[[bytes], bool] | None = None
    ) -> list[bytes]:
        return await asyncio.gather(*(self._one(rank, order, ends) for rank, order in enumerate(orders)))

    async def _one(self, rank: int, order: bytes, ends: Callable[[bytes], bool] | None) -> bytes:
        assert not self._busy[rank], "two orders at once"
        self._busy[rank] = True
        answer = await self.followers[rank].serve(order)
        self._busy[rank] = False
        assert ends is None or not ends(answer)
        return answer

    async def close(self) -> None: ...


def is_failure(answer: bytes) -> bool:
    return answer == b"failed"


def test_each_bundle_has_followers_of_its_own_until_it_is_closed() -> None:
    async def main() -> None:
        ranks = Ranks()
        group = SharedGroup(ranks, settle_s=SETTLE_S)
        one, two = group.bundle(), group.bundle()
        assert await one.call([b"1", b"2"], timeout_s=1.0) == [b"1", b"2"]
        assert await two.call([b"10", b"20"], timeout_s=1.0) == [b"10", b"20"]
        assert await one.call([b"3", b"4"], timeout_s=1.0) == [b"4", b"6"]
        await one.close()
        await one.close()
        assert [follower.sum for follower in ranks.made] == [-1, -1, 10, 20]
        assert await two.call([b"1", b"1"], timeout_s=1.0) == [b"11", b"21"]
        await group.roll_call()
        assert len(ranks.made) == 4
        await ranks.followers[0].close()
        assert [follower.sum for follower in ranks.made] == [-1, -1, -1, 21]

    run_simulated(main())


def test_the_order_of_one_bundle_waits_for_that_of_another() -> None:
    async def main() -> None:
        group = SharedGroup(Ranks(), settle_s=SETTLE_S)
        one, two = group.bundle(), group.bundle()
        long = asyncio.create_task(one.call([b"sleep60", b"sleep1"], timeout_s=100.0))
        await asyncio.sleep(0.5)
        assert await two.call([b"1", b"1"], timeout_s=1.0) == [b"1", b"1"]
        assert long.done()
        assert asyncio.get_running_loop().time() >= 60.0

    run_simulated(main())


def test_a_group_that_is_closed_lets_nobody_wait_for_an_answer() -> None:
    async def main() -> None:
        group = SharedGroup(Ranks(), settle_s=SETTLE_S)
        waiting = asyncio.create_task(group.bundle().call([b"sleep60", b"1"], timeout_s=100.0))
        await asyncio.sleep(1.0)
        group.close()
        with pytest.raises(RankLost, match="was closed before all ranks had answered"):
            await waiting
        assert asyncio.get_running_loop().time() == 1.0

    run_simulated(main())


@pytest.mark.parametrize(("slow_s", "lost"), [(4.0, False), (6.0, True)])
def test_a_failure_is_told_at_once_and_the_others_have_some_time_to_answer_before_the_group_is_lost(
    slow_s: float, lost: bool
) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        group = SharedGroup(Ranks(), settle_s=SETTLE_S)
        one, two = group.bundle(), group.bundle()
        began_s = loop.time()
        found = await one.call([f"sleep{slow_s}".encode(), b"fail"], timeout_s=100.0, ends=is_failure)
        assert (found, loop.time() - began_s) == ([b"failed"], 0.0)
        if lost:
            with pytest.raises(RankLost, match="has not answered within 5 s"):
                await group.roll_call()
        else:
            await group.roll_call()
            assert loop.time() - began_s == slow_s
            assert await two.call([b"1", b"1"], timeout_s=1.0) == [b"1", b"1"]

    run_simulated(main())


@pytest.mark.parametrize(("slow_s", "lost"), [(10.0, False), (1000.0, True)])
def test_a_call_that_was_given_up_is_under_way_until_all_have_answered(slow_s: float, lost: bool) -> None:
    async def main() -> None:
        group = SharedGroup(Ranks(), settle_s=SETTLE_S)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(8.0):
                await group.bundle().call([f"sleep{slow_s}".encode()] * 2, timeout_s=2000.0)
        if lost:
            with pytest.raises(RankLost):
                await group.roll_call()
        else:
            await group.roll_call()

    run_simulated(main())


def test_a_group_of_the_leader_alone_has_nobody_to_order() -> None:
    async def main() -> None:
        group = SharedGroup(NOBODY, settle_s=SETTLE_S)
        assert group.bundle() is NOBODY
        await group.roll_call()

    run_simulated(main())


def test_nothing_is_ended_in_ranks_that_are_about_to_end_with_the_group() -> None:
    async def main() -> None:
        ranks = Ranks()
        group = SharedGroup(ranks, settle_s=SETTLE_S)
        bundle = group.bundle()
        await bundle.call([b"1", b"1"], timeout_s=1.0)
        group.close()
        await bundle.close()
        assert [follower.sum for follower in ranks.made] == [1, 1]

    run_simulated(main())
