"""The trainer's loop under virtual time: what it says to whom, in which order, whatever happens around it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from actors.core.actor import handles
from actors.core.errors import ReplyError
from actors.core.system import ActorExit, ActorSystem
from actors.core.watch import Gone
from actors.host.room import NoSpaceLeft
from actors.protocol.failures import NotAccepted
from actors.protocol.steps import CommitStep, Committed, OpenStep, StepGranted
from actors.roles import RoleArgs
from actors.trainer import checkpoint
from actors.trainer.backend import StepResult
from actors.trainer.backends.simulated_backend import SimulatedBackend, TrainCost
from actors.trainer.errors import GrantChanged, TrainingDiverged
from actors.trainer.trainer import Trainer
from configs.limits import Limits
from tests.actors.trainer.trainer_world import (
    GROUP,
    PROMPTS,
    BookkeepingWeights,
    NotingBackend,
    ScriptedScheduler,
    World,
    early,
    grant,
    grants,
    job_config,
    prompts_of,
)
from tests.simulated import run_simulated
from transport.address import ActorAddress, PeerId
from transport.memory_transport import MemoryNetwork, MemoryTransport


def run_to_end(world: World):
    async def main():
        await world.start()
        return await world.finish()

    return run_simulated(main())


def test_a_job_runs_from_version_zero_to_its_last_checkpoint(tmp_path: Path) -> None:
    world = World(tmp_path)
    end = run_to_end(world)
    assert (end.gone, end.reason) == (Gone.STOPPED, "completed")
    assert world.scheduler.opened == [0, 1, 2]
    assert world.weights.published == [0, 1, 2, 3]
    assert [c.policy_version for c in world.scheduler.commits.values()] == [1, 2, 3]
    (taken,) = world.scheduler.checkpoints
    assert taken.step == 3
    assert checkpoint.read(Path(taken.path)).step == 3


def test_a_commit_names_exactly_the_samples_of_the_step(tmp_path: Path) -> None:
    world = World(tmp_path)
    run_to_end(world)
    commit = world.scheduler.commits[1]
    pairs = list(zip(commit.prompts.tolist(), commit.siblings.tolist(), strict=True))
    assert pairs == [(p, s) for p in prompts_of(1) for s in range(GROUP)]


def test_the_metrics_of_a_step_are_complete(tmp_path: Path) -> None:
    world = World(tmp_path, backend=NotingBackend(TrainCost(accumulate_base_s=1.0, step_s=1.0)))
    run_to_end(world)
    metrics = world.scheduler.commits[0].metrics
    groups = [grant(0, p) for p in prompts_of(0)]
    lengths = np.concatenate([g.lengths for g in groups])
    assert metrics["response_tokens_mean"] == pytest.approx(lengths.mean())
    assert metrics["response_tokens_max"] == lengths.max()
    assert metrics["tokens_trained"] == lengths.sum()
    assert metrics["reward_mean"] == 0.5
    assert metrics["staleness_max"] == 0
    assert metrics["seconds"] > 2.0
    assert 0 <= metrics["trainer_idle_fraction"] < 0.1
    for name in ("grad_norm", "clip_fraction", "entropy", "loss", "learning_rate", "engine_mismatch"):
        assert np.isfinite(metrics[name]), name
    assert np.isnan(metrics["kl"]), "the job has no reference"
    assert np.isnan(metrics["stale_mismatch"]), "no token is stale"


_OF_TRAINED_TOKENS = (
    "loss",
    "grad_norm",
    "kl",
    "entropy",
    "engine_mismatch",
    "clip_fraction",
    "correction_cut_fraction",
)


@pytest.mark.parametrize("updates", [{}, {"epochs": 2, "minibatches": 2}])
def test_a_step_that_trains_nothing_has_no_measurements_of_the_training(
    tmp_path: Path, updates: dict[str, int]
) -> None:
    """All rewards of its groups are equal."""
    algorithm = {"group_size": GROUP, "prompts_per_step": PROMPTS, **updates}
    world = World(tmp_path, job=job_config(algorithm=algorithm))
    world.scheduler.equal = set(prompts_of(1))
    run_to_end(world)
    empty, full = (world.scheduler.commits[step].metrics for step in (1, 2))
    assert empty["tokens_trained"] == 0 and empty["degenerate_fraction"] == 1
    assert [name for name in _OF_TRAINED_TOKENS if not np.isnan(empty[name])] == []
    assert [name for name in _OF_TRAINED_TOKENS if np.isnan(full[name])] == ["kl"]
    assert empty["learning_rate"] == full["learning_rate"] > 0, "the optimizer does step"


def test_the_loss_of_a_step_is_that_of_its_minibatches_that_had_something_to_learn(tmp_path: Path) -> None:
    """The last minibatch of the second step teaches nothing."""
    algorithm = {"group_size": GROUP, "prompts_per_step": PROMPTS, "minibatches": 2}
    world = World(tmp_path, job=job_config(algorithm=algorithm))
    world.scheduler.equal = set(prompts_of(1)[2:])
    run_to_end(world)
    assert world.scheduler.commits[1].metrics["grad_norm"] > 0


def test_in_sync_mode_the_micro_batches_do_not_depend_on_the_order_of_arrival(tmp_path: Path) -> None:
    worlds = [World(tmp_path / str(seed), scheduler=ScriptedScheduler(3, seed=seed)) for seed in range(3)]
    for world in worlds:
        run_to_end(world)
    assert worlds[0].backend.batches == worlds[1].backend.batches == worlds[2].backend.batches
    hashes = [world.weights.manifests[3].chunk_hashes for world in worlds]
    assert hashes[0] == hashes[1] == hashes[2]


def test_training_begins_before_the_last_group_has_come(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.scheduler.on_open = lambda message: message.step > 0

    async def main() -> None:
        await world.start()
        await asyncio.sleep(1.0)
        trainer = world.system.ref(world.system.address("trainer"))
        for prompt in prompts_of(0)[:2]:
            trainer.tell(grants(grant(0, prompt)))
        await asyncio.sleep(1.0)
        assert "accumulate" in world.backend.calls
        assert not any(call.startswith("step") for call in world.backend.calls)
        world.scheduler.grant_step(0, trainer.address)  # repeats the two, and sends the rest
        await world.finish()

    run_simulated(main())
    assert world.scheduler.commits[0].prompts.size == PROMPTS * GROUP
    assert world.trainer.ignored_grants == 2


def test_groups_of_equal_rewards_are_counted_but_not_computed(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.scheduler.equal = set(prompts_of(0)[:3])
    run_to_end(world)
    trained = grant(0, prompts_of(0)[3])
    everything = sum(int(grant(0, p).lengths.sum()) for p in prompts_of(0))
    commit = world.scheduler.commits[0]
    assert commit.metrics["tokens_trained"] == trained.lengths.sum()
    assert commit.metrics["degenerate_fraction"] == 0.75
    assert commit.prompts.size == PROMPTS * GROUP
    first_step = next(call for call in world.backend.calls if call.startswith("step"))
    assert first_step == f"step {everything}"


def test_a_step_that_teaches_nothing_at_all_is_still_committed(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.scheduler.equal = set(prompts_of(0))
    end = run_to_end(world)
    assert end.reason == "completed"
    assert world.scheduler.commits[0].metrics["tokens_trained"] == 0


def test_dropped_prompts_are_not_waited_for(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.scheduler.dropped = {1, 6}
    run_to_end(world)
    assert sorted(set(world.scheduler.commits[0].prompts.tolist())) == [0, 2, 3]


def test_a_step_all_of_whose_prompts_were_dropped_is_committed_empty(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.scheduler.dropped = set(prompts_of(1))
    end = run_to_end(world)
    assert end.reason == "completed"
    assert world.scheduler.commits[1].prompts.size == 0


def test_publishing_does_not_hold_up_the_next_step(tmp_path: Path) -> None:
    """A weight server that needs a minute a version delays the version after, not the commit."""
    world = World(tmp_path, weights=BookkeepingWeights(delay_s=5.0))
    run_to_end(world)
    assert world.scheduler.commit_times[0] < world.weights.times[1]


def test_checkpoints_are_taken_when_asked_and_old_ones_go(tmp_path: Path) -> None:
    world = World(tmp_path, job=job_config(steps=4), scheduler=ScriptedScheduler(4))
    world.scheduler.checkpoint_after = {0, 1, 2}
    run_to_end(world)
    assert [taken.step for taken in world.scheduler.checkpoints] == [1, 2, 3, 4]
    assert [path.name for path in checkpoint.stored(tmp_path)] == ["step_000003", "step_000004"]


def test_an_export_that_its_library_refuses_does_not_cost_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object) -> None:
        raise ValueError("GenerationConfig is invalid")

    monkeypatch.setattr(SimulatedBackend, "export_checkpoint", refuse)
    world = World(tmp_path)
    end = run_to_end(world)
    assert end.reason == "completed"
    (taken,) = world.scheduler.checkpoints
    assert checkpoint.read(Path(taken.path)).step == 3, "training can go on from it"
    note = (Path(taken.path) / "export_failed.txt").read_text()
    assert "ValueError: GenerationConfig is invalid" in note
    (told,) = world.scheduler.troubles
    assert (told.job, told.kind) == ("j", "model_not_exported")
    assert "checkpoint of step 3" in told.text and told.text.endswith("ValueError: GenerationConfig is invalid")


def test_a_disk_that_takes_no_export_takes_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SimulatedBackend, "export_checkpoint", refuse)
    end = run_to_end(World(tmp_path))
    assert isinstance(end.error, NoSpaceLeft)
    assert checkpoint.stored(tmp_path) == []


def test_a_restarted_trainer_replays_from_its_checkpoint_and_publishes_nothing_old(tmp_path: Path) -> None:
    """Killed after two commits with a checkpoint at 1: it replays step 1 with the same micro-batches."""
    world = World(tmp_path, job=job_config(steps=4), scheduler=ScriptedScheduler(4))
    world.scheduler.checkpoint_after = {0}
    first_life = world.backend

    async def main() -> None:
        await world.start()
        world.scheduler.on_open = lambda message: message.step < 2
        await asyncio.sleep(10.0)
        assert sorted(world.scheduler.commits) == [0, 1]
        assert world.weights.published == [0, 1, 2]
        await world.kill_trainer()
        world.backend = NotingBackend()
        world.scheduler.on_open = lambda message: True
        await world.start_trainer()
        await world.finish()

    run_simulated(main())
    assert world.scheduler.opened == [0, 1, 2, 1, 2, 3]
    assert world.weights.published == [0, 1, 2, 3, 4]
    step_one = first_life.batches[-len(first_life.batches) // 2 :]
    assert world.backend.batches[: len(step_one)] == step_one


def test_an_interrupted_run_ends_with_the_weights_of_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = World(tmp_path / "whole")
    run_to_end(whole)
    one = World(tmp_path / "parts")
    one.scheduler.stop_after = 1
    run_to_end(one)
    two = World(tmp_path / "parts")
    run_to_end(two)
    assert two.scheduler.opened == [2]
    assert two.weights.manifests[3].chunk_hashes == whole.weights.manifests[3].chunk_hashes


def test_a_finished_run_that_is_resumed_says_so_again_and_ends(tmp_path: Path) -> None:
    run_to_end(World(tmp_path))
    again = World(tmp_path)
    end = run_to_end(again)
    assert end.reason == "completed"
    assert again.scheduler.opened == []
    assert [taken.step for taken in again.scheduler.checkpoints] == [3]


def test_a_named_checkpoint_is_preferred_to_the_newest(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.scheduler.checkpoint_after = {0}
    run_to_end(world)
    again = World(tmp_path, resume_from=str(checkpoint.checkpoint_path(tmp_path, 1)))
    run_to_end(again)
    assert again.scheduler.opened == [1, 2]


def test_a_new_weight_server_gets_the_current_version_at_once(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.scheduler.on_open = lambda message: message.step < 1
    successor = BookkeepingWeights()

    async def main() -> None:
        await world.start()
        await asyncio.sleep(5.0)
        await world.weights_moved(successor)
        await asyncio.sleep(5.0)
        assert successor.published == [1]
        world.scheduler.grant_step(1, world.system.address("trainer"))
        world.scheduler.on_open = lambda message: True
        await world.finish()

    run_simulated(main())
    assert successor.published == [1, 2, 3]


def test_a_weight_server_that_moved_while_nobody_could_say_so_is_looked_up_again(tmp_path: Path) -> None:
    """Its scheduler had restarted as well, and did not know whom to tell while the trainer waited to publish."""
    world = World(tmp_path)
    world.scheduler.on_open = lambda message: message.step < 1
    successor = BookkeepingWeights(held=(0, 1))

    async def main() -> None:
        await world.start()
        await asyncio.sleep(5.0)
        await world.system.stop_actor("weights")
        world.scheduler.services["weights"] = (await world.system.spawn("weights-2", successor)).address
        world.scheduler.grant_step(1, world.system.address("trainer"))
        world.scheduler.on_open = lambda message: True
        await world.finish()

    run_simulated(main())
    assert successor.published == [2, 3]


def test_a_weight_server_that_adopted_the_versions_is_sent_nothing_twice(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.scheduler.on_open = lambda message: message.step < 1
    successor = BookkeepingWeights(held=(0, 1))

    async def main() -> None:
        await world.start()
        await asyncio.sleep(5.0)
        await world.weights_moved(successor)
        await asyncio.sleep(5.0)
        assert successor.published == []
        world.scheduler.grant_step(1, world.system.address("trainer"))
        world.scheduler.on_open = lambda message: True
        await world.finish()

    run_simulated(main())
    assert successor.published == [2, 3]


def test_a_weight_server_that_comes_late_is_waited_for(tmp_path: Path) -> None:
    world = World(tmp_path)

    async def main() -> None:
        world.scheduler.services["weights"] = None  # type: ignore[assignment]
        await world.start()
        await asyncio.sleep(20.0)
        assert world.scheduler.opened == []
        world.scheduler.services["weights"] = world.system.address("weights")
        await world.finish()

    run_simulated(main())
    assert world.weights.published[0] == 0


def test_a_restarted_scheduler_is_told_who_trains_and_which_step_is_open(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.scheduler.on_open = lambda message: message.step < 1
    successor = ScriptedScheduler(3)

    async def main() -> None:
        await world.start()
        await asyncio.sleep(5.0)
        await world.system.stop_actor("scheduler.j", "crashed")
        await asyncio.sleep(3.0)
        await world.system.spawn("scheduler.j", successor)
        await world.finish()

    run_simulated(main())
    assert successor.opened == [1, 2]
    assert successor.services["trainer"].name == "trainer"


class Strict(ScriptedScheduler):
    """One life that commits only what it has granted itself. ``dies`` on a commit; ``altered``: grants other
    rewards.
    """

    def __init__(self, *, dies: Callable[[], None] | None = None, altered: bool = False) -> None:
        super().__init__(3)
        self.dies, self.altered = dies, altered

    def grant_step(self, step: int, trainer: ActorAddress, *, sent: int | None = None) -> None:
        if not self.altered:
            super().grant_step(step, trainer, sent=sent)
            return
        ref = self.ctx.ref(trainer)
        for group in [grant(step, prompt) for prompt in prompts_of(step)]:
            ref.tell(grants(msgspec.structs.replace(group, rewards=group.rewards[::-1].copy())))
        ref.tell(StepGranted(job="j", step=step, groups=PROMPTS, samples=PROMPTS * GROUP, dropped=0))

    @handles(CommitStep)
    async def commit(self, message: CommitStep) -> Committed:
        if self.dies is not None:
            self.dies()
        if message.step not in self.opened:
            raise NotAccepted("these samples are not granted")
        self.commits[message.step] = message
        return Committed(step=message.step, stop=message.step == 2, checkpoint=False)


async def until_the_head_was_replaced(world: World, first: Strict, second: Strict) -> ActorExit:
    """Run the trainer under ``first``, which dies on the way; ``second`` is the next life at its place."""
    network = MemoryNetwork()
    links = MemoryTransport(network, PeerId("head", 1))
    head = ActorSystem(links)
    await head.start()
    gone = asyncio.Event()
    first.dies = lambda: (links.abort(), gone.set())
    world.system = ActorSystem(MemoryTransport(network, PeerId("here", 2)))
    await world.system.start()
    at = await head.spawn("scheduler.j", first)
    first.services["weights"] = (await world.system.spawn("weights", world.weights)).address
    args = RoleArgs(role="trainer", name="trainer", node="n", job=world.job.model_dump_json(), model_path="m",
                    run_dir=str(world.run_dir), scheduler=at.address, metrics=head.address("metrics.j"))  # fmt: skip
    await world.system.spawn("trainer", Trainer(args, backend=world.backend))
    await gone.wait()
    await asyncio.sleep(2.0)
    next_life = ActorSystem(MemoryTransport(network, PeerId("head", 3)))
    await next_life.start()
    await next_life.spawn("scheduler.j", second)
    end = await world.finish()
    await next_life.stop()
    return end


def test_a_step_that_was_trained_when_the_head_died_is_granted_again_and_not_trained_again(tmp_path: Path) -> None:
    """The next head, another incarnation, knows of no grant and refuses the commit until it has granted the step."""
    world, successor = World(tmp_path), Strict()
    end = run_simulated(until_the_head_was_replaced(world, Strict(), successor))
    assert end.reason == "completed"
    assert successor.opened == [0, 1, 2]
    assert sorted(successor.commits) == [0, 1, 2]
    assert successor.services["trainer"].name == "trainer"
    assert len([call for call in world.backend.calls if call.startswith("step")]) == 3


def test_a_trainer_ends_rather_than_commit_what_it_has_not_trained(tmp_path: Path) -> None:
    """The journal of the dead head lacked the newest samples, so the next one grants others."""
    world, successor = World(tmp_path), Strict(altered=True)
    end = run_simulated(until_the_head_was_replaced(world, Strict(), successor))
    assert isinstance(end.error, GrantChanged)
    assert not successor.commits


def test_a_scheduler_that_stays_away_crashes_the_trainer_within_its_patience(tmp_path: Path) -> None:
    world = World(tmp_path, limits=Limits(trainer_patience_s=30.0))
    world.scheduler.on_open = lambda message: False

    async def main():
        await world.start()
        await asyncio.sleep(1.0)
        await world.system.stop_actor("scheduler.j", "crashed")
        return await world.finish(timeout_s=60.0)

    assert run_simulated(main()).gone is Gone.CRASHED


def test_groups_that_were_lost_on_the_way_are_asked_for_again(tmp_path: Path) -> None:
    world = World(tmp_path)

    def lose_first(message: OpenStep) -> bool:
        if world.scheduler.opened.count(0) == 1 and message.step == 0:
            world.scheduler.dropped = {0}
            world.scheduler.grant_step(0, message.trainer, sent=PROMPTS)
            world.scheduler.dropped = set()
            return False
        return True

    world.scheduler.on_open = lose_first
    run_to_end(world)
    assert world.scheduler.opened == [0, 0, 1, 2]
    assert world.scheduler.commits[0].prompts.size == PROMPTS * GROUP


def test_a_step_that_nobody_answers_is_opened_again_after_a_silence(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.scheduler.on_open = lambda message: len(world.scheduler.opened) > 1
    run_to_end(world)
    assert world.scheduler.opened == [0, 0, 1, 2]


def test_a_step_that_never_comes_ends_the_trainer_with_a_checkpoint_of_what_it_has(tmp_path: Path) -> None:
    """It learns at the end of its data, or from its operator, only when it has opened the step after."""
    world = World(tmp_path)

    def nothing_after_one(message: OpenStep) -> bool:
        never = StepGranted(job="j", step=message.step, groups=0, samples=0, dropped=0, never=True)
        if message.step > 0:
            world.system.ref(message.trainer).tell(never)
        return message.step == 0

    world.scheduler.on_open = nothing_after_one
    end = run_to_end(world)
    assert end.reason == "completed"
    assert list(world.scheduler.commits) == [0]
    assert [(taken.step, taken.final) for taken in world.scheduler.checkpoints] == [(1, True)]
    assert len([call for call in world.backend.calls if call.startswith("step")]) == 1, (
        "nothing is learned of a step that there is not"
    )


def test_a_step_that_the_scheduler_refuses_ends_the_trainer_with_its_reason(tmp_path: Path) -> None:
    """As when the checkpoint is ahead of the ledger: waiting would be for ever."""
    world = World(tmp_path)
    world.scheduler.refuse = ReplyError("step 0 is ahead of the frontier")
    end = run_to_end(world)
    assert end.gone is Gone.CRASHED
    assert "ahead of the frontier" in str(end.error)


def test_a_gradient_that_stays_non_finite_ends_the_trainer_with_a_reason(tmp_path: Path) -> None:
    world = World(tmp_path, job=job_config(steps=30), scheduler=ScriptedScheduler(30), limits=Limits(diverged_steps=3))
    world.backend.result = StepResult(grad_norm=float("nan"), learning_rate=0.1, skipped=True)
    end = run_to_end(world)
    assert isinstance(end.error, TrainingDiverged)
    assert "trainer.lr" in str(end.error)
    assert sorted(world.scheduler.commits) == [0, 1]


def test_with_a_kl_term_every_sample_is_computed_against_the_reference(tmp_path: Path) -> None:
    algorithm = {"group_size": GROUP, "prompts_per_step": PROMPTS, "kl_coefficient": 0.1}
    world = World(tmp_path, job=job_config(algorithm=algorithm))
    world.scheduler.equal = set(prompts_of(0))
    run_to_end(world)
    assert world.scheduler.commits[0].metrics["tokens_trained"] > 0
    assert all(reference is not None for reference in world.backend.references)


@pytest.mark.parametrize("told_early", [True, False])
def test_a_trainer_that_waits_for_siblings_computes_the_reference_model_of_those_that_are_there(
    tmp_path: Path, told_early: bool
) -> None:
    """The last sibling of each group comes late. What is left to do then is what could not be done before."""
    algorithm = {"group_size": GROUP, "prompts_per_step": PROMPTS, "kl_coefficient": 0.1}
    world = World(tmp_path, job=job_config(1, algorithm=algorithm, sync={"mode": "dynamic"}))
    world.scheduler.steps = 1
    world.backend = NotingBackend(TrainCost(score_token_s=1.0))
    world.scheduler.on_open = lambda message: False
    groups = [grant(0, prompt) for prompt in prompts_of(0)]
    first = sum(int(group.lengths[0]) + group.prompt_ids.size for group in groups)
    whole = sum(int(group.lengths.sum()) + GROUP * group.prompt_ids.size for group in groups)
    late_s = 500.0

    async def main() -> float:
        await world.start()
        trainer = world.system.ref(world.system.address("trainer"))
        await asyncio.sleep(1.0)
        for group in groups if told_early else []:
            trainer.tell(early(group, 0))
        await asyncio.sleep(late_s)
        assert world.backend.scored_tokens == (first if told_early else 0)
        assert "accumulate" not in world.backend.calls
        world.scheduler.grant_step(0, trainer.address)
        await world.finish()
        return world.scheduler.commit_times[0]

    committed_s = run_simulated(main())
    left_s = committed_s - late_s - 1.0
    metrics = world.scheduler.commits[0].metrics
    assert world.backend.scored_tokens == whole, "each sample once"
    assert all(reference is not None for reference in world.backend.references)
    assert metrics["tokens_scored_early"] == (first if told_early else 0)
    assert metrics["tokens_trained"] == sum(int(group.lengths.sum()) for group in groups)
    assert (left_s < whole) == told_early, "padded tokens take a second each"


def test_a_corrupt_checkpoint_stops_the_start_and_names_the_file(tmp_path: Path) -> None:
    run_to_end(World(tmp_path))
    file = checkpoint.checkpoint_path(tmp_path, 3) / "trainer" / "backend.json"
    file.write_text("{}")

    async def main() -> None:
        world = World(tmp_path)
        try:
            await world.start()
        finally:
            await world.system.stop()

    with pytest.raises(Exception, match="trainer") as caught:
        run_simulated(main())
    assert str(file) in str(caught.value) or str(file) in str(caught.value.__cause__)


def test_a_checkpoint_of_another_job_stops_the_start_and_names_both(tmp_path: Path) -> None:
    run_to_end(World(tmp_path))
    file = checkpoint.checkpoint_path(tmp_path, 3) / checkpoint.STATE_FILE
    state = msgspec.json.decode(file.read_bytes())
    file.write_bytes(msgspec.json.encode(state | {"job": "another", "xxh3": ""}))

    async def main() -> None:
        world = World(tmp_path)
        try:
            await world.start()
        finally:
            await world.system.stop()

    with pytest.raises(Exception, match="trainer") as caught:
        run_simulated(main())
    told = f"{caught.value} {caught.value.__cause__}"
    assert "a checkpoint of job 'another', expected 'j'" in told


def test_spans_show_waiting_training_publishing_and_the_checkpoint(tmp_path: Path) -> None:
    world = World(tmp_path)
    run_to_end(world)
    names = {span.name for spans in world.metrics.spans for span in spans.spans}
    assert {"wait", "train", "publish", "checkpoint"} <= names
    assert {spans.track for spans in world.metrics.spans} == {"trainer"}


def test_in_async_mode_a_later_window_is_trained_while_an_earlier_one_waits(tmp_path: Path) -> None:
    world = World(tmp_path, job=job_config(sync={"mode": "async", "max_staleness": 1}))
    world.scheduler.on_open = lambda message: message.step > 0

    async def main() -> None:
        await world.start()
        await asyncio.sleep(1.0)
        trainer = world.system.ref(world.system.address("trainer"))
        for prompt in prompts_of(0)[2:]:
            trainer.tell(grants(grant(0, prompt)))
        await asyncio.sleep(1.0)
        assert world.backend.calls.count("accumulate") > 0
        world.scheduler.grant_step(0, trainer.address)
        await world.finish()

    run_simulated(main())


def test_a_trainer_whose_lease_has_lapsed_publishes_nothing_until_it_is_confirmed(tmp_path: Path) -> None:
    """It is cut off in the middle of a long step, and back long after the end of it."""
    world = World(tmp_path, backend=NotingBackend(TrainCost(step_s=30.0)))
    before: list[int] = []

    async def main() -> ActorExit:
        await world.start()
        await asyncio.sleep(10.0)
        world.scheduler.back.clear()
        await asyncio.sleep(45.0)
        before.extend(world.weights.published)
        world.scheduler.back.set()
        return await world.finish()

    end = run_simulated(main())
    assert (end.gone, end.reason) == (Gone.STOPPED, "completed")
    assert before == [0], "the first step was over, and what it had trained was kept back"
    assert world.weights.published == [0, 1, 2, 3]
    assert world.scheduler.registered >= 2
