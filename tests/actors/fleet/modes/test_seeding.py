"""The seeding window live: a real scheduler, workers beside the trainer and elsewhere, in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from actors.fleet.modes.seeding_estimate import SeedingEstimate
from actors.fleet.workers import Worker
from actors.ledger.batch import StepBatch
from actors.policies.seeding.offload import StepReport
from actors.protocol.batches import SetPaused
from actors.protocol.failures import Acknowledged
from actors.protocol.workers import Draining
from tests.actors.fleet.modes.seeded import FIRST_S, GROUP, GROUPS, STEP_S, Local, Seeded, all_tokens, play, windows
from tests.actors.fleet.modes.test_balanced import Batching


def test_at_the_end_of_the_window_remote_workers_go_on_and_the_trainer_begins(events: list[dict[str, Any]]) -> None:
    async def scenario(world: Seeded) -> None:
        await world.begin(remote=1)
        await world.finished()
        assert world.trainer.met_nobody_awake
        assert world.local.orders, "it has handed over"
        assert world.local.tokens + world.remote[0].tokens == all_tokens(1), "no token twice"
        assert world.trainer.given[-1][1] > world.trainer.given[0][1], "groups come while others are being generated"

    play(scenario, steps=1)
    (window,) = windows(events)
    assert (window["why"], window["remote"]) == ("time", 1)
    assert window["handed_over"] > 0
    assert FIRST_S <= window["seconds"] < FIRST_S + 0.1


def test_without_any_other_worker_each_step_is_generated_and_then_trained(events: list[dict[str, Any]]) -> None:
    async def scenario(world: Seeded) -> None:
        await world.begin()
        await world.finished()
        assert world.trainer.met_nobody_awake
        assert world.local.orders == []
        assert world.local.tokens == all_tokens(3)
        assert world.local.told == [False, True] * 3, "awake to generate, asleep to train, step by step"

    world = play(scenario, steps=3)
    assert [window["why"] for window in windows(events)] == ["generated"] * 3
    assert all(row["seed_s"] > 0.5 for row in world.rows()), "eight tokens of 0.1 s"


def test_when_all_remote_workers_are_lost_after_the_window_it_opens_again(events: list[dict[str, Any]]) -> None:
    async def scenario(world: Seeded) -> None:
        await world.begin(remote=1)
        await world.until(lambda: world.local.asleep)
        assert not world.trained
        world.kill("remote-0")
        await world.finished()
        assert world.trainer.met_nobody_awake

    play(scenario, steps=2)
    first, again, _ = windows(events)
    assert (first["why"], again["why"], again["step"]) == ("time", "generated", 0)


def test_a_remote_worker_with_notice_is_not_waited_for(events: list[dict[str, Any]]) -> None:
    """It is there for long, and takes nothing any more: what was handed over needs somebody."""

    async def scenario(world: Seeded) -> None:
        await world.begin(remote=1, local={"runs": 12})
        await world.until(lambda: world.local.asleep)
        news = Draining(job="j", worker="remote-0", left_s=1e4, reason="spot")
        world.remote[0].ctx.ref(world.scheduler_at).tell(news)
        await world.until(lambda: world.local.told[-1] is False)
        assert not world.trained
        await world.finished()

    play(scenario, steps=2)
    assert [window["why"] for window in windows(events)] == ["time", "generated", "generated"]


def test_a_worker_that_comes_in_mid_step_ends_a_window_that_had_no_end(events: list[dict[str, Any]]) -> None:
    async def scenario(world: Seeded) -> None:
        await world.begin()
        await world.until(lambda: world.local.tokens > GROUPS * GROUP)
        remote = await world.add(Batching, "remote-0")
        await world.finished()
        assert remote.tokens > 0

    play(scenario, steps=1)
    (window,) = windows(events)
    assert (window["why"], window["remote"]) == ("time", 1)


def test_a_worker_that_does_not_serve_the_version_ends_no_window(events: list[dict[str, Any]]) -> None:
    """It has registered, and loads for ever: whoever waited for it would wait for ever, too."""

    async def scenario(world: Seeded) -> None:
        await world.begin()
        await world.add(Batching, "remote-0", pull_s=1e6)
        await world.finished()
        assert world.local.tokens == all_tokens(1)

    play(scenario, steps=1, limits={"pull_patience_s": 0.2})
    assert [window["why"] for window in windows(events)] == ["generated"]


def test_the_trainer_does_not_wait_for_ever_for_an_engine_that_stays_awake(events: list[dict[str, Any]]) -> None:
    async def scenario(world: Seeded) -> None:
        await world.begin(remote=1, local={"falls_asleep_s": None})
        await world.finished()
        assert world.trainer.given[0][1] >= FIRST_S + 2.0

    play(scenario, steps=1, limits={"seeding_patience_s": 2.0})
    stubborn = [event for event in events if event["event"] == "engine_stays_awake"]
    assert [event["worker"] for event in stubborn] == ["rollout-0"]


def test_in_a_window_that_lasts_longer_than_that_patience_the_trainer_is_given_nothing() -> None:
    async def scenario(world: Seeded) -> None:
        await world.begin()
        await world.finished()
        assert world.trainer.met_nobody_awake

    play(scenario, steps=2, limits={"seeding_patience_s": 0.05})


def test_a_local_worker_that_is_started_again_after_the_window_sleeps_at_once() -> None:
    async def scenario(world: Seeded) -> None:
        await world.begin(remote=1)
        await world.until(lambda: world.local.asleep)
        world.kill("rollout-0")
        world.local = again = await world.add(Local, "rollout-0")
        world.trainer.locals = (again,)
        await world.until(lambda: bool(again.told))
        assert again.told == [True] and again.tokens == 0
        await world.finished()
        assert again.tokens > 0, "in the second step"
        assert world.trainer.met_nobody_awake

    play(scenario, steps=2)


def test_a_local_worker_that_is_lost_in_the_window_keeps_nobody_waiting() -> None:
    async def scenario(world: Seeded) -> None:
        await world.begin(remote=1)
        await world.until(lambda: world.local.tokens > GROUP)
        world.kill("rollout-0")
        world.trainer.locals = ()
        await world.finished()
        assert world.local.tokens + world.remote[0].tokens >= all_tokens(2)

    play(scenario, steps=2)


def test_while_the_trainer_replays_local_engines_sleep(events: list[dict[str, Any]]) -> None:
    async def scenario(world: Seeded) -> None:
        await world.begin()
        await world.until(lambda: world.trainer.step == 1 and not world.local.asleep)
        world.kill("trainer")
        world.trainer = await world.begin_training(0)
        await world.finished()
        assert world.trainer.replays == 1
        assert world.trainer.met_nobody_awake

    play(scenario, steps=2)
    assert [window["why"] for window in windows(events)] == ["generated", "replay", "generated"]


def test_while_the_job_is_paused_no_window_ends_by_time(events: list[dict[str, Any]]) -> None:
    async def scenario(world: Seeded) -> None:
        await world.begin(remote=1)
        await world.until(lambda: world.local.tokens > GROUP)
        scheduler = world.systems["head"].ref(world.scheduler_at)
        await scheduler.ask(SetPaused(job="j", paused=True), Acknowledged)
        await world.local.ctx.sleep(FIRST_S)
        assert not windows(events)
        await scheduler.ask(SetPaused(job="j", paused=False), Acknowledged)
        await world.finished()

    play(scenario, steps=1)


ESTIMATED: dict[str, Any] = {
    "scheduling": {"seeding_end": "estimated"}, "rollout": {"length_ranking": "history"},
}  # fmt: skip


@pytest.mark.parametrize(("says", "why"), [(True, "estimate"), (False, "generated"), (None, "time")])
def test_an_estimate_ends_the_window_from_its_floor_on_and_none_leaves_it_to_its_length(
    says: bool | None, why: str, events: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SeedingEstimate, "would_not_wait", lambda *_: says)

    async def scenario(world: Seeded) -> None:
        await world.begin(remote=1)
        await world.finished()
        assert world.trainer.met_nobody_awake

    play(scenario, steps=1, **ESTIMATED)
    (window,) = windows(events)
    assert window["why"] == why
    assert window["seconds"] >= {"estimate": 0.1, "generated": 0.5, "time": FIRST_S}[why]
    assert says is not True or window["seconds"] < 0.2


def test_without_any_other_worker_no_estimate_ends_the_window(
    events: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SeedingEstimate, "would_not_wait", lambda *_: True)

    async def scenario(world: Seeded) -> None:
        await world.begin()
        await world.finished()

    play(scenario, steps=1, **ESTIMATED)
    assert [window["why"] for window in windows(events)] == ["generated"]


@pytest.mark.parametrize("says", [True, False])
def test_the_learned_length_goes_on_from_what_an_estimate_gave(
    says: bool, reports: list[StepReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than the learned one, too: that is no window which stood in for workers that did not serve."""
    monkeypatch.setattr(SeedingEstimate, "would_not_wait", lambda *_: says)

    async def scenario(world: Seeded) -> None:
        await world.begin(remote=1)
        await world.finished()

    play(scenario, steps=1, **ESTIMATED)
    (report,) = reports
    assert report.seed_s == report.lasted_s
    assert report.seed_s is not None and (report.seed_s < 0.2 if says else report.seed_s > FIRST_S)


