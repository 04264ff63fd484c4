"""Live balancing: a real scheduler, workers that run fewer samples than they hold, in virtual time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from actors.core.actor import handles
from actors.protocol.batches import SetPaused
from actors.protocol.failures import Acknowledged
from actors.protocol.tokens import FinishReason, TokenReport
from actors.protocol.work import Assign, EngineStats, Revoke
from tests.actors.scheduler_world import FakeWorker, Turn, World, config, length, play_in, token
from transport.address import ActorAddress

GROUPS, GROUP = 6, 4
QUICK = {"balance_interval_s": 0.02, "pending_samples_max": 4}


class Batching(FakeWorker):
    """Runs the first ``runs`` of what it holds; a step takes ``base_s``, and ``decode_s`` for each that runs."""

    def __init__(
        self, scheduler: ActorAddress, runs: int = 16, base_s: float = 0.02, decode_s: float = 0.0, **options: Any
    ) -> None:
        super().__init__(scheduler, step_s=base_s, **options)
        self.runs, self.base_s, self.decode_s = runs, base_s, decode_s
        self.orders: list[int] = []
        self.given: Counter[tuple[int, int]] = Counter()
        self.tokens = 0
        self.most_pending = 0

    @handles(Assign)
    async def assign(self, order: Assign) -> None:
        await super().assign(order)
        if order.min_policy_version <= self.version:
            self.given.update((work.prompt, sample.sibling) for work in order.work for sample in work.samples)
            self.most_pending = max(self.most_pending, len(self.held) - self.runs)

    @handles(Revoke)
    async def revoke(self, order: Revoke) -> None:
        """What is still held ends with ABORTED, behind its last token."""
        numbers = order.assignments.tolist()
        self.orders += numbers
        rows = [(number, self.held.pop(number)[2]) for number in numbers if number in self.held]
        if rows:
            self.say([(number, at, FinishReason.ABORTED, None) for number, at in rows], 0.0)

    @handles(Turn)
    async def turn(self, _: Turn) -> None:
        running = list(self.held.items())[: self.runs]
        self.step_s = self.base_s + self.decode_s * len(running)
        self.ctx.send_after(self.step_s, Turn())
        rows: list[tuple[int, int, int, int | None]] = []
        for number, (prompt, sibling, at, step) in running:
            end = at + 1 == length(prompt, sibling)
            rows.append((number, at, FinishReason.STOP if end else 0, token(prompt, sibling, at)))
            self.held[number] = (prompt, sibling, at + 1, step)
            if end:
                del self.held[number]
        self.tokens += len(rows)
        if rows:
            self.say(rows, self.step_s)

    def say(self, rows: list[tuple[int, int, int, int | None]], step_s: float) -> None:
        n, tokens = len(rows), [r[3] for r in rows if r[3] is not None]
        self.sequence += 1
        waiting = max(0, len(self.held) - self.runs)
        report = TokenReport.of(
            job="j", worker=self.ctx.self_address.name, term=self.term, sequence=self.sequence - 1,
            policy_version=self.version, assignments=np.array([r[0] for r in rows], np.int64),
            offsets=np.array([r[1] for r in rows], np.int32),
            counts=np.array([r[3] is not None for r in rows], np.int32),
            finished=np.array([r[2] for r in rows], np.uint8), tokens=np.array(tokens, np.int32),
            logprobs=np.zeros(len(tokens), np.float32),
            stats=EngineStats(running=min(len(self.held), self.runs), queued=waiting, step_s=step_s),
        )  # fmt: skip
        assert n
        self.ctx.ref(self.scheduler).tell(report)


def play(scenario: Callable[[World], Awaitable[None]], policy: str = "rlboost", **changes: Any) -> World:
    limits = QUICK | changes.pop("limits", {})
    scheduling = {"policy": policy} | changes.pop("scheduling", {})
    job = config(
        scheduling=scheduling, limits=limits, algorithm={"group_size": GROUP, "prompts_per_step": GROUPS},
        rollout={"max_tokens": 8, "max_running": 32}, **changes,
    )  # fmt: skip
    return play_in(World, job, scenario)


async def start(world: World, **options: Any) -> Batching:
    """Everything but further workers."""
    await world.start_head()
    await world.start_rewards()
    first = await add_worker(world, "first", **options)
    await world.start_trainer()
    return first


async def add_worker(world: World, name: str, **options: Any) -> Batching:
    worker = Batching(world.scheduler_at, slots=32, **options)
    await (await world.system(name)).spawn(name, worker)
    return worker


def check(world: World, steps: int) -> None:
    """Every sample of every step was trained, once."""
    names = [(s[0], s[1]) for step in range(steps) for s in world.trained[step]]
    assert names == [(p, s) for p in range(GROUPS * steps) for s in range(GROUP)]
    result = world.job.result()
    assert result["prompts_lost"] == 0 and result["samples_trained_twice"] == 0


def all_tokens(steps: int) -> int:
    return sum(length(p, s) for p in range(GROUPS * steps) for s in range(GROUP))


@pytest.mark.parametrize(("policy", "moved"), [("assign", False), ("rlboost", True)])
def test_what_an_engine_cannot_begin_goes_to_a_worker_that_comes_later(policy: str, moved: bool) -> None:
    async def scenario(world: World) -> None:
        first = await start(world, runs=4)
        await world.until(lambda: first.tokens > 6)
        later = await add_worker(world, "later", runs=4)
        assert await world.job.wait_over(60.0) == "finished"
        assert bool(first.orders) is moved
        assert first.tokens + later.tokens == all_tokens(1), "no token twice"

    check(play(scenario, policy, steps=1), steps=1)


def test_a_worker_is_given_few_more_than_its_engine_was_seen_to_run() -> None:
    """The first time nobody knows; from then on the cap holds."""

    async def scenario(world: World) -> None:
        first = await start(world, runs=4)
        await world.until(lambda: 0 in world.trained)
        first.most_pending = 0
        assert await world.job.wait_over(60.0) == "finished"
        assert first.most_pending == QUICK["pending_samples_max"]

    check(play(scenario, steps=3), steps=3)


def test_an_engine_that_has_become_able_to_run_more_is_given_more() -> None:
    async def scenario(world: World) -> None:
        first = await start(world, runs=2)
        await world.until(lambda: 0 in world.trained)
        first.runs, most = 24, 0
        while world.job.result()["steps"] != 3:
            most = max(most, len(first.held))
            await first.ctx.sleep(0.01)
        assert most > 2 + 2 * QUICK["pending_samples_max"]
        assert await world.job.wait_over(60.0) == "finished"

    check(play(scenario, steps=3), steps=3)


@pytest.mark.parametrize(("decode_s", "moved"), [(0.1, True), (0.0, False)])
def test_an_idle_worker_gets_what_another_runs_above_its_plateau(decode_s: float, moved: bool) -> None:
    """From the second step on: then small batches have been measured, too. Where a larger one always gives more there
    is no plateau, and what runs stays.
    """

    async def scenario(world: World) -> None:
        first = await start(world, runs=32, decode_s=decode_s)
        await world.until(lambda: first.tokens > all_tokens(1) + GROUPS * GROUP)
        later = await add_worker(world, "later", runs=32, decode_s=decode_s)
        assert await world.job.wait_over(60.0) == "finished"
        assert bool(first.orders) is moved
        assert first.tokens + later.tokens == all_tokens(2)

    check(play(scenario, steps=2), steps=2)


def test_with_relief_an_idle_worker_makes_a_step_shorter_below_the_plateau_too() -> None:
    """Larger batches always give more here, so that RLBoost's own rule moves nothing that runs."""
    ended_s: dict[bool, float] = {}

    def run(relief: bool) -> None:
        async def scenario(world: World) -> None:
            first = await start(world, runs=32, base_s=0.2, decode_s=0.02)
            await world.until(lambda: first.tokens > all_tokens(1) + GROUPS * GROUP)
            later = await add_worker(world, "later", runs=32, base_s=0.2, decode_s=0.02)
            assert await world.job.wait_over(60.0) == "finished"
            ended_s[relief] = first.ctx.now()
            assert bool(first.orders) is bool(later.tokens) is relief
            assert first.tokens + later.tokens == all_tokens(2), "no token twice"

        check(play(scenario, steps=2, scheduling={"relief": relief}), steps=2)

    run(relief=False)
    run(relief=True)
    assert ended_s[True] < ended_s[False]


