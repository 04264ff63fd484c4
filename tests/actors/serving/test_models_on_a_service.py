"""Models of clients on a training service: places of their own, the numbers of each alone, and nothing left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.core.actor import Actor, handles
from actors.core.system import ActorSystem
from actors.core.watch import Down
from actors.protocol.datums import Datum
from actors.protocol.training import AdamStep
from actors.serving.learners import BackendFactory, BackendLearner, adapter_of
from actors.tinker.errors import LearnerBusy, LearnerLost, OperationRefused
from actors.tinker.learner import ModelSpec
from actors.train_service.errors import NoSlice, NotYours
from actors.train_service.parked_files import remove_parked
from actors.trainer.backend import TrainBackend
from actors.trainer.backends.service_backend import ServiceBackend, ServiceClient
from actors.trainer.backends.simulated_backend import SimulatedBackend
from configs.limits import DEFAULT_LIMITS, Limits
from configs.names import served_model
from configs.serving import ServedBase
from tests.actors.train_service.service_world import SERVICE, ServiceWorld, settled, spec_of
from tests.simulated import run_simulated
from transport.address import PeerId
from transport.memory_transport import MemoryTransport

PARTS = ("train_attn", "train_mlp", "train_unembed")
BASE = ServedBase(path=Path("m"), vocabulary=64, context_tokens=32)


class Asker(Actor):
    """Lends its ctx to backends."""

    @handles(Down)
    async def down(self, message: Down) -> None: ...


class ModelServerLife:
    """One life of the model server's process, which makes learners on the service of ``world``."""

    def __init__(self, world: ServiceWorld, life: int) -> None:
        self._world, self._life, self._made = world, life, 0

    async def begin(self) -> None:
        world = self._world
        self.transport = MemoryTransport(
            world.network, PeerId("head.serving.models", self._life), listen=f"memory://models-{self._life}",
            limits=world.limits,
        )  # fmt: skip
        self.system = ActorSystem(self.transport, limits=world.limits)
        await self.system.start()
        self._asker = Asker()
        await self.system.spawn("models", self._asker)
        self.factory = BackendFactory({"base": BASE}, self.backend, world.limits, device="auto", threads=0)

    async def backend(self, number: int, job: str = "") -> ServiceBackend:
        self._made += 1
        client = ServiceClient(
            job=job or served_model(number), run=f"{self._life}.{self._made}", backend=self._world.config.backend
        )
        backend = ServiceBackend(client, self._world.system.address(SERVICE))
        backend.connect(self._asker.ctx)
        return backend

    async def make(self, number: int, seed: int = 0) -> BackendLearner:
        return await self.factory.make(ModelSpec(base_model="base", rank=0, seed=seed), number)

    async def kill(self) -> None:
        self.transport.abort()
        await self.system.stop()


def play(
    directory: Path, scenario: Callable[[ServiceWorld, ModelServerLife], Awaitable[None]],
    make: Callable[[str], TrainBackend] = lambda kind: SimulatedBackend(), limits: Limits = DEFAULT_LIMITS,
    **config: Any,
) -> None:  # fmt: skip
    async def main() -> None:
        world = ServiceWorld(directory, make=make, limits=limits, **config)
        await world.start()
        server = ModelServerLife(world, 1)
        await server.begin()
        await scenario(world, server)
        await server.system.stop()
        await world.stop()

    run_simulated(main())
    remove_parked(directory)


def datum(weight: float, *tokens: int) -> Datum:
    """The simulated policy shows what it has learned of token 0."""
    targets = np.asarray(tokens[1:], np.int32)
    return Datum(np.asarray(tokens[:-1], np.int32), targets, {"weights": np.full(len(targets), weight, np.float32)})


async def steps(learner: BackendLearner, number: int, count: int) -> list[float]:
    """Losses of ``count`` steps that only a model of that ``number`` takes."""
    losses: list[float] = []
    for step in range(count):
        datums = [datum(1 + number, 2 + step, 0, 4), datum(1.0, 5, 6 + step)]
        _, metrics = await learner.forward_backward(datums, "cross_entropy", {}, forward_only=False)
        losses.append(metrics["loss:sum"])
        await learner.optim_step(AdamStep(learning_rate=0.1))
    return losses