def test_who_does_not_serve_the_version_yet_is_no_help_in_the_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[str] = set()

    def noting(self: SeedingEstimate, batch: StepBatch, remote: Sequence[Worker], now: float) -> bool:
        asked.update(worker.name for worker in remote)
        return False

    monkeypatch.setattr(SeedingEstimate, "would_not_wait", noting)

    async def scenario(world: Seeded) -> None:
        await world.begin(remote=1)
        await world.add(Batching, "loads-for-ever", pull_s=1e6)
        await world.finished()

    play(scenario, steps=1, limits={"pull_patience_s": 0.2}, **ESTIMATED)
    assert asked == {"remote-0"}


@pytest.mark.parametrize(("idle_fraction", "train_s", "longer"), [(0.9, 0.01, True), (0.0, 3.0, False)])
def test_the_window_follows_what_both_sides_waited_for(idle_fraction: float, train_s: float, longer: bool) -> None:
    """A trainer that waited for samples, not counting the window itself: longer. Workers that had no work: shorter."""

    async def scenario(world: Seeded) -> None:
        await world.begin(remote=1)
        world.trainer.train_s = train_s
        world.trainer.metrics = {"seconds": 4.0, "trainer_idle_fraction": idle_fraction}
        await world.finished()

    rows = play(scenario, steps=2, scheduling={"seeding_first_s": 0.2}).rows()
    assert rows[1]["seed_s"] > 0.4 if longer else rows[1]["seed_s"] < 0.2


