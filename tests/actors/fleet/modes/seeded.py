"""A job with a seeding window for tests: a worker beside the trainer, others, and a trainer that sees who is awake."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from actors.core.actor import handles
from actors.protocol.groups import GrantGroups
from actors.protocol.work import Assign, Revoke, SetAsleep
from actors.protocol.workers import WorkerAsleep
from tests.actors.fleet.modes.test_balanced import Batching
from tests.actors.scheduler_world import FakeTrainer, World, config, length, play_in
from transport.address import ActorAddress

GROUPS, GROUP, TOKENS = 6, 4, 8
STEP_S = 0.1
"""A token of each sample that runs takes this long."""
FIRST_S = 0.35
"""Of the first window with remote workers: three to four tokens."""


class Local(Batching):
    """A worker beside the trainer; it says that it is asleep ``falls_asleep_s`` after it was told, if at all."""

    def __init__(
        self, scheduler: ActorAddress, falls_asleep_s: float | None = 0.02, wakes_s: float = 0.0, **options: Any
    ) -> None:
        super().__init__(scheduler, **options)
        self.beside_trainer = True
        self.falls_asleep_s, self.wakes_s = falls_asleep_s, wakes_s
        self.asleep = False
        self.told: list[bool] = []

    @handles(SetAsleep)
    async def set_asleep(self, order: SetAsleep) -> None:
        self.told.append(order.asleep)
        if not order.asleep:
            await self.ctx.sleep(self.wakes_s)
            self.asleep = False
        elif self.falls_asleep_s is None:
            return
        else:
            assert not self.held, "it is told to end what it holds before it is told to sleep"
            await self.ctx.sleep(self.falls_asleep_s)
            self.asleep = True
        news = WorkerAsleep(job="j", worker=self.ctx.self_address.name, asleep=order.asleep)
        self.ctx.ref(self.scheduler).tell(news)

    @handles(Revoke)
    async def revoke(self, order: Revoke) -> None:
        """Also of what has come ahead of its version."""
        for work in (work for ahead in self.ahead for work in ahead.work):
            self.held |= {s.assignment: (work.prompt, s.sibling, len(s.generated), work.step) for s in work.samples}
        self.ahead = []
        await super().revoke(order)

    @handles(Assign)
    async def assign(self, order: Assign) -> None:
        assert not self.told or not self.told[-1], "one that was told to sleep is given work"
        await super().assign(order)


class Trainer(FakeTrainer):
    """Notes which local workers were awake whenever it was given groups."""

    locals: tuple[Local, ...] = ()

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.given: list[tuple[int, float, list[bool]]] = []

    @handles(GrantGroups)
    async def lease(self, message: GrantGroups) -> None:
        self.given.append((message.step, self.ctx.now(), [not local.asleep for local in self.locals]))
        await super().lease(message)

    @property
    def met_nobody_awake(self) -> bool:
        return not any(any(awake) for _, _, awake in self.given)


class Seeded(World):
    """One worker beside the trainer, and others that come when the test wants them."""

    async def begin(self, *, remote: int = 0, local: dict[str, Any] | None = None, step: int = 0) -> None:
        await self.start_head()
        await self.start_rewards()
        self.local = await self.add(Local, "rollout-0", **(local or {}))
        self.remote = [await self.add(Batching, f"remote-{i}") for i in range(remote)]
        self.trainer = await self.begin_training(step)

    async def add(self, kind: Callable[..., Any], name: str, **options: Any) -> Any:
        worker = kind(self.scheduler_at, slots=32, **{"runs": 32, "base_s": STEP_S} | options)
        await (await self.system(name)).spawn(name, worker)
        return worker

    async def begin_training(self, step: int = 0) -> Trainer:
        trainer = Trainer(self.scheduler_at, step, self.trained, self.config.steps)
        trainer.locals = (self.local,)
        await (await self.system("trainer")).spawn("trainer", trainer)
        return trainer

    async def finished(self) -> None:
        assert await self.job.wait_over(120.0) == "finished"

    def rows(self) -> list[dict[str, Any]]:
        return [event.fields for event in self.events if event.kind == "step"]


def windows(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == "seeding_window"]


def play(scenario: Callable[[Seeded], Awaitable[None]], steps: int, **changes: Any) -> Seeded:
    """Every sample of every step is trained once."""
    scheduling = {"seeding": True, "seeding_first_s": FIRST_S, "seeding_floor_s": 0.1} | changes.pop("scheduling", {})
    limits = {"scheduler_tick_s": 0.05} | changes.pop("limits", {})
    job = config(
        steps=steps, scheduling=scheduling, limits=limits, cluster={"place_rollout": "elastic"},
        algorithm={"group_size": GROUP, "prompts_per_step": GROUPS},
        rollout={"max_tokens": TOKENS, "max_running": 32, "workers": 1} | changes.pop("rollout", {}), **changes,
    )  # fmt: skip
    world = play_in(Seeded, job, scenario)
    names = [(s[0], s[1]) for step in range(steps) for s in world.trained[step]]
    assert names == [(p, s) for p in range(GROUPS * steps) for s in range(GROUP)]
    result = world.job.result()
    assert result["prompts_lost"] == 0 and result["samples_trained_twice"] == 0
    return world


def all_tokens(steps: int) -> int:
    return sum(length(p, s) for p in range(GROUPS * steps) for s in range(GROUP))
