"""A trainer that has run dry goes back to generating: who is asked, when, and what becomes of the window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from actors.fleet.modes.rests import EngineRest
from actors.fleet.modes.seeding_estimate import SeedingEstimate
from actors.fleet.modes.seeding_step import RemoteTimes, SeedingStep
from actors.fleet.workers import Worker
from actors.ledger.batch import StepBatch
from actors.policies.seeding.offload import StepReport
from actors.protocol.batches import SetPaused
from actors.protocol.failures import Acknowledged
from actors.protocol.workers import Draining
from tests.actors.fleet.modes.seeded import Local, Seeded, all_tokens, play, windows
from tests.actors.fleet.modes.test_balanced import Batching


class Dry:
    """Stands in for the estimate: the trainer would not wait, until it has run dry, once ``says`` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.says = False
        self.enough = True
        self.local = 1
        self.asked_s = list[float]()
        self.switches_s = list[float]()
        monkeypatch.setattr(SeedingEstimate, "would_not_wait", lambda *_: self.enough)
        monkeypatch.setattr(SeedingEstimate, "ran_dry", self.ran_dry)

    def ran_dry(self, _: StepBatch, remote: Sequence[Worker], local: int, switch_s: float, now: float) -> bool:
        assert {worker.name for worker in remote} == {"remote-0"}
        assert local == self.local
        self.asked_s.append(now)
        self.switches_s.append(switch_s)
        said, self.says = self.says, False
        self.enough = self.enough and not said
        return said


def returning(**scheduling: Any) -> dict[str, Any]:
    """A job whose dry trainer may go back to generating."""
    relieved = {"policy": "rlboost", "relief": True, "seeding_end": "estimated", **scheduling}
    return {"scheduling": relieved, "rollout": {"length_ranking": "history"}, "sync": {"mode": "dynamic"}}