def test_what_the_trainer_waits_because_of_the_window_does_not_lengthen_the_window() -> None:
    """It is told 0.65 s, of which 0.62 s are the window and the engine's falling asleep."""

    async def scenario(world: Seeded) -> None:
        await world.begin(remote=1)
        world.trainer.metrics = {"seconds": 0.65, "trainer_idle_fraction": 1.0}
        await world.finished()

    rows = play(scenario, steps=2, scheduling={"seeding_first_s": 0.6}).rows()
    assert rows[1]["seed_s"] < 0.72


def test_the_capacity_target_is_what_generates_everything_while_the_trainer_trains() -> None:
    async def scenario(world: Seeded) -> None:
        await world.begin(remote=2)
        world.trainer.metrics = {"seconds": 0.2, "trainer_idle_fraction": 0.0}
        await world.finished()

    rows = play(scenario, steps=3).rows()
    assert rows[-1]["seeding_target"] > 2, "a trainer that is so fast could be fed by more"


def test_a_head_that_dies_goes_on_with_the_window_that_was_learned(events: list[dict[str, Any]]) -> None:
    """The first step's 0.6 s were far too many: the other worker had nothing to do for 3 s."""

    async def scenario(world: Seeded) -> None:
        await world.begin(remote=1)
        world.trainer.train_s = 3.0
        world.trainer.metrics = {"seconds": 4.0, "trainer_idle_fraction": 0.0}
        await world.until(lambda: world.scheduler._ledger.committed_steps == 1)
        for name in ("trainer", "head", "rollout-0", "remote-0", "rewards"):
            world.kill(name)
        events.clear()
        await world.begin(remote=1, step=1)
        await world.finished()

    play(scenario, steps=2, scheduling={"seeding_first_s": 0.6})
    (window,) = windows(events)
    assert (window["step"], window["why"]) == (1, "time")
    assert window["seconds"] < 0.3


# ---------------------------------------------------------------- overlapping steps


def test_off_policy_and_alone_the_next_step_fills_the_tail_and_goes_on_in_the_next_window(
    events: list[dict[str, Any]],
) -> None:
    """24 samples a step on an engine for 32: eight of the next one begin with it, and what is handed back waits."""

    async def scenario(world: Seeded) -> None:
        await world.begin()
        await world.finished()
        assert world.trainer.met_nobody_awake
        assert world.local.told[:2] == [False, True], "awake to generate, asleep to train"
        assert world.local.tokens == all_tokens(4), "no token twice"
        assert set(world.local.versions) == {0, 1}, "of the step of its version, and of the next one"

    play(scenario, steps=4, sync={"mode": "async"})
    assert {window["why"] for window in windows(events)} == {"generated"}
    assert sum(window["handed_over"] for window in windows(events)) > 0, "of the next step"


