"""A job with planned steps for tests: workers that sleep and wake, and a plan that the test may make itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from actors.core.actor import handles
from actors.policies.planning import cut, step_plan
from actors.policies.planning.cut import Cut, CutView
from actors.policies.planning.step_plan import Forecast, PlanView, StepPlan
from actors.protocol.work import Revoke
from tests.actors.fleet.modes.seeded import Local
from tests.actors.scheduler_world import World, config, play_in

GROUPS, GROUP, TOKENS = 6, 4, 8


class Sleeper(Local):
    """A worker anywhere; ``when_cut`` is called as it is told to end samples."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.beside_trainer = False
        self.when_cut: Callable[[], None] = lambda: None

    @handles(Revoke)
    async def revoke(self, order: Revoke) -> None:
        self.when_cut()
        await super().revoke(order)


class PlannedWorld(World):
    """Workers of any number, all of which sleep and wake as they are told."""

    async def begin(self, workers: int = 3, **options: Any) -> None:
        await self.start_head()
        await self.start_rewards()
        self.locals = [await self.add(f"rollout-{i}", **options) for i in range(workers)]
        self.trainer = await self.start_trainer()

    async def add(self, name: str, *, again: bool = False, **options: Any) -> Sleeper:
        given = {"slots": 32, "runs": 32, "base_s": 0.1, "falls_asleep_s": 0.02} | options
        worker = Sleeper(self.scheduler_at, **given)
        worker.again = again
        await (await self.system(name)).spawn(name, worker)
        return worker

    async def finished(self) -> None:
        assert await self.job.wait_over(300.0) == "finished"

    def rows(self) -> list[dict[str, Any]]:
        return [event.fields for event in self.events if event.kind == "step"]


def play(scenario: Callable[[PlannedWorld], Awaitable[None]], steps: int = 3, **changes: Any) -> PlannedWorld:
    """Every sample of every step is trained once."""
    scheduling = {"policy": "planned", "workers_max": 3} | changes.pop("scheduling", {})
    limits = {"scheduler_tick_s": 0.05, "balance_interval_s": 0.02} | changes.pop("limits", {})
    rollout = {"max_tokens": TOKENS, "max_running": 32, "workers": 3, "length_ranking": "history"}
    job = config(
        steps=steps, scheduling=scheduling, limits=limits, sync=changes.pop("sync", {"mode": "sync"}),
        algorithm={"group_size": GROUP, "prompts_per_step": GROUPS},
        rollout=rollout | changes.pop("rollout", {}), **changes,
    )  # fmt: skip
    world = play_in(PlannedWorld, job, scenario)
    names = [(s[0], s[1]) for step in range(steps) for s in world.trained[step]]
    assert names == [(p, s) for p in range(GROUPS * steps) for s in range(GROUP)]
    result = world.job.result()
    assert result["prompts_lost"] == 0 and result["samples_trained_twice"] == 0
    return world


def planned_as(
    monkeypatch: pytest.MonkeyPatch,
    shares: list[int],
    cuts: Callable[[CutView], list[Cut]] = lambda _: [],
    views: list[PlanView] | None = None,
) -> None:
    """Each step's prompts, in order, in parts of these sizes for the workers in the order in which they are offered."""

    def decide(view: PlanView, now: float) -> StepPlan:
        if views is not None:
            views.append(view)
        bounds = np.cumsum([0, *shares])
        bounds[-1] = len(view.siblings)
        parts = {
            worker.name: np.arange(min(begin, len(view.siblings)), min(end, len(view.siblings)))
            for worker, begin, end in zip(view.workers, bounds[:-1].tolist(), bounds[1:].tolist(), strict=False)
        }
        forecast = Forecast(len(parts), 1.0, 2.0, 0.25)
        return StepPlan(parts, dict.fromkeys(parts, 1.0), forecast, [forecast], "the test says so")

    monkeypatch.setattr(step_plan, "decide", decide)
    monkeypatch.setattr(cut, "decide", lambda view, now: cuts(view))
