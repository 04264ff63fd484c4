"""What every mode of a fleet keeps to, and that another one is a class and a line of ``MODES``, and nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from actors.fleet import fleet
from actors.fleet.length_ranking import LengthRanking
from actors.fleet.modes.make import MODES, make_mode
from actors.fleet.modes.mode import Mode
from actors.fleet.modes.rests import EngineRests
from actors.fleet.scope import JobScope
from actors.fleet.versions import Versions
from actors.fleet.workers import Worker
from actors.ledger.batch import SampleState, StepBatch
from actors.policies.assigning.view import GroupView, WorkerView
from actors.protocol.workers import RegisterWorker, WorkerAsleep
from tests.actors.fleet.modes.planned_world import GROUP, GROUPS, TOKENS, PlannedWorld, Sleeper
from tests.actors.scheduler_world import config, play_in

STEPS = 3


class FirstOnly(Mode):
    """The worker whose name comes first generates everything."""

    def look(self, now: float) -> None:
        workers = self._scope.workers.by_name
        for name, worker in workers.items():
            worker.off_duty = name != min(workers)


class EverySecondSleeps(Mode):
    """Every second worker sleeps, unless nobody else is there."""

    def __init__(self, scope: JobScope, versions: Versions, ranking: LengthRanking) -> None:
        super().__init__(scope, versions, ranking)
        self.rests = EngineRests(scope)

    def registered(self, worker: Worker, offer: RegisterWorker) -> None:
        self.rests.registered(worker, offer)
        others = [other for other in self._scope.workers.by_name.values() if other is not worker]
        if 2 * sum(other.off_duty for other in others) < len(others):
            worker.off_duty = self.rests.tell(worker, self._scope.ctx.now(), asleep=True)

    def gone(self, worker: Worker) -> None:
        self.rests.gone(worker)

    def asleep(self, worker: Worker, news: WorkerAsleep) -> None:
        self.rests.hear(worker, news)

    def may_load(self, worker: Worker) -> bool:
        return not worker.off_duty

    def look(self, now: float) -> None:
        workers = self._scope.workers.by_name.values()
        if all(worker.off_duty for worker in workers):
            for worker in workers:
                worker.off_duty = not self.rests.tell(worker, now, asleep=False)
                self._versions.tell(worker)


class Watched:
    """Hears and answers as its mode does, and holds that against what every mode promises."""

    def __init__(self, scope: JobScope, versions: Versions, ranking: LengthRanking) -> None:
        self.scope, self.mode = scope, make_mode(scope, versions, ranking)
        self.lives = Counter[str]()
        """Worker → its lives that have begun and not ended."""
        self.gone_by = list[str]()
        self.handed_out_to = set[str]()
        self.committed_steps = list[int]()
        self._held: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.mode, name)

    def registered(self, worker: Worker, offer: RegisterWorker) -> None:
        self.lives[worker.name] += 1
        assert self.lives[worker.name] == 1, "a name stands for one life at a time"
        self.mode.registered(worker, offer)

    def gone(self, worker: Worker) -> None:
        self.lives[worker.name] -= 1
        assert self.lives[worker.name] == 0, "it was there"
        self.gone_by.append(worker.name)
        self.mode.gone(worker)

    def look(self, now: float) -> None:
        self.mode.look(now)
        workers = self.scope.workers.by_name
        assert {name for name, lives in self.lives.items() if lives} == workers.keys()
        self._held = {name: worker.in_flight for name, worker in workers.items() if worker.off_duty}

    def mark(self, step: int, groups: list[GroupView], workers: list[WorkerView]) -> list[GroupView]:
        marked = self.mode.mark(step, groups, workers)
        before, after = _rows(groups), _rows(marked)
        assert len(set(after)) == len(after) and set(after) <= set(before), "samples are marked, and none is made up"
        return marked

    def handed_out(self, now: float) -> None:
        workers = self.scope.workers.by_name
        for name, held in self._held.items():
            assert workers[name].in_flight == held, f"{name} gets no work, and was given some"
        self.handed_out_to |= {name for name, worker in workers.items() if worker.in_flight}
        self.mode.handed_out(now)
        awake = {name for name, worker in workers.items() if not worker.off_duty}
        for step, batch in self.scope.ledger.batches.items():
            for group in self.mode.mark(step, _queued(batch), []):
                assert not group.kept_for or group.kept_for & awake, "work is kept for workers of whom none gets any"

    def committed(self, batch: StepBatch, trainer: Mapping[str, float]) -> dict[str, float]:
        self.committed_steps.append(batch.step)
        assert (batch.state[batch.state != SampleState.DROPPED] == SampleState.COMMITTED).all()
        return self.mode.committed(batch, trainer)


def _rows(groups: list[GroupView]) -> list[int]:
    return [row for group in groups for row in group.rows.tolist()]


def _queued(batch: StepBatch) -> list[GroupView]:
    rows = np.flatnonzero(batch.state == SampleState.QUEUED).astype(np.int32)
    return [GroupView(batch.step, int(batch.prompts[row // batch.group_size]), rows[i : i + 1])
            for i, row in enumerate(rows.tolist())]  # fmt: skip


SEEDED = {"seeding": True, "seeding_first_s": 0.3, "seeding_floor_s": 0.1}
ALL: dict[str, dict[str, Any]] = {
    "assign": {},
    "rlboost": {"policy": "rlboost", "relief": True},
    "planned": {"policy": "planned", "workers_max": 3},
    "seeding": SEEDED,
    "seeding and rlboost": SEEDED | {"policy": "rlboost", "relief": True, "seeding_end": "estimated"},
}


async def _play(world: PlannedWorld) -> None:
    """Three workers that may sleep, one of them beside the trainer; another one is lost at work, and comes back."""
    await world.start_head()
    await world.start_rewards()
    for i in range(3):
        worker = Sleeper(world.scheduler_at, slots=32, runs=8, base_s=0.05, falls_asleep_s=0.02)
        worker.beside_trainer = i == 0
        await (await world.system(f"rollout-{i}")).spawn(f"rollout-{i}", worker)
    trainer = await world.start_trainer()
    await world.until(lambda: trainer.step > 0 and world.scheduler._ledger.count_states()["streaming"] > 0)
    world.kill("rollout-1")
    await world.until(lambda: "rollout-1" not in world.scheduler._workers.by_name)
    await world.add("rollout-1", runs=8)
    await world.finished()


def _watch(monkeypatch: pytest.MonkeyPatch, scheduling: dict[str, Any]) -> Watched:
    """A job of three steps, all of whose samples are trained once."""
    found: list[Watched] = []

    def make(scope: JobScope, versions: Versions, ranking: LengthRanking) -> Any:
        found.append(Watched(scope, versions, ranking))
        return found[-1]

    monkeypatch.setattr(fleet, "make_mode", make)
    job = config(
        steps=STEPS, scheduling=scheduling, sync={"mode": "sync"}, cluster={"place_rollout": "elastic"},
        limits={"scheduler_tick_s": 0.05, "balance_interval_s": 0.02},
        algorithm={"group_size": GROUP, "prompts_per_step": GROUPS},
        rollout={"max_tokens": TOKENS, "max_running": 32, "workers": 3, "length_ranking": "history"},
    )  # fmt: skip
    world = play_in(PlannedWorld, job, _play)
    names = [(s[0], s[1]) for step in range(STEPS) for s in world.trained[step]]
    assert names == [(p, s) for p in range(GROUPS * STEPS) for s in range(GROUP)]
    result = world.job.result()
    assert result["prompts_lost"] == result["samples_trained_twice"] == 0
    [watched] = found
    assert watched.committed_steps == list(range(STEPS))
    assert watched.gone_by.count("rollout-1") >= 1 and watched.lives["rollout-1"] <= 1
    return watched


@pytest.mark.parametrize("scheduling", ALL.values(), ids=ALL.keys())
def test_a_mode_loses_nothing_and_keeps_no_work_for_whom_it_lets_sleep(
    scheduling: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _watch(monkeypatch, scheduling).handed_out_to


def test_every_mode_is_played_here() -> None:
    assert MODES.keys() == {scheduling.get("policy", "assign") for scheduling in ALL.values()}


def test_a_mode_of_ones_own_gives_all_work_to_the_first_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODES, "assign", FirstOnly)
    assert _watch(monkeypatch, {}).handed_out_to == {"rollout-0"}


def test_a_mode_of_ones_own_lets_every_second_worker_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODES, "assign", EverySecondSleeps)
    watched = _watch(monkeypatch, {})
    assert watched.handed_out_to == {"rollout-0", "rollout-2"}
    assert watched.mode.rests.of(watched.scope.workers.by_name["rollout-1"]).told  # pyright: ignore[reportAttributeAccessIssue]