def test_off_policy_at_the_end_of_the_window_samples_of_both_steps_go_on_elsewhere(
    events: list[dict[str, Any]],
) -> None:
    async def scenario(world: Seeded) -> None:
        await world.begin(remote=1)
        await world.finished()
        remote = world.remote[0]
        assert world.trainer.met_nobody_awake
        assert world.local.tokens + remote.tokens == all_tokens(3), "no token twice"
        assert {lag for worker in (world.local, remote) for lag in worker.versions} == {0, 1}

    play(scenario, steps=3, sync={"mode": "async"})
    assert windows(events)[0]["why"] == "time"
    assert windows(events)[0]["handed_over"] > 0


def test_a_step_that_was_generated_before_its_version_came_has_no_window(events: list[dict[str, Any]]) -> None:
    """A slow trainer: the other worker generates step 1 meanwhile, and the trainer goes from one to the next."""

    async def scenario(world: Seeded) -> None:
        await world.begin(remote=1)
        world.trainer.train_s = 5.0
        await world.finished()
        assert world.local.told == [False, True], "it is not woken again"
        first, *later = [next(at for s, at, _ in world.trainer.given if s == step) for step in range(3)]
        assert later[1] - first < 2 * 5.5, "nobody waits between two steps"

    world = play(scenario, steps=3, sync={"mode": "async"})
    assert [window["step"] for window in windows(events)] == [0]
    assert [row["seed_s"] > 0 for row in world.rows()] == [True, False, False]


def test_off_policy_a_window_that_was_over_early_does_not_shorten_the_next_one(events: list[dict[str, Any]]) -> None:
    """Step 0 is generated after 0.8 s of the 2 s that it was given, and step 1 beside it; step 2 takes 2.4 s."""

    async def scenario(world: Seeded) -> None:
        await world.begin(remote=1)
        await world.until(lambda: bool(windows(events)))
        for worker in (world.local, world.remote[0]):
            worker.base_s = 3 * STEP_S
        await world.finished()

    play(scenario, steps=3, sync={"mode": "async"}, scheduling={"seeding_first_s": 2.0})
    first, second = windows(events)
    assert (first["why"], second["step"]) == ("generated", 2)
    assert first["seconds"] < 1.1
    assert second["seconds"] > 1.5


def test_off_policy_a_lost_remote_worker_wakes_the_trainers_machine(events: list[dict[str, Any]]) -> None:
    """Else nobody would generate: the trainer waits for its step, and the next one may not go ahead of it."""

    async def scenario(world: Seeded) -> None:
        await world.begin(remote=1)
        await world.until(lambda: world.local.asleep)
        world.kill("remote-0")
        await world.finished()
        assert world.trainer.met_nobody_awake

    play(scenario, steps=3, sync={"mode": "async"})
    assert [(w["step"], w["why"]) for w in windows(events)][:2] == [(0, "time"), (0, "generated")]


def test_off_policy_a_remote_worker_of_an_older_version_does_not_end_the_window(events: list[dict[str, Any]]) -> None:
    """It may generate of the step, but could not go on with tokens of the newer version that it would be handed."""

    async def scenario(world: Seeded) -> None:
        await world.begin()
        remote = await world.add(Batching, "remote-0")
        await world.until(lambda: remote.version == 0)
        remote.pull_s = 1e6
        await world.finished()
        assert remote.version == 0
        assert world.trainer.met_nobody_awake

    play(
        scenario, steps=3, sync={"mode": "async"}, scheduling={"seeding_first_s": 0.1}, limits={"pull_patience_s": 0.2}
    )
    assert {window["why"] for window in windows(events) if window["step"] > 0} == {"generated"}


def test_without_seeding_a_worker_beside_the_trainer_is_one_like_the_others() -> None:
    async def scenario(world: Seeded) -> None:
        await world.begin(remote=1)
        await world.finished()
        assert world.local.told == []
        assert world.local.tokens > 0

    world = play(scenario, steps=2, scheduling={"seeding": False})
    assert "seed_s" not in world.rows()[0]