def test_with_relief_workers_that_are_there_before_the_first_prompts_wait_for_them() -> None:
    """All are idle, and there is no batch."""

    async def scenario(world: World) -> None:
        await world.start_head()
        first, second = [await add_worker(world, name) for name in ("first", "second")]
        await world.start_trainer()
        await first.ctx.sleep(3.0)
        assert (first.version, second.version) == (0, 0)
        await world.start_rewards()
        assert await world.job.wait_over(60.0) == "finished"

    check(play(scenario, steps=2, scheduling={"relief": True}), steps=2)


def test_relief_moves_nothing_where_a_decode_step_takes_no_longer_for_more_sequences() -> None:
    async def scenario(world: World) -> None:
        first = await start(world, runs=32, base_s=0.3)
        await world.until(lambda: first.tokens > all_tokens(1) + GROUPS * GROUP)
        await add_worker(world, "later", runs=32, base_s=0.3)
        assert await world.job.wait_over(60.0) == "finished"
        assert first.orders == []

    check(play(scenario, steps=2, scheduling={"relief": True}), steps=2)


def test_while_the_job_is_paused_nothing_is_moved() -> None:
    async def scenario(world: World) -> None:
        first = await start(world, runs=4)
        await world.until(lambda: first.tokens > 6)
        pause = world.systems["head"].ref(world.scheduler_at)
        await pause.ask(SetPaused(job="j", paused=True), Acknowledged)
        await add_worker(world, "later", runs=4)
        await world.until(lambda: not first.held)
        assert first.orders == []
        await pause.ask(SetPaused(job="j", paused=False), Acknowledged)
        assert await world.job.wait_over(60.0) == "finished"

    check(play(scenario, steps=2), steps=2)


