"""The supervisor with actors of its own process as children, on the in-memory transport."""

from __future__ import annotations

import asyncio
import dataclasses
from itertools import pairwise
from typing import Self

import pytest

from actors.core.actor import Actor, handles
from actors.core.context import Context
from actors.core.message import Message, message
from actors.core.system import ActorSystem
from configs.limits import Limits
from supervisors.tree.children import ChildSpec, Running, actor_child
from supervisors.tree.errors import ChildStartFailed, NoNode, SupervisorGaveUp
from supervisors.tree.restart_budget import ExitCause, RestartPolicy
from supervisors.tree.strategies import Strategy
from supervisors.tree.supervisor import SupervisionEvent, Supervisor
from transport.address import PeerId
from transport.errors import HeadraceError
from transport.memory_transport import MemoryNetwork, MemoryTransport

LIMITS = Limits(
    backoff_first_s=0.001, backoff_max_s=0.004, restart_max=3, restart_window_s=60.0, stop_timeout_s=2.0,
    unreachable_grace_s=0.2,
)  # fmt: skip


@message("supervisor_test.end")
class End(Message):
    how: str


class NoSuchModel(HeadraceError):
    permanent = True


class Worker(Actor):
    """Ends as told; writes its starts and stops into a common diary."""

    def __init__(self, name: str, diary: list[str]) -> None:
        self._name, self._diary = name, diary

    async def on_start(self) -> None:
        self._diary.append(f"+{self._name}")

    async def on_stop(self) -> None:
        self._diary.append(f"-{self._name}")

    @handles(End)
    async def end(self, message: End) -> None:
        if message.how == "crash":
            raise RuntimeError("told to crash")
        if message.how == "for good":
            raise NoSuchModel("model.path: nothing is there")
        self.ctx.stop(message.how)


class House:
    """A system with one supervisor and its diary."""

    def __init__(self, strategy: Strategy, names: str = "abc", *, limits: Limits = LIMITS, **options) -> None:
        self.diary: list[str] = []
        self.events: list[SupervisionEvent] = []
        self._arrival = asyncio.Event()
        self.options = options
        specs = [self.spec(name) for name in names]
        self.supervisor = Supervisor("fleet", strategy, specs, on_event=self._on_event, limits=limits)

    def spec(self, name: str) -> ChildSpec:
        options = {"restart": RestartPolicy.PERMANENT, **self.options.get(name, {})}
        return actor_child(name, lambda: Worker(name, self.diary), node="here", role="worker", **options)

    async def __aenter__(self) -> Self:
        transport = MemoryTransport(MemoryNetwork(), PeerId("here", 7))
        self.system = ActorSystem(transport, limits=LIMITS, seed=1)
        await self.system.start()
        self.ref = await self.system.spawn("fleet", self.supervisor)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.system.stop()

    def _on_event(self, event: SupervisionEvent) -> None:
        self.events.append(event)
        self._arrival.set()

    async def until(self, kind: str, child: str, count: int = 1) -> SupervisionEvent:
        async with asyncio.timeout(5):
            while True:
                found = [e for e in self.events if (e.kind, e.child) == (kind, child)]
                if len(found) >= count:
                    return found[-1]
                self._arrival.clear()
                await self._arrival.wait()

    def end(self, name: str, how: str = "crash") -> None:
        running = self.supervisor.running(name)
        assert running is not None
        self.system.ref(running.address).tell(End(how=how))


async def test_children_start_in_order_and_stop_in_reverse_order():
    async with House(Strategy.REST_FOR_ONE) as house:
        await house.supervisor.ready(5)
        assert house.diary == ["+a", "+b", "+c"]
    assert house.diary == ["+a", "+b", "+c", "-c", "-b", "-a"]


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (Strategy.ONE_FOR_ONE, ["-b", "+b"]),
        (Strategy.REST_FOR_ONE, ["-b", "-c", "+b", "+c"]),
        (Strategy.ONE_FOR_ALL, ["-b", "-c", "-a", "+a", "+b", "+c"]),
    ],
)
async def test_a_crash_restarts_what_the_strategy_says(strategy, expected):
    async with House(strategy) as house:
        await house.supervisor.ready(5)
        house.diary.clear()
        house.end("b")
        await house.until("exited", "b")
        await house.supervisor.ready(5)
        assert house.diary == expected
        states = {info.name: (info.state, info.restarts) for info in house.supervisor.snapshot()}
        assert states["b"] == ("running", 1)
        assert {state for state, _ in states.values()} == {"running"}


