"""Workers with notice, in virtual time: what has not begun leaves at once, what runs as late as it can."""

from __future__ import annotations

import asyncio

from actors.protocol.workers import Draining
from tests.actors.fleet.modes.test_balanced import Batching, add_worker, play, start
from tests.actors.scheduler_world import World
from transport.transport import SendOutcome

RUNS = 6
LIMITS = {"hand_over_s": 0.5}
SLOW = 0.4
"""A step of an engine, so that a response of up to eight tokens takes some seconds."""


def tell(world: World, worker: Batching, left_s: float) -> None:
    """As the real worker does when it has heard of its notice."""
    name = worker.ctx.self_address.name
    news = Draining(job="j", worker=name, left_s=left_s, reason="spot")
    assert worker.ctx.ref(world.scheduler_at).tell(news) is SendOutcome.QUEUED


async def busy(world: World) -> tuple[Batching, Batching]:
    """One worker that runs six of its samples and keeps others waiting, and another one that came later."""
    leaving = await start(world, runs=RUNS, base_s=SLOW)
    await world.until(lambda: len(leaving.held) > RUNS and leaving.tokens > 0)
    other = await add_worker(world, "other", runs=32, base_s=0.02)
    await world.until(lambda: other.version >= 0)
    return leaving, other


def clean(world: World) -> None:
    assert sorted(world.trained) == [0, 1, 2, 3], "the job has ended, and each sample has the tokens it must have"


def test_what_has_not_begun_leaves_at_once_and_what_runs_shortly_before_the_end() -> None:
    orders: list[tuple[float, int]] = []

    async def scenario(world: World) -> None:
        leaving, other = await busy(world)
        given, running = leaving.given.total(), {number for number, (_, _, at, _) in leaving.held.items() if at}
        told_s = asyncio.get_running_loop().time()
        tell(world, leaving, 2.1)
        await world.until(lambda: bool(leaving.orders))
        assert running.isdisjoint(leaving.orders)
        first = len(leaving.orders)
        await world.until(lambda: len(leaving.orders) > first or not leaving.held)
        orders.append((asyncio.get_running_loop().time() - told_s, len(leaving.orders)))
        assert set(leaving.orders[first:]) <= running
        assert leaving.given.total() == given, "it gets no further work"
        await world.until(lambda: 3 in world.trained)
        assert other.tokens > 0

    clean(play(scenario, limits=LIMITS, policy="assign"))
    [(at_s, _)] = orders
    assert 1.6 <= at_s < 1.75, "hand_over_s before the end"


def test_with_less_notice_than_it_takes_to_hand_over_everything_leaves_at_once() -> None:
    async def scenario(world: World) -> None:
        leaving, _ = await busy(world)
        held = set(leaving.held)
        tell(world, leaving, 0.3)
        await world.until(lambda: set(leaving.orders) >= held)
        await world.until(lambda: 3 in world.trained)

    clean(play(scenario, limits=LIMITS, policy="assign"))


def test_of_two_notices_the_one_counts_that_ends_first() -> None:
    async def scenario(world: World) -> None:
        leaving, _ = await busy(world)
        began_s = asyncio.get_running_loop().time()
        tell(world, leaving, 1.0)
        tell(world, leaving, 60.0)
        await world.until(lambda: not leaving.held)
        assert asyncio.get_running_loop().time() - began_s < 0.75
        await world.until(lambda: 3 in world.trained)

    clean(play(scenario, limits=LIMITS, policy="assign"))


def test_a_worker_that_is_killed_before_its_notice_ends_is_lost_like_any_other() -> None:
    async def scenario(world: World) -> None:
        leaving, _ = await busy(world)
        tell(world, leaving, 30.0)
        await world.until(lambda: bool(leaving.orders))
        world.kill("first")
        await world.until(lambda: 3 in world.trained)

    clean(play(scenario, limits=LIMITS, policy="assign"))


def test_balancing_gives_a_worker_that_leaves_nothing() -> None:
    async def scenario(world: World) -> None:
        leaving, other = await busy(world)
        tell(world, other, 60.0)
        given = other.given.total()
        await world.until(lambda: 3 in world.trained)
        assert other.given.total() == given
        assert leaving.given.total() > 0

    clean(play(scenario, limits=LIMITS | {"balance_interval_s": 0.02}))