WORKERS = st.tuples(
    st.floats(0.0, 1.5),
    st.integers(1, 16),
    st.sampled_from([0.01, 0.03]),
    st.sampled_from([0.0, 0.02]),
    st.one_of(st.none(), st.floats(0.05, 1.0)),
)
"""When it comes, what it runs at once, its costs, and after how long it is killed."""


@settings(max_examples=20, phases=(Phase.explicit, Phase.reuse, Phase.generate))  # to shrink whole runs takes minutes
@given(
    st.lists(WORKERS, max_size=4),
    st.integers(1, 16),
    st.integers(1, 4),
    st.sampled_from(["sync", "dynamic", "async", "one_step_barrier"]),
    st.booleans(),
)
def test_whoever_comes_and_goes_nothing_is_generated_twice_ordered_twice_or_moved_for_ever(
    others: list[tuple[float, int, float, float, float | None]], runs: int, moves_max: int, mode: str, relief: bool
) -> None:
    fleet: list[Batching] = []
    kills = sum(other[-1] is not None for other in others)

    async def visit(world: World, i: int, at_s: float, runs: int, base_s: float, decode_s: float, stays_s: Any) -> None:
        ctx = fleet[0].ctx
        await ctx.sleep(at_s)
        fleet.append(await add_worker(world, f"w{i}", runs=runs, base_s=base_s, decode_s=decode_s))
        if stays_s is not None:
            await ctx.sleep(stays_s)
            world.kill(f"w{i}")

    async def scenario(world: World) -> None:
        fleet.append(await start(world, runs=runs))
        for i, other in enumerate(others):
            fleet[0].ctx.start_task(visit(world, i, *other), f"visit {i}")
        assert await world.job.wait_over(120.0) == "finished"

    limits = {"balance_moves_max": moves_max}
    check(play(scenario, steps=3, sync={"mode": mode}, limits=limits, scheduling={"relief": relief}), steps=3)
    staleness = 1 if mode in ("async", "one_step_barrier") else 0
    assert all(lag <= staleness for worker in fleet for lag in worker.versions), "no older version than the mode allows"
    if not staleness:
        assert all(lag == 0 for worker in fleet for lag in worker.versions), "on-policy: one version, the step's own"
    orders = [number for worker in fleet for number in worker.orders]
    assert len(orders) == len(set(orders)), "ordered twice"
    hand_outs: Counter[tuple[int, int]] = sum((worker.given for worker in fleet), Counter())
    assert max(hand_outs.values()) <= max(moves_max, 1) + kills, "moved for ever"
    if not kills:
        assert sum(worker.tokens for worker in fleet) == all_tokens(3), "generated twice"
