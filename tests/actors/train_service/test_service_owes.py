"""What a training service owes its jobs when one of them ends, goes, replays, or runs out of memory meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from actors.train_service.errors import MoveStuck
from actors.trainer.backends.simulated_backend import SimulatedBackend, TrainCost
from actors.trainer.errors import BundleLost, ServiceBusy
from configs.limits import Limits
from tests.actors.train_service.played_jobs import LOSS, batches
from tests.actors.train_service.service_world import ServiceWorld
from tests.actors.train_service.test_service import burst, die_in_a_call, play


def test_a_job_that_attaches_again_while_its_last_life_is_forgotten_is_served(tmp_path: Path) -> None:
    class SlowToClose(SimulatedBackend):
        async def close(self) -> None:
            await asyncio.sleep(5.0)  # long enough for the trainer's next life to ask meanwhile
            await super().close()

    async def scenario(world: ServiceWorld) -> None:
        first, other = await world.attached("a"), await world.attached("b")
        await first.backend.close(keep=False)
        await asyncio.sleep(1.0)
        again = await world.attached("a")
        await burst(again, tmp_path / "v")
        await burst(other, tmp_path / "v")

    play(tmp_path / "service", scenario, make=lambda kind: SlowToClose())


def test_an_error_that_moves_raise_is_the_answer_to_one_call(tmp_path: Path) -> None:
    class NoMemory(SimulatedBackend):
        async def restore(self, stored: Any) -> None:
            if self is made[0]:
                raise MemoryError("no memory left")
            await super().restore(stored)

    made: list[NoMemory] = []

    def make(kind: str) -> NoMemory:
        made.append(NoMemory())
        return made[-1]

    async def scenario(world: ServiceWorld) -> None:
        first, second = await world.attached("a"), await world.attached("b")
        await second.backend.step(weight=1.0)
        with pytest.raises(BundleLost, match="no memory left"):
            await first.backend.step(weight=1.0)
        await second.backend.step(weight=1.0)

    play(tmp_path, scenario, memory_bytes=2_400, make=make)


def test_a_job_that_replays_its_steps_without_publishing_them_gives_way_after_each(tmp_path: Path) -> None:
    async def scenario(world: ServiceWorld) -> None:
        first, second = await world.attached("a"), await world.attached("b")

        async def replay() -> None:
            for step in range(10):
                await first.backend.accumulate(batches("a", step)[0], LOSS)
                await first.backend.step(weight=1.0)

        replaying = asyncio.ensure_future(replay())
        await asyncio.sleep(1.0)
        await second.backend.accumulate(batches("b", 0)[0], LOSS)
        assert second.backend.taken_times().waited_s < 25.0
        await replaying
        state = await world.state()
        assert next(b.bursts for b in state.bundles if b.job == "a") >= 9

    make = lambda kind: SimulatedBackend(TrainCost(step_s=10.0))  # noqa: E731
    play(tmp_path, scenario, make=make)


def test_a_job_that_has_only_attached_gives_way_at_once(tmp_path: Path) -> None:
    async def scenario(world: ServiceWorld) -> None:
        first, _ = await world.attached("a"), await world.attached("b")
        await first.backend.step(weight=1.0)
        assert first.backend.taken_times().waited_s == pytest.approx(0.0, abs=0.01)

    play(tmp_path, scenario)


def test_a_job_that_attached_to_load_its_checkpoint_does_so_in_the_same_slice(tmp_path: Path) -> None:
    async def scenario(world: ServiceWorld) -> None:
        first = await world.attached("a")
        await first.backend.save(tmp_path / "checkpoint")
        second = await world.attached("b", checkpoint_step=1)
        asked = asyncio.ensure_future(first.backend.step(weight=1.0))
        await asyncio.sleep(0.2)
        await second.backend.load(tmp_path / "checkpoint")
        assert (asked.done(), second.backend.taken_times().waited_s) == (False, pytest.approx(0.0, abs=0.01))
        await asked

    (tmp_path / "checkpoint").mkdir()
    play(tmp_path / "service", scenario)


def test_a_job_that_died_as_it_attached_to_load_its_checkpoint_keeps_nobody_waiting(tmp_path: Path) -> None:
    class SlowToStart(SimulatedBackend):
        async def start(self, spec: Any) -> None:
            await asyncio.sleep(1.0)
            await super().start(spec)

    async def scenario(world: ServiceWorld) -> None:
        first = await world.attached("a")
        dying = await world.trainer("b", checkpoint_step=1)
        attaching = asyncio.ensure_future(dying.attach())
        await asyncio.sleep(0.5)
        asked = asyncio.ensure_future(first.backend.step(weight=1.0))
        again = await world.trainer("b", checkpoint_step=1)
        await again.attach()
        await asked
        await asyncio.gather(attaching, return_exceptions=True)
        assert first.backend.taken_times().waited_s == pytest.approx(0.5, abs=0.05)

    play(tmp_path, scenario, make=lambda kind: SlowToStart())


def test_a_service_that_was_told_to_stop_while_it_computed_blames_nobody(tmp_path: Path) -> None:
    async def scenario(world: ServiceWorld) -> None:
        for _ in range(world.limits.service_deaths_max):
            trainer = await world.attached("a")
            asked = asyncio.ensure_future(trainer.backend.step(weight=1.0))
            await asyncio.sleep(0.5)
            await world.stop_in_order()
            await world.start()
            with pytest.raises(BundleLost):
                await asked
        await world.attached("a")
        assert [bundle.isolated for bundle in (await world.state()).bundles] == [False]

    play(tmp_path / "service", scenario, make=lambda kind: SimulatedBackend(TrainCost(step_s=1.0)))


def test_a_trainer_that_goes_while_others_are_parked_for_it_leaves_no_reservation(tmp_path: Path) -> None:
    async def scenario(world: ServiceWorld) -> None:
        for _ in range(2):
            await die_in_a_call(world, await world.attached("a"))
        other = await world.attached("b")
        await other.backend.step(weight=1.0)
        suspect = await world.trainer("a")
        asked = asyncio.ensure_future(suspect.attach())
        await asyncio.sleep(1.0)
        asked.cancel()
        await suspect.kill()
        await asyncio.sleep(60.0)
        assert world.service._residency._reserved == {}

    play(tmp_path / "service", scenario, make=lambda kind: SimulatedBackend(TrainCost(step_s=1.0, moved_byte_s=0.01)))


def test_a_trainer_waits_for_its_former_lifes_call_no_longer_than_for_others(tmp_path: Path) -> None:
    """Then it is told so, as whoever finds the service busy is; the life after it begins once that call is done."""
    limits = Limits(service_wait_s=10.0)

    async def scenario(world: ServiceWorld) -> None:
        loop = asyncio.get_running_loop()
        former = await world.attached("a")
        computing = asyncio.ensure_future(former.backend.step(weight=1.0))
        await asyncio.sleep(1.0)
        await former.kill()
        began_s = loop.time()
        with pytest.raises(ServiceBusy, match=r"its former life has not ended within 10 s \(limits.service_wait_s\)"):
            await world.attached("a")
        assert loop.time() - began_s < 10.5
        computing.cancel()
        await asyncio.sleep(12.0)
        next_one = await world.attached("a")
        assert loop.time() - began_s > 28.0
        await next_one.backend.step(weight=1.0)

    make = lambda kind: SimulatedBackend(TrainCost(step_s=30.0))  # noqa: E731
    play(tmp_path, scenario, make=make, limits=limits)


def test_a_bundle_that_cannot_be_let_go_of_ends_the_service_and_says_why(tmp_path: Path) -> None:
    class Hanging(SimulatedBackend):
        async def forget_place(self, memory: memoryview) -> None:
            await asyncio.sleep(100.0)

    async def scenario(world: ServiceWorld) -> None:
        trainer = await world.attached("a")
        await burst(trainer, tmp_path / "v")
        await asyncio.sleep(5.0)  # its state is stored, so there is something to let go of
        await trainer.kill()
        end = await world.system.wait_stopped("train-0", 100.0)
        assert isinstance(end.error, MoveStuck)
        world.service._residency._stored._files.close()  # as the end of its process does

    play(tmp_path / "service", scenario, limits=Limits(service_move_timeout_s=5.0), make=lambda kind: Hanging())


def test_a_question_of_a_dead_trainer_that_is_late_does_not_end_its_successors_life(tmp_path: Path) -> None:
    """The disk is slow when the first life asks; when its question is judged, the next one has attached."""

    async def scenario(world: ServiceWorld) -> None:
        ctx, slow_s = world.service.ctx, [5.0]
        run_blocking = ctx.run_blocking

        async def slow(function: Any, *args: Any, **more: Any) -> Any:
            await asyncio.sleep(slow_s.pop() if slow_s else 0.0)
            return await run_blocking(function, *args, **more)

        ctx.run_blocking = slow  # type: ignore[method-assign]
        former = await world.trainer("a")
        asked = asyncio.ensure_future(former.attach())
        await asyncio.sleep(1.0)
        asked.cancel()
        await former.kill()
        trainer = await world.attached("a")
        await asyncio.sleep(10.0)
        await burst(trainer, tmp_path / "v")

    play(tmp_path / "service", scenario)