def test_when_the_trainer_has_run_dry_its_engines_generate_once_more(
    events: list[dict[str, Any]], reports: list[StepReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    dry = Dry(monkeypatch)

    async def scenario(world: Seeded) -> None:
        await world.begin()
        world.remote = [await world.add(Batching, "remote-0", runs=4)]
        await world.until(lambda: len(dry.asked_s) > 3)
        tokens, dry.says = world.local.tokens, True
        await world.finished()
        assert world.local.told == [False, True, False, True]
        assert world.local.tokens > tokens
        assert world.local.tokens + world.remote[0].tokens == all_tokens(1), "no token twice"
        assert world.trainer.met_nobody_awake

    play(scenario, steps=1, **returning())
    assert [(w["step"], w["why"]) for w in windows(events)] == [(0, "estimate"), (0, "generated")]
    (noted,) = [event for event in events if event["event"] == "trainer_ran_dry"]
    assert (noted["step"], noted["remote"]) == (0, 1)
    (report,) = reports
    seconds = sum(window["seconds"] for window in windows(events))
    assert report.seed_s == report.lasted_s == pytest.approx(seconds, abs=0.01), "both windows"


def test_what_a_dry_trainer_waits_because_of_the_window_does_not_lengthen_the_next_one(
    reports: list[StepReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    dry = Dry(monkeypatch)

    async def scenario(world: Seeded) -> None:
        await world.begin()
        world.remote = [await world.add(Batching, "remote-0", runs=4)]
        world.trainer.metrics = {"seconds": 10.0, "trainer_idle_fraction": 1.0}
        await world.until(lambda: len(dry.asked_s) > 3)
        dry.says = True
        await world.finished()

    play(scenario, steps=1, **returning())
    (report,) = reports
    assert report.lasted_s is not None
    assert report.train_idle_s == pytest.approx(10.0 - report.lasted_s, abs=0.2)


@pytest.mark.parametrize(("sleeps_s", "wakes_s"), [(0.07, 0.09), (0.12, 0.03)])
def test_a_change_takes_what_falling_asleep_and_waking_took_whoever_comes_later(
    sleeps_s: float, wakes_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And half of the shortest window at least, which is 0.05 s."""
    dry = Dry(monkeypatch)

    async def scenario(world: Seeded) -> None:
        await world.begin(remote=1, local={"falls_asleep_s": sleeps_s, "wakes_s": wakes_s})
        await world.until(lambda: len(dry.asked_s) > 1)
        assert dry.switches_s[-1] == pytest.approx((sleeps_s + wakes_s) / 2, abs=0.005)
        dry.local, world.trainer.locals = 2, ()
        asked = len(dry.asked_s)
        await world.add(Local, "rollout-1", falls_asleep_s=0.001)
        await world.until(lambda: len(dry.asked_s) > asked)
        assert dry.switches_s[-1] == pytest.approx((sleeps_s + wakes_s) / 2, abs=0.005)
        dry.local = 0
        monkeypatch.setattr(SeedingEstimate, "ran_dry", lambda *_: False)
        await world.finished()

    play(scenario, steps=1, **returning())


def test_the_trainer_is_dry_by_those_who_serve_its_version_and_helped_by_those_who_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dry = Dry(monkeypatch)

    async def scenario(world: Seeded) -> None:
        await world.begin(remote=1)
        await world.add(Batching, "loads-for-ever", pull_s=1e6)
        going = await world.add(Local, "rollout-1")
        news = Draining(job="j", worker="rollout-1", left_s=1e4, reason="spot")
        going.ctx.ref(world.scheduler_at).tell(news)
        await world.finished()
        assert dry.asked_s

    play(scenario, steps=1, limits={"pull_patience_s": 0.2}, **returning())


def test_the_estimate_is_told_of_every_token_that_the_trainer_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    given = list[int]()
    monkeypatch.setattr(SeedingEstimate, "given", lambda _, tokens, now: given.append(tokens))

    async def scenario(world: Seeded) -> None:
        await world.begin(remote=1)
        await world.finished()

    play(scenario, steps=2, **returning())
    assert sum(given) == all_tokens(2)
    assert len(given) > 2, "as they come"


def test_only_the_answer_to_what_a_worker_was_told_last_counts_and_once() -> None:
    rest = EngineRest()
    rest.tell(asleep=False, now=1.0)
    rest.tell(asleep=True, now=2.0)
    rest.hear(asleep=False, now=2.5)
    assert (rest.asleep, rest.wakes_s) == (False, 0.0), "it answers what it was told before"
    rest.hear(asleep=True, now=3.0)
    rest.hear(asleep=True, now=9.0)
    assert (rest.asleep, rest.sleeps_s) == (True, 1.0)
    rest.tell(asleep=False, now=10.0)
    assert not rest.asleep, "it may be awake from now on"
    rest.hear(asleep=False, now=10.25)
    assert (rest.asleep, rest.sleeps_s, rest.wakes_s) == (False, 1.0, 0.25)


def test_what_the_trainer_was_held_for_is_of_all_windows_that_it_waited_for() -> None:
    step = SeedingStep(0, RemoteTimes(0.0), asked_s=1.0)
    assert step.held_s == 0.0
    step.allowed_s = 3.0
    step.waits_again(10.0)
    assert step.held_s == 2.0
    step.allowed_s = 14.0
    step.waits_again(20.0)
    step.allowed_s = 21.0
    assert step.held_s == 2.0 + 4.0 + 1.0


def test_a_change_counts_for_half_of_the_shortest_window_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    dry = Dry(monkeypatch)

    async def scenario(world: Seeded) -> None:
        await world.begin(remote=1, local={"falls_asleep_s": 0.001})
        await world.finished()

    play(scenario, steps=1, **returning())
    assert set(dry.switches_s) == {0.05}


def test_who_falls_asleep_still_is_not_asked_to_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer has been given groups, as it waits for that engine no longer."""
    dry = Dry(monkeypatch)

    async def scenario(world: Seeded) -> None:
        await world.begin(remote=1)
        await world.add(Local, "rollout-1", falls_asleep_s=None)
        world.trainer.locals = ()
        await world.finished()
        assert world.trainer.given
        assert not dry.asked_s

    play(scenario, steps=1, limits={"seeding_patience_s": 0.05}, **returning())


def test_while_the_job_is_paused_no_trainer_runs_dry(monkeypatch: pytest.MonkeyPatch) -> None:
    dry = Dry(monkeypatch)

    async def scenario(world: Seeded) -> None:
        await world.begin(remote=1)
        await world.until(lambda: bool(dry.asked_s))
        scheduler = world.systems["head"].ref(world.scheduler_at)
        await scheduler.ask(SetPaused(job="j", paused=True), Acknowledged)
        asked = len(dry.asked_s)
        await world.local.ctx.sleep(0.5)
        assert len(dry.asked_s) == asked
        await scheduler.ask(SetPaused(job="j", paused=False), Acknowledged)
        await world.finished()

    play(scenario, steps=1, **returning())


@pytest.mark.parametrize("before", [True, False])
def test_a_trainer_that_is_not_there_has_not_run_dry(before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gone before it was given anything, and after it."""
    dry = Dry(monkeypatch)

    async def scenario(world: Seeded) -> None:
        await world.begin(remote=1)
        if before:
            world.kill("trainer")
            await world.until(lambda: world.local.asleep)
        else:
            await world.until(lambda: bool(dry.asked_s))
            world.kill("trainer")
            await world.local.ctx.sleep(0.1)
        asked = len(dry.asked_s)
        await world.local.ctx.sleep(0.3)
        assert len(dry.asked_s) == asked
        world.trainer = await world.begin_training()
        await world.finished()

    play(scenario, steps=1, **returning())


@pytest.mark.parametrize(
    "job",
    [
        returning(policy="assign", relief=False),  # samples stay where they are
        returning(relief=False),
        returning() | {"sync": {"mode": "sync"}},  # it trains once all is there
        returning(seeding_end="learned"),
    ],
)
def test_a_trainer_that_its_engines_could_not_help_does_not_go_back(
    job: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    dry = Dry(monkeypatch)

    async def scenario(world: Seeded) -> None:
        await world.begin(remote=1)
        await world.finished()

    play(scenario, steps=1, **job)
    assert not dry.asked_s
