"""Functions are started as plans want them, prewarmed, given back, replaced, and billed to the second.

A scripted scheduler speaks; machines take 4 s from their order to a ready worker, unless a test has them fail.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from actors.protocol.job_news import GenerationEnded, StepPlanned, WorkerReleased, WorkerWoken
from supervisors.pool.functions import Functions
from supervisors.providers.function_book import FunctionBook, machines_of
from supervisors.tree.child_record import SupervisionEvent
from tests.simulated import run_simulated
from tests.smallest_job import smallest_job

START_S = 4.0
JOIN_S = 1.0
RULES = {"idle_s": 5.0, "bill_rounding_s": 10.0, "asleep_price": 0.25, "prewarm_buffer_s": 0.5}


def event(kind: str, worker: str) -> SupervisionEvent:
    return SupervisionEvent(kind, "rollout.j", worker, 0.0)


class Cloud:
    """It is in the place of provider, nodes, and elastic pool. ``broken``: machines that never come."""

    def __init__(
        self,
        former: str = "",
        *,
        workers: int = 0,
        least: int = 1,
        most: int = 3,
        back: tuple[str, ...] = (),
        **rules: float | None,
    ) -> None:
        """``back``: machines of a former life that have joined already."""
        self.loop = asyncio.get_running_loop()
        self.present: list[Any] = [SimpleNamespace(name=node, draining=False) for node in back]
        self.broken: Callable[[str], bool] = lambda node: False
        self.events: list[tuple[str, str, str]] = []
        self.said: list[str] = []
        self.book = former
        self._listeners: list[Callable[[], None]] = []
        self._begun: set[str] = set()
        job = smallest_job(
            steps=100,
            rollout={"max_tokens": 8, "workers": workers},
            scheduling={"policy": "planned", "workers_min": least, "workers_max": most},
            provider={"kind": "functions", **RULES, **rules},
            limits={"function_start_s": 20.0, "nodes_return_s": 10.0, "backoff_first_s": 2.0},
        )
        nodes: Any = SimpleNamespace(present=self.present, subscribe=self._subscribe)
        news: Any = SimpleNamespace(say=self._say, record=self._record)
        self.functions = Functions(job, nodes, news, now=self.loop.time, former=former)
        self.functions.ready()

    @property
    def states(self) -> dict[str, str]:
        book = FunctionBook.decode(self.functions._book.encode())
        return {function.node: function.state for function in book.there}

    def ended(self, why: str) -> list[str]:
        return [node for name, node, reason in self.events if name == "function_ended" and reason == why]

    def lose(self, node: str) -> None:
        self.present[:] = [there for there in self.present if there.name != node]
        self._tell()

    def join(self, node: str) -> None:
        self.present.append(SimpleNamespace(name=node, draining=False))
        self._tell()

    def plan(self, *workers: str, more: int = 0) -> None:
        self.functions.worker_news(StepPlanned(job="j", step=0, workers=list(workers), more=more))

    def release(self, *workers: str) -> None:
        for worker in workers:
            self.functions.worker_news(WorkerReleased(job="j", worker=worker, step=0))

    def end_generation(self, step: int = 0) -> None:
        self.functions.worker_news(GenerationEnded(job="j", step=step))

    def _subscribe(self, listener: Callable[[], None]) -> Callable[[], None]:
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def _tell(self) -> None:
        for listener in self._listeners:
            listener()

    def _record(self, name: str, **fields: Any) -> None:
        self.events.append((name, str(fields["node"]), str(fields.get("why", ""))))

    def _say(self, functions: str = "", message: str = "") -> None:
        if message:
            self.said.append(message)
            return
        self.book, wanted = functions, machines_of(functions)
        for node in wanted:
            if node not in self._begun:
                self._begun.add(node)
                self.loop.create_task(self._bring_up(node))
        for node in [there.name for there in self.present if there.name not in wanted]:
            self.loop.call_soon(self.lose, node)

    async def _bring_up(self, node: str) -> None:
        await asyncio.sleep(JOIN_S)
        if self.broken(node) or node not in machines_of(self.book):
            return
        self.join(node)
        await asyncio.sleep(START_S - JOIN_S)
        self.functions.child_event(event("started", f"rollout-{node}"))


def played(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run_simulated(scene())


def test_before_any_plan_all_are_started_and_the_plan_gives_back_those_that_it_does_without() -> None:
    async def scene() -> None:
        cloud = Cloud()
        await asyncio.sleep(START_S + 1)
        assert cloud.states == dict.fromkeys(["f0", "f1", "f2"], "awake")
        cloud.plan("rollout-f0", "rollout-f2")
        assert cloud.states == {"f0": "awake", "f1": "asleep", "f2": "awake"}
        await asyncio.sleep(RULES["idle_s"] + 1)
        assert cloud.ended("idle") == ["f1"]
        assert cloud.states == {"f0": "awake", "f2": "awake"}

    played(scene)


def test_a_plan_has_more_started_once_and_those_that_start_for_nothing_are_given_up() -> None:
    async def scene() -> None:
        cloud = Cloud(most=5)
        await asyncio.sleep(2)
        cloud.plan("rollout-f0", more=2)
        assert sorted(cloud.states) == ["f0", "f1", "f2"], "they start already; the others are not wanted"
        assert sorted(cloud.ended("not wanted")) == ["f3", "f4"]
        cloud.plan("rollout-f0", more=4)
        assert sorted(cloud.states) == ["f0", "f1", "f2", "f5", "f6"]
        cloud.plan("rollout-f0", more=9)
        assert len(cloud.states) == 5, "workers_max bounds them"

    played(scene)


async def steps(cloud: Cloud, gap_s: float, *, count: int = 4) -> list[int]:
    """So many steps of 10 s, each planned for two functions; how many of these were awake or asleep at each plan."""
    ready: list[int] = []
    for _ in range(count):
        there = [f"rollout-{node}" for node, state in cloud.states.items() if state != "starting"]
        ready.append(len(there[:2]))
        cloud.plan(*there[:2], more=2 - len(there[:2]))
        await asyncio.sleep(10.0)
        cloud.release(*(f"rollout-{node}" for node in cloud.states))
        cloud.end_generation()
        await asyncio.sleep(gap_s)
    return ready


def test_functions_given_back_between_steps_are_started_again_in_time_for_the_next_plan() -> None:
    async def scene() -> None:
        cloud = Cloud()
        await asyncio.sleep(START_S + 1)
        ready = await steps(cloud, gap_s=30.0)
        assert ready == [2, 1, 2, 2], "the first gap is not known yet; workers_min stays; then all are in time"
        ordered = [node for name, node, _ in cloud.events if name == "function_ordered"]
        assert len(ordered) == 3 + 1 + 3, "three at first, one that the second plan lacked, one for each further gap"
        starts = cloud.functions._starts_s
        assert set(starts) == {START_S}

    played(scene)


def test_one_that_would_be_started_again_at_once_is_kept_asleep() -> None:
    async def scene() -> None:
        cloud = Cloud()
        await asyncio.sleep(START_S + 1)
        await steps(cloud, gap_s=7.0)
        ordered = [node for name, node, _ in cloud.events if name == "function_ordered"]
        assert len(ordered) <= 3 + 1, "only in the first gap, whose length nobody knows, was one given back too early"

    played(scene)


def test_without_idle_s_a_function_sleeps_until_that_has_cost_what_another_start_would() -> None:
    async def scene() -> None:
        cloud = Cloud(idle_s=None)
        await asyncio.sleep(START_S + 1)
        cloud.plan("rollout-f0")
        await asyncio.sleep(START_S / RULES["asleep_price"] - 1)
        assert not cloud.ended("idle")
        await asyncio.sleep(2.0)
        assert sorted(cloud.ended("idle")) == ["f1", "f2"]

    played(scene)


def test_in_a_job_that_plans_no_step_any_more_all_but_workers_min_are_given_back() -> None:
    async def scene() -> None:
        cloud = Cloud()
        await asyncio.sleep(START_S + 1)
        await steps(cloud, gap_s=7.0)
        await asyncio.sleep(60.0)
        assert list(cloud.states.values()) == ["asleep"]

    played(scene)


def test_one_that_is_not_ready_in_time_is_given_up_and_said_and_others_are_tried_ever_more_slowly() -> None:
    async def scene() -> None:
        cloud = Cloud(most=1)
        cloud.broken = lambda node: node in ("f0", "f1")
        began_s = cloud.loop.time()
        await asyncio.sleep(21.0)
        assert cloud.events[1:3] == [("function_ended", "f0", "is not ready in time"),
                                     ("function_missing", "f0", "is not ready in time")]  # fmt: skip
        assert cloud.said == ["the function f0 is not ready in time: going on with 0"]
        while cloud.states.get("f2") != "awake":
            await asyncio.sleep(0.1)
        lasted_s = cloud.loop.time() - began_s
        assert lasted_s == pytest.approx(20 + 2 + 20 + 4 + START_S, abs=1.5), "pauses of 2 s, then of 4 s"

    played(scene)


def test_a_lost_function_is_replaced_while_the_step_lacks_it_and_one_that_slept_is_not() -> None:
    async def scene() -> None:
        cloud = Cloud()
        await asyncio.sleep(START_S + 1)
        cloud.plan("rollout-f0", "rollout-f1", "rollout-f2")
        cloud.release("rollout-f1")
        cloud.lose("f1")
        await asyncio.sleep(3.0)
        assert sorted(cloud.states) == ["f0", "f2"]
        cloud.lose("f2")
        await asyncio.sleep(3.0)
        assert cloud.states == {"f0": "awake", "f3": "starting"}
        assert [node for name, node, _ in cloud.events if name == "function_missing"] == ["f1", "f2"]

    played(scene)


def test_the_bill_is_from_order_to_end_rounded_up_with_sleep_at_its_price_and_the_compute_only_one_beside_it() -> None:
    async def scene() -> None:
        cloud = Cloud(most=2)
        await asyncio.sleep(5.0)  # 4 starting, 1 awake
        cloud.plan("rollout-f0")  # f1 sleeps from now on, and is given back after 5 s
        await asyncio.sleep(3.0)
        row = cloud.functions.take_bill()
        assert row["billed_worker_s"] == pytest.approx(2 * 5 + 3 + 3 * 0.25)
        assert row["compute_worker_s"] == pytest.approx(3.0)
        assert row["functions_started"] == 2
        assert row["functions_cold_s"] == pytest.approx(2 * START_S)
        await asyncio.sleep(4.0)
        assert cloud.ended("idle") == ["f1"]
        row = cloud.functions.take_bill()
        slept_s = 5.0 - 3.0
        of_f1 = 20.0 - 10.0  # it lived for 10 s and a look, which is billed as 20
        assert 4.0 + slept_s * 0.25 <= row["billed_worker_s"] <= 4.0 + of_f1 + 1.0
        assert row["compute_worker_s"] == pytest.approx(4.0)
        cloud.release("rollout-f0")
        await asyncio.sleep(8.0)
        assert cloud.functions.take_bill()["billed_worker_s"] == pytest.approx(8.0 * 0.25), "workers_min sleeps on"

    played(scene)


def test_woken_functions_work_and_their_workers_that_crash_start_on_the_same_machine() -> None:
    async def scene() -> None:
        cloud = Cloud(most=1)
        await asyncio.sleep(START_S + 1)
        cloud.plan("rollout-f0")
        cloud.release("rollout-f0")
        await asyncio.sleep(2.0)
        cloud.functions.worker_news(WorkerWoken(job="j", worker="rollout-f0", step=0))
        assert cloud.states == {"f0": "awake"}
        await asyncio.sleep(3.0)
        cloud.functions.child_event(event("exited", "rollout-f0"))
        assert cloud.states == {"f0": "starting"}
        await asyncio.sleep(1.0)
        cloud.functions.child_event(event("started", "rollout-f0"))
        await asyncio.sleep(1.0)
        assert cloud.states == {"f0": "awake"}
        assert cloud.functions.take_bill()["compute_worker_s"] == pytest.approx(3.0 + 1.0)

    played(scene)


def test_the_next_life_of_the_head_goes_on_with_those_that_come_back_and_bills_each_second_once() -> None:
    async def scene() -> None:
        first = Cloud()
        await asyncio.sleep(START_S + 1)
        first.plan("rollout-f0", "rollout-f1")
        billed_s = first.functions.take_bill()["billed_worker_s"]
        first.functions.stop()
        await asyncio.sleep(3.0)  # nobody is there
        second = Cloud(first.book)
        second.join("f0")
        second.functions.child_event(event("adopted", "rollout-f0"))
        second.join("f2")
        await asyncio.sleep(1.0)
        assert second.states == {"f0": "awake", "f1": "awake", "f2": "asleep"}
        second.plan("rollout-f0", more=1)
        assert sorted(second.states) == ["f0", "f1", "f2", "f3"][:3], "f1 may still come, and workers_max is 3"
        await asyncio.sleep(10.0)
        assert "f1" in second.ended("idle"), "it has not come back, and the plan does without it"
        assert "f3" in second.states, "a name that is new"
        billed_s += second.functions.take_bill()["billed_worker_s"]
        now = second.loop.time()
        most_s = 3 * now + 20.0 + 20.0
        assert now < billed_s < most_s

    played(scene)


def test_a_life_of_the_head_keeps_functions_that_are_back_before_it_looks_and_those_it_adopts_as_they_start() -> None:
    async def scene() -> None:
        first = Cloud(most=2)
        await asyncio.sleep(JOIN_S + 1)
        first.functions.stop()
        second = Cloud(first.book, most=2, back=("f0", "f1"))
        second.functions.child_event(event("adopted", "rollout-f0"))
        second.functions.child_event(event("adopted", "rollout-f1"))
        assert second.states == {"f0": "awake", "f1": "awake"}
        await asyncio.sleep(30.0)
        assert second.states == {"f0": "awake", "f1": "awake"} and not second.said

    played(scene)


def test_the_next_life_of_the_head_knows_who_sleeps() -> None:
    async def scene() -> None:
        first = Cloud()
        await asyncio.sleep(START_S + 1)
        first.plan("rollout-f0", "rollout-f1", "rollout-f2")
        first.release("rollout-f1")
        first.functions.child_event(event("exited", "rollout-f2"))
        states = {function.node: function.state for function in FunctionBook.decode(first.book).there}
        assert states == {"f0": "awake", "f1": "asleep", "f2": "starting"}

    played(scene)


def test_one_that_was_woken_again_is_replaced_if_it_is_lost_and_its_restart_counts_as_no_start() -> None:
    async def scene() -> None:
        cloud = Cloud(most=3)
        await asyncio.sleep(START_S + 1)
        cloud.plan("rollout-f0")
        cloud.functions.child_event(event("exited", "rollout-f0"))
        await asyncio.sleep(1.0)
        cloud.functions.child_event(event("started", "rollout-f0"))
        assert set(cloud.functions._starts_s) == {START_S}
        cloud.release("rollout-f0")
        cloud.functions.worker_news(WorkerWoken(job="j", worker="rollout-f0", step=0))
        await asyncio.sleep(1.0)
        cloud.lose("f0")
        await asyncio.sleep(1.0)
        assert cloud.states.get("f3") == "starting"

    played(scene)


def test_after_the_last_step_none_is_started() -> None:
    async def scene() -> None:
        cloud = Cloud()
        await asyncio.sleep(START_S + 1)
        await steps(cloud, gap_s=30.0)
        ordered = [node for name, node, _ in cloud.events if name == "function_ordered"]
        there = [f"rollout-{node}" for node in cloud.states]
        cloud.plan(*there)
        cloud.release(*there)
        cloud.end_generation(step=99)
        await asyncio.sleep(60.0)
        assert [node for name, node, _ in cloud.events if name == "function_ordered"] == ordered

    played(scene)
