"""Numbered calls, as the service sees them: whatever is asked how often, each is computed once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.core.errors import RemoteError
from actors.protocol.training import (
    AttachBundle,
    BundleAttached,
    CallFailed,
    DetachBundle,
    StepCall,
    Stepped,
    TrainAnswer,
    TrainCall,
)
from actors.trainer.backends.simulated_backend import SimulatedBackend, TrainCost
from tests.actors.train_service.service_world import SERVICE, ServiceWorld, Trainer, settled
from tests.simulated import run_simulated
from transport.transport import DownReason


def call(trainer: Trainer, number: int, *, life: str = "", job: str = "a"):
    """A step, asked below the backend that counts for itself."""
    ref = trainer.system.ref(trainer.backend._service)
    life = life or trainer.backend._life
    question = TrainCall(job=job, life=life, number=number, body=StepCall(1.0), wait_s=60.0, limit_s=60.0)
    return ref.ask(question, TrainAnswer, 200.0)


class Counting(SimulatedBackend):
    """Counts its steps, each of which takes a second."""

    taken = 0

    def __init__(self) -> None:
        super().__init__(TrainCost(step_s=1.0))

    async def step(self, **of: Any):
        self.taken += 1
        return await super().step(**of)


def play(tmp_path: Path, scenario, **config: Any) -> list[Counting]:
    """``scenario(world)`` with backends that count; they are returned in the order in which they were made."""
    made: list[Counting] = []

    def make(kind: str) -> Counting:
        made.append(Counting())
        return made[-1]

    async def main() -> None:
        world = ServiceWorld(tmp_path, make=make, **config)
        await world.start()
        await scenario(world)
        await world.stop()

    run_simulated(main())
    return made


def test_a_repeat_of_the_last_number_gets_the_answer_of_the_first_time(tmp_path: Path) -> None:
    async def scenario(world: ServiceWorld) -> None:
        trainer = await world.attached("a")
        first = await call(trainer, 1)
        assert await call(trainer, 1) == first
        assert isinstance(first.outcome, Stepped)

    (backend,) = play(tmp_path, scenario)
    assert backend.taken == 1


def test_a_repeat_while_the_first_is_under_way_joins_it(tmp_path: Path) -> None:
    async def scenario(world: ServiceWorld) -> None:
        trainer = await world.attached("a")
        answers = await asyncio.gather(*(call(trainer, 1) for _ in range(5)))
        assert all(answer == answers[0] for answer in answers)

    (backend,) = play(tmp_path, scenario)
    assert backend.taken == 1


def test_a_call_goes_on_when_whoever_asked_has_given_up(tmp_path: Path) -> None:
    async def scenario(world: ServiceWorld) -> None:
        trainer = await world.attached("a")
        asked = asyncio.ensure_future(call(trainer, 1))
        await asyncio.sleep(0.5)
        asked.cancel()
        assert (await call(trainer, 1)).number == 1

    (backend,) = play(tmp_path, scenario)
    assert backend.taken == 1


@pytest.mark.parametrize("away_s", [0.0, 0.3])
def test_a_link_that_breaks_under_a_call_costs_neither_the_call_nor_the_life(tmp_path: Path, away_s: float) -> None:
    async def scenario(world: ServiceWorld) -> None:
        trainer = await world.attached("a")
        asked = asyncio.ensure_future(trainer.backend.step(weight=1.0))
        for _ in range(2):
            await asyncio.sleep(0.2)
            for peer in trainer.transport.peers():
                trainer.transport.disconnect(peer, DownReason.UNREACHABLE)
            await asyncio.sleep(away_s)
        await asked
        await asyncio.sleep(2 * world.limits.service_patience_s)
        await trainer.backend.step(weight=1.0)

    (backend,) = play(tmp_path, scenario)
    assert backend.taken == 2


@pytest.mark.parametrize("number", [0, 2, 7, -1])
def test_a_gap_is_refused_and_nothing_is_computed(tmp_path: Path, number: int) -> None:
    async def scenario(world: ServiceWorld) -> None:
        trainer = await world.attached("a")
        with pytest.raises(RemoteError, match=f"CallOutOfOrder.*call {number} came after call 0") as error:
            await call(trainer, number)
        assert error.value.declared, "the service lives on"
        await call(trainer, 1)

    (backend,) = play(tmp_path, scenario)
    assert backend.taken == 1


def test_the_next_number_is_refused_while_the_last_is_being_computed(tmp_path: Path) -> None:
    async def scenario(world: ServiceWorld) -> None:
        trainer = await world.attached("a")
        first = asyncio.ensure_future(call(trainer, 1))
        await asyncio.sleep(0.5)
        with pytest.raises(RemoteError, match="while call 1 is being computed"):
            await call(trainer, 2)
        await first

    (backend,) = play(tmp_path, scenario)
    assert backend.taken == 1


@settings(max_examples=60, deadline=None)
@given(numbers=st.lists(st.integers(-1, 8), max_size=25), together=st.booleans())
def test_whatever_numbers_come_each_step_is_taken_once_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, numbers: list[int], together: bool
) -> None:
    """The model: the next number is computed, the last one answered again, all others refused."""

    async def scenario(world: ServiceWorld) -> None:
        trainer = await world.attached("a")
        last, answers = 0, dict[int, Any]()
        for number in numbers:
            times = 3 if together else 1
            found = await asyncio.gather(*(call(trainer, number) for _ in range(times)), return_exceptions=True)
            if number == last + 1 or (number == last and last):
                last = number
                assert all(one == answers.setdefault(number, found[0]) for one in found)
            else:
                assert all(isinstance(one, RemoteError) and one.error_type == "CallOutOfOrder" for one in found)
        assert world.service._bundles["a"].calls.number == last

    (backend,) = play(tmp_path_factory.mktemp("service"), scenario)
    assert backend.taken == backend.steps


def test_another_life_is_told_that_it_is_lost(tmp_path: Path) -> None:
    async def scenario(world: ServiceWorld) -> None:
        first = await world.attached("a")
        await call(first, 1)
        second = await world.attached("a")
        assert second.backend._life != first.backend._life
        for number in (1, 2):
            with pytest.raises(RemoteError, match="BundleLost"):
                await call(second, number, life=first.backend._life)
        await call(second, 1)

    old, new = play(tmp_path, scenario)
    assert (old.taken, new.taken) == (1, 1)


def test_the_life_of_a_service_that_was_killed_is_lost_in_its_next_one(tmp_path: Path) -> None:
    async def scenario(world: ServiceWorld) -> None:
        before = await world.attached("a")
        life = before.backend._life
        await world.kill()
        await world.start()
        after = await world.attached("a")
        assert after.backend._life != life
        with pytest.raises(RemoteError, match=f"BundleLost.*has no life {life}"):
            await call(after, 1, life=life)

    play(tmp_path, scenario)


def test_a_trainer_speaks_for_its_own_job_only(tmp_path: Path) -> None:
    async def scenario(world: ServiceWorld) -> None:
        a, b = await world.attached("a"), await world.attached("b")
        with pytest.raises(RemoteError, match="NotYours"):
            await call(b, 1, life=a.backend._life, job="a")
        with pytest.raises(RemoteError, match="NotYours"):
            await b.system.ref(b.backend._service).ask(DetachBundle(job="a"), DetachBundle)
        await call(a, 1)

    play(tmp_path, scenario)


def test_attaching_again_in_the_same_life_gives_the_same_bundle(tmp_path: Path) -> None:
    async def scenario(world: ServiceWorld) -> None:
        trainer = await world.trainer("a")
        asked = list[AttachBundle]()
        ask = trainer.backend._ask

        async def noting(question, *rest):
            asked.append(question)
            return await ask(question, *rest)

        trainer.backend._ask = noting  # type: ignore[method-assign]
        await trainer.attach()
        ref = trainer.system.ref(world.system.address(SERVICE))
        again = await asyncio.gather(*(ref.ask(asked[0], BundleAttached, 100.0) for _ in range(3)))
        assert {one.life for one in again} == {trainer.backend._life}

    assert len(play(tmp_path, scenario)) == 1


def test_a_call_that_raises_breaks_its_own_bundle_only_and_its_answer_is_kept(tmp_path: Path) -> None:
    async def scenario(world: ServiceWorld) -> None:
        a, b = await world.attached("a"), await world.attached("b")
        await call(a, 1)
        failed = await call(a, 2)
        assert isinstance(failed.outcome, CallFailed) and failed.outcome.breaks
        assert await call(a, 2) == failed
        with pytest.raises(RemoteError, match=r"BundleLost.*a bug of torch"):
            await call(a, 3)
        await call(b, 1, job="b")
        await settled()
        third = await world.attached("a")
        await call(third, 1)

    class Broken(Counting):
        async def step(self, **of: Any):
            if made.index(self) == 0 and self.taken == 1:
                raise RuntimeError("a bug of torch")
            return await super().step(**of)

    made: list[Counting] = []

    async def main() -> None:
        def make(kind: str) -> Counting:
            made.append(Broken())
            return made[-1]

        world = ServiceWorld(tmp_path, make=make)
        await world.start()
        await scenario(world)
        await world.stop()

    run_simulated(main())
    assert [backend.taken for backend in made] == [1, 1, 1]