async def test_the_spent_budget_stops_all_children_and_escalates():
    async with House(Strategy.ONE_FOR_ONE) as house:
        await house.supervisor.ready(5)
        for count in range(2, LIMITS.restart_max + 2):
            house.end("b")
            await house.until("started", "b", count)
        house.end("b")
        end = await house.system.wait_stopped("fleet")
        assert isinstance(end.error, SupervisorGaveUp)
        assert "fleet gave up on b" in str(end.error) and "3 restarts in 60 s" in str(end.error)
        assert house.diary[-2:] == ["-c", "-a"]
        with pytest.raises(SupervisorGaveUp):
            await house.supervisor.ready(5)


async def test_preemptions_are_replaced_without_end_and_cost_no_budget():
    async with House(Strategy.ONE_FOR_ONE) as house:
        await house.supervisor.ready(5)
        for count in range(2, LIMITS.restart_max + 7):
            house.end("b", "preempted")
            await house.until("started", "b", count)
        assert house.supervisor.restarts == LIMITS.restart_max + 5


SLOW_LOOP = LIMITS.model_copy(update={"restart_window_s": 1e-6})
"""Limits under which no two failures are ever in one window, as with children that take long to start."""


async def test_a_crash_loop_ends_although_its_window_is_never_full():
    async with House(Strategy.ONE_FOR_ONE, limits=SLOW_LOOP) as house:
        await house.supervisor.ready(5)
        for count in range(2, LIMITS.restart_max + 2):
            house.end("b")
            await house.until("started", "b", count)
        house.end("b")
        end = await house.system.wait_stopped("fleet")
        assert (
            "gave up on b: it ended 4 times in a row without a step in between; last: RuntimeError: told to crash"
            in (str(end.error))
        )


async def test_a_child_that_fails_between_steps_is_in_no_crash_loop():
    async with House(Strategy.ONE_FOR_ONE, limits=SLOW_LOOP) as house:
        await house.supervisor.ready(5)
        for count in range(2, 3 * LIMITS.restart_max):
            house.end("b")
            await house.until("started", "b", count)
            house.supervisor.progressed()
        assert house.supervisor.restarts == 3 * LIMITS.restart_max - 2


async def test_children_that_crash_in_turn_are_in_no_loop_each():
    async with House(Strategy.ONE_FOR_ONE, limits=SLOW_LOOP) as house:
        await house.supervisor.ready(5)
        for count in range(2, LIMITS.restart_max + 2):
            for name in "abc":
                house.end(name)
                await house.until("started", name, count)


async def test_an_actor_that_meets_a_permanent_error_is_not_started_again():
    async with House(Strategy.REST_FOR_ONE) as house:
        await house.supervisor.ready(5)
        house.end("b", "for good")
        end = await house.system.wait_stopped("fleet")
        assert "gave up on b: NoSuchModel: model.path: nothing is there" in str(end.error)
        assert not [event for event in house.events if event.kind == "restarting"]
        assert house.diary.count("+b") == 1


async def test_an_actor_whose_start_meets_a_permanent_error_is_started_once():
    class Hopeless(Actor):
        async def on_start(self) -> None:
            tried.append(1)
            raise NoSuchModel("model.path: nothing is there")

    tried: list[int] = []
    supervisor = Supervisor("fleet", Strategy.ONE_FOR_ONE, [actor_child("x", Hopeless, node="here")])
    async with House(Strategy.ONE_FOR_ONE, "") as house:
        await house.system.spawn("other", supervisor)
        with pytest.raises(SupervisorGaveUp, match=r"NoSuchModel: model\.path: nothing is there"):
            await supervisor.ready(5)
    assert tried == [1]


async def test_a_child_without_a_node_for_it_waits_and_is_in_no_crash_loop():
    left = [LIMITS.restart_max + 2]
    async with House(Strategy.ONE_FOR_ONE, "", limits=SLOW_LOOP) as house:
        right = house.spec("a")

        async def start(context: Context) -> Running:
            if 0 < left[0] <= LIMITS.restart_max + 1:
                left[0] -= 1
                raise NoNode("no remote node for a within 600 s")
            left[0] -= 1
            return await right.start(context)

        house.supervisor.add_children([dataclasses.replace(right, start=start)])
        await house.until("started", "a")
        house.end("a")
        await house.until("started", "a", 2)


async def test_a_transient_child_that_completes_is_left_alone():
    async with House(Strategy.REST_FOR_ONE, a={"restart": RestartPolicy.TRANSIENT}) as house:
        await house.supervisor.ready(5)
        house.end("a", "completed")
        assert (await house.until("ended", "a")).cause is ExitCause.COMPLETED
        assert house.supervisor.running("b") is not None
        assert house.diary == ["+a", "+b", "+c", "-a"]


async def test_a_supervisor_that_has_ended_takes_no_more_children():
    async with House(Strategy.ONE_FOR_ONE, "a") as house:
        await house.supervisor.ready(5)
    house.supervisor.add_children([house.spec("late")])
    assert "+late" not in house.diary


