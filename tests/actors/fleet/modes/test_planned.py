"""Planned generation: a real scheduler, workers that sleep and wake, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from actors.policies.planning.cut import Cut, CutView
from actors.policies.planning.step_plan import PlanView
from actors.protocol.batches import SetPaused
from actors.protocol.failures import Acknowledged
from actors.protocol.job_news import GenerationEnded, StepPlanned, WorkerWoken
from tests.actors.fleet.modes.planned_world import GROUP, GROUPS, PlannedWorld, planned_as, play
from tests.actors.fleet.modes.seeded import all_tokens


def test_each_worker_generates_its_part_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    planned_as(monkeypatch, [3, 2, 1])

    async def scenario(world: PlannedWorld) -> None:
        await world.begin()
        await world.finished()

    world = play(scenario)
    given = [{prompt for prompt, _ in worker.given} for worker in world.locals]
    assert [[p % GROUPS for p in sorted(prompts)] for prompts in given] == [[0, 1, 2] * 3, [3, 4] * 3, [5] * 3]


def test_who_is_left_out_sleeps_through_the_step_and_pulls_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    planned_as(monkeypatch, [4, 2])

    async def scenario(world: PlannedWorld) -> None:
        await world.begin()
        await world.finished()

    world = play(scenario, steps=4)
    out = world.locals[2]
    assert out.told == [True] and not out.given and out.version <= 0
    assert [row["plan_workers"] for row in world.rows()] == [2, 2, 2, 2]


def test_who_is_done_sleeps_and_is_woken_for_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    planned_as(monkeypatch, [3, 2, 1])

    async def scenario(world: PlannedWorld) -> None:
        await world.begin(wakes_s=0.3)
        await world.finished()

    world = play(scenario)
    assert all(worker.told == [True, False, True, False, True] for worker in world.locals)
    waits_s = [row["plan_wake_s"] for row in world.rows()]
    assert waits_s[0] == 0 and waits_s[1] >= 0.3, "the first are awake; the next have to wake"
    assert waits_s[2] < 0.3, "who took so long is woken ahead, once it is known how long training takes"
    ends = [news for news in world.worker_news if isinstance(news, StepPlanned | GenerationEnded)]
    assert [(type(news).__name__, news.step) for news in ends] == [
        (name, step) for step in range(3) for name in ("StepPlanned", "GenerationEnded")
    ]
    first = next(news for news in ends if isinstance(news, StepPlanned))
    assert first.workers == ["rollout-0", "rollout-1", "rollout-2"] and first.more == 0


def test_the_part_of_a_dead_worker_is_anybodys(monkeypatch: pytest.MonkeyPatch) -> None:
    planned_as(monkeypatch, [3, 3, 0])

    async def scenario(world: PlannedWorld) -> None:
        await world.begin()
        await world.until(lambda: world.locals[0].tokens >= 2 * GROUP)
        world.kill("rollout-0")
        await world.finished()

    world = play(scenario)
    assert world.locals[1].assigned + world.locals[2].assigned > 3 * GROUPS * GROUP - world.locals[0].assigned


def test_sleepers_are_woken_if_everybody_who_was_planned_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    planned_as(monkeypatch, [6])

    async def scenario(world: PlannedWorld) -> None:
        await world.begin(slots=12)
        await world.until(lambda: world.locals[0].tokens >= GROUP and world.locals[2].told == [True])
        world.kill("rollout-0")
        await world.finished()

    world = play(scenario, steps=1, rollout={"max_running": 12})
    woken = [worker.told[:2] for worker in world.locals[1:]]
    assert woken == [[True, False], [True, False]], "one alone has no room for all"


def test_a_worker_that_comes_late_takes_what_nobody_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    planned_as(monkeypatch, [6])

    async def scenario(world: PlannedWorld) -> None:
        await world.begin(workers=1, slots=4)
        await world.until(lambda: world.locals[0].tokens >= 1)
        world.locals.append(await world.add("late", slots=4))
        await world.finished()

    world = play(scenario, steps=1, rollout={"max_running": 4, "workers": 1})
    assert world.locals[1].given


def test_the_first_plan_waits_for_the_jobs_own_workers_and_no_longer_than_it_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned_as(monkeypatch, [3, 3])

    async def scenario(world: PlannedWorld) -> None:
        await world.begin(workers=1)
        await world.until(lambda: world.trainer.step == 0 and world.systems["head"] is not None, 1.0)
        world.locals.append(await world.add("rollout-1"))
        await world.finished()

    world = play(scenario, steps=1, limits={"plan_patience_s": 2.0})
    first = next(news for news in world.worker_news if isinstance(news, StepPlanned))
    assert first.workers == ["rollout-0", "rollout-1"]


def test_while_the_job_is_paused_nothing_is_planned_and_who_generates_nothing_sleeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned_as(monkeypatch, [3, 2, 1])

    async def scenario(world: PlannedWorld) -> None:
        async def pause(paused: bool) -> None:
            scheduler = world.systems["head"].ref(world.scheduler_at)
            await scheduler.ask(SetPaused(job="j", paused=paused), Acknowledged)

        def planned() -> list[int]:
            return [news.step for news in world.worker_news if isinstance(news, StepPlanned)]

        await world.begin(slots=4)
        await world.until(lambda: world.locals[0].tokens >= 1)
        await pause(True)  # in the middle of a step
        await asyncio.sleep(5.0)
        assert [worker.told for worker in world.locals] == [[True]] * 3
        assert len({s for worker in world.locals for s in worker.given}) < GROUPS * GROUP
        await pause(False)
        await world.until(lambda: any(isinstance(news, GenerationEnded) for news in world.worker_news))
        await pause(True)  # between two
        await asyncio.sleep(5.0)
        assert planned() == [0] and all(worker.told[-1] for worker in world.locals)
        await pause(False)
        await world.finished()

    play(scenario, steps=2, rollout={"max_running": 4})


def test_a_later_life_counts_the_functions_that_come_back_before_it_plans_new_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned_as(monkeypatch, [3, 3])

    async def scenario(world: PlannedWorld) -> None:
        await world.begin(slots=4)
        await world.until(lambda: world.locals[0].tokens >= 1)
        for name in ("head", "rewards", "trainer", *(f"rollout-{i}" for i in range(3))):
            world.kill(name)
        world.worker_news.clear()
        await world.start_head()
        for i in range(2):  # lives that were known to the scheduler before
            await asyncio.sleep(0.5)
            await world.add(f"rollout-{i}", slots=4, again=True)
        await world.start_rewards()
        await world.start_trainer()
        await world.finished()

    world = play(scenario, steps=1, rollout={"max_running": 4}, provider={"kind": "functions"})
    plans = [news for news in world.worker_news if isinstance(news, StepPlanned)]
    assert [(len(plan.workers), plan.more) for plan in plans] == [(2, 0)]
    first = [news.worker for news in world.worker_news[:2] if isinstance(news, WorkerWoken)]
    assert first == ["rollout-0", "rollout-1"], "what they were told is not known: they are woken, and that is said"


# ------------------------------------------------------------ cuts


def handing_over(source: str, target: str, views: list[CutView]) -> Callable[[CutView], list[Cut]]:
    """One worker hands the rest over as soon as it has finished a quarter, as the policy would."""

    def decide(view: CutView) -> list[Cut]:
        views.append(view)
        found = {one.name: one for one in view.workers}
        a = found.get(source)
        ripe = a is not None and target in found and a.done >= a.assigned / 4 and a.movable == a.assigned - a.done > 0
        return [Cut(source, target, a.movable)] if a is not None and ripe else []

    return decide


def cut_world(
    monkeypatch: pytest.MonkeyPatch,
    scenario: Callable[[PlannedWorld], Awaitable[None]],
    views: list[CutView],
    **of_job: Any,
) -> PlannedWorld:
    planned_as(monkeypatch, [4, 2], handing_over("rollout-1", "rollout-0", views))
    return play(scenario, **{"steps": 2} | of_job)


def test_what_is_left_of_a_part_goes_on_elsewhere_behind_its_last_token_and_its_worker_sleeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    views: list[CutView] = []

    async def scenario(world: PlannedWorld) -> None:
        await world.begin()
        await world.finished()

    world = cut_world(monkeypatch, scenario, views)
    source, target = world.locals[1], world.locals[0]
    assert source.orders and len(source.orders) == sum(row["plan_cut_samples"] for row in world.rows())
    assert source.assigned == 2 * 2 * GROUP and target.assigned == 2 * 4 * GROUP + len(source.orders)
    assert source.told[0] and sum(source.told) == 2, "it sleeps once it has handed over"
    assert source.tokens + target.tokens == all_tokens(2), "a token was generated twice"
    assert [[one.name for one in view.workers if one.holds_longest] for view in views if view.workers] == [
        ["rollout-0"]
    ] * len(views)


def test_a_worker_that_dies_while_it_is_being_cut_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(world: PlannedWorld) -> None:
        await world.begin()
        world.locals[1].when_cut = lambda: world.kill("rollout-1")
        await world.finished()

    world = cut_world(monkeypatch, scenario, [])
    assert "rollout-1" not in world.systems


def test_the_target_of_a_cut_may_die_before_it_has_got_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(world: PlannedWorld) -> None:
        await world.begin()
        world.locals[1].when_cut = lambda: world.kill("rollout-0")
        await world.finished()

    world = cut_world(monkeypatch, scenario, [])
    assert "rollout-0" not in world.systems


# ------------------------------------------------------------ lengths


def test_a_plan_goes_by_reference_answers_first_and_then_by_the_newest_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompts of the second step are those of the first, and their answers are of random length."""
    views: list[PlanView] = []
    planned_as(monkeypatch, [3, 3], views=views)
    answers = [9, 2, 4, 8, 6, -1]

    async def scenario(world: PlannedWorld) -> None:
        await world.start_head()
        rewards = await world.start_rewards()
        rewards.answers = answers
        world.locals = [await world.add(f"rollout-{i}") for i in range(3)]
        await world.start_trainer()
        await world.finished()

    world = play(scenario, steps=2)
    assert views[0].expected_tokens.tolist() == [9, 2, 4, 8, 6, 2], "the last has none, and a prompt of two tokens"
    lengths = [[len(s[2]) for s in world.trained[0] if s[0] == prompt] for prompt in range(GROUPS)]
    assert views[1].expected_tokens.tolist() == [sum(of_prompt) / GROUP for of_prompt in lengths]