def test_models_beside_each_other_and_beside_a_job_have_the_numbers_of_each_alone(tmp_path: Path) -> None:
    alone: dict[int, list[float]] = {}
    together: dict[int, list[float]] = {}

    async def one(_: ServiceWorld, server: ModelServerLife) -> None:
        for number in range(3):
            learner = await server.make(number)
            alone[number] = await steps(learner, number, 4)
            await learner.close()

    async def all_at_once(world: ServiceWorld, server: ModelServerLife) -> None:
        await world.attached("job")  # the only one that jobs_max allows: models are no jobs

        async def play_one(number: int) -> None:
            learner = await server.make(number)
            together[number] = await steps(learner, number, 4)

        async with asyncio.TaskGroup() as group:
            for number in range(3):
                group.create_task(play_one(number))

    play(tmp_path / "alone", one)
    play(tmp_path / "together", all_at_once, jobs_max=1)
    assert together == alone
    assert len({tuple(losses) for losses in alone.values()}) == 3


def test_a_model_that_is_made_again_begins_anew_and_its_former_life_is_over(tmp_path: Path) -> None:
    async def scenario(world: ServiceWorld, server: ModelServerLife) -> None:
        first = await server.make(7)
        losses = await steps(first, 7, 2)
        again = await server.make(7)
        assert await steps(again, 7, 2) == losses
        with pytest.raises(LearnerLost, match="no life"):
            await steps(first, 7, 1)
        assert [bundle.job for bundle in (await world.state()).bundles] == ["serving.7"]

    play(tmp_path, scenario)


def test_nothing_is_left_of_a_model_that_is_closed_nor_of_those_of_a_model_server_that_is_gone(tmp_path: Path) -> None:
    async def scenario(world: ServiceWorld, server: ModelServerLife) -> None:
        closed = await server.make(1)
        await steps(closed, 1, 1)
        await closed.close()
        await asyncio.sleep(1)
        assert (await world.state()).bundles == []
        await steps(await server.make(2), 2, 1)
        await asyncio.sleep(1)
        await server.kill()
        await asyncio.sleep(2 * world.limits.service_patience_s)
        assert (await world.state()).bundles == []
        successor = ModelServerLife(world, 2)
        await successor.begin()
        await steps(await successor.make(2), 2, 1)
        await successor.system.stop()

    play(tmp_path, scenario)


def test_a_model_server_speaks_for_its_models_alone_and_a_trainer_for_none_of_them(tmp_path: Path) -> None:
    async def scenario(world: ServiceWorld, server: ModelServerLife) -> None:
        with pytest.raises(Exception, match=NotYours.__name__):
            await (await server.backend(0, job="x")).start(spec_of())
        trainer = await world.trainer("x")
        trainer.backend._client = ServiceClient(job="serving.1", run="r", backend="simulated")
        with pytest.raises(Exception, match=NotYours.__name__):
            await trainer.attach()

    play(tmp_path, scenario)


def test_a_service_without_room_is_busy_and_one_that_died_has_lost_the_model(tmp_path: Path) -> None:
    async def scenario(world: ServiceWorld, server: ModelServerLife) -> None:
        held = await server.make(1)
        world.service._slices.begin = _never  # type: ignore[method-assign]
        with pytest.raises(LearnerBusy):
            await steps(held, 1, 1)
        await world.kill()
        await settled()
        with pytest.raises(LearnerLost):
            await steps(held, 1, 1)
        await world.start()
        assert await steps(await server.make(1), 1, 1)

    play(tmp_path, scenario)


def test_what_the_service_can_never_do_is_the_clients_to_know(tmp_path: Path) -> None:
    async def scenario(world: ServiceWorld, server: ModelServerLife) -> None:
        wrong = BackendFactory({"base": BASE}, server.backend, world.limits, device="cuda", threads=0)
        with pytest.raises(OperationRefused, match=r"trainer\.device"):
            await wrong.make(ModelSpec(base_model="base", rank=0, seed=0), 1)

    play(tmp_path, scenario)


def test_an_adapter_is_of_the_parts_that_a_client_names() -> None:
    def spec(**parts: bool) -> ModelSpec:
        return ModelSpec(base_model="base", rank=4, seed=0, **(dict.fromkeys(PARTS, False) | parts))

    for parts, targets in (
        ({"train_unembed": True}, ("lm_head",)),
        ({"train_attn": True}, ("q_proj", "k_proj", "v_proj", "o_proj")),
        ({"train_mlp": True, "train_unembed": True}, ("gate_proj", "up_proj", "down_proj", "lm_head")),
        ({"train_attn": True, "train_mlp": True}, ("all-linear",)),
    ):
        adapter = adapter_of(spec(**parts))
        assert adapter is not None and adapter.targets == targets
    with pytest.raises(OperationRefused, match="trains nothing"):
        BackendFactory({}, _never_made, DEFAULT_LIMITS, device="cpu", threads=1).check(spec())


async def _never_made(number: int) -> TrainBackend:
    raise AssertionError(f"model {number} is only checked")


async def _never(*_: object, **__: object) -> tuple[float, float]:
    raise NoSlice("no slice in time")