async def test_children_come_and_go_while_siblings_run():
    async with House(Strategy.ONE_FOR_ONE, "ab") as house:
        await house.supervisor.ready(5)
        house.supervisor.add_children([house.spec("d")])
        await house.until("started", "d")
        assert house.supervisor.running("d").address.name == "d"
        with pytest.raises(ValueError, match="'d'"):
            house.supervisor.add_children([house.spec("d")])
        await house.supervisor.remove_child("a")
        await house.supervisor.remove_child("a")
        assert [info.name for info in house.supervisor.snapshot()] == ["b", "d"]
        assert house.diary == ["+a", "+b", "+d", "-a"]
        house.end("d")
        await house.until("started", "d", 2)


async def test_the_tree_can_be_looked_at():
    async with House(Strategy.ONE_FOR_ALL, "ab") as house:
        await house.supervisor.ready(5)
        assert [(c.name, c.role, c.node, c.state, c.incarnation) for c in house.supervisor.snapshot()] == [
            ("a", "worker", "here", "running", 7),
            ("b", "worker", "here", "running", 7),
        ]


async def test_a_child_that_never_becomes_ready_is_tried_three_times_and_the_reason_is_told():
    async def start(_) -> Running:
        raise OSError("no such model")

    supervisor = Supervisor("fleet", Strategy.ONE_FOR_ONE, [ChildSpec("x", start)])
    async with House(Strategy.ONE_FOR_ONE, "") as house:
        await house.system.spawn("other", supervisor)
        with pytest.raises(SupervisorGaveUp, match="3 starts in a row failed; last: no such model"):
            await supervisor.ready(5)


async def test_a_start_that_hangs_does_not_hold_up_the_shutdown():
    started = asyncio.Event()

    async def start(_) -> Running:
        started.set()
        await asyncio.Event().wait()
        raise AssertionError

    supervisor = Supervisor("fleet", Strategy.ONE_FOR_ONE, [ChildSpec("x", start)])
    async with House(Strategy.ONE_FOR_ONE, "") as house:
        await house.system.spawn("other", supervisor)
        await started.wait()
        async with asyncio.timeout(1):
            await supervisor.shutdown()
        assert supervisor.running("x") is None


async def test_nobody_waits_for_a_child_that_was_removed_as_its_start_failed():
    may_fail, may_start, failing = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async with House(Strategy.ONE_FOR_ONE, "") as house:
        right = house.spec("first")

        async def start_late(context: Context) -> Running:
            await may_start.wait()
            return await right.start(context)

        async def fail(_: Context) -> Running:
            failing.set()
            await may_fail.wait()
            raise OSError("no room")

        specs = [ChildSpec("first", start_late), ChildSpec("removed", fail)]
        supervisor = Supervisor("other", Strategy.ONE_FOR_ONE, specs, on_event=house._on_event, limits=LIMITS)
        await house.system.spawn("other", supervisor)
        await failing.wait()
        ready = asyncio.create_task(supervisor.ready(2))
        await asyncio.sleep(0)  # it has seen both children
        await supervisor.remove_child("removed")
        may_fail.set()
        await house.until("start_failed", "removed")
        may_start.set()
        await ready


async def test_two_crashes_at_once_under_one_for_all_end_in_one_full_set():
    async with House(Strategy.ONE_FOR_ALL) as house:
        await house.supervisor.ready(5)
        house.end("a")
        house.end("c")
        await house.until("exited", "a")
        await house.supervisor.ready(5)
        await house.supervisor.ready(5)
        assert {info.state for info in house.supervisor.snapshot()} == {"running"}
        for name in "abc":
            assert house.diary.count(f"+{name}") - house.diary.count(f"-{name}") == 1


async def test_starts_that_an_agent_does_not_answer_are_tried_again_after_a_pause_and_count_once_for_its_node():
    failures = LIMITS.restart_max + 2  # more than the budget allows, and than a child may fail to start
    assert failures >= LIMITS.start_attempts_max
    left = [failures]
    async with House(Strategy.ONE_FOR_ONE, "") as house:
        right = house.spec("a")

        async def start(context: Context) -> Running:
            if left[0]:
                left[0] -= 1
                raise ChildStartFailed("a", ExitCause.UNREACHABLE, "its node agent gave no answer", node="n")
            return await right.start(context)

        house.supervisor.add_children([dataclasses.replace(right, start=start)])
        await house.until("started", "a")
        tried_s = [event.at_s for event in house.events if event.kind in ("start_failed", "started")]
        pauses = [later - earlier for earlier, later in pairwise(tried_s)]
        assert len(pauses) == failures and min(pauses) >= 0.8 * LIMITS.backoff_first_s
