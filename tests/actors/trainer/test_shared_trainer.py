"""The trainer of a job that shares a training service: the same steps, asked elsewhere, and free to begin anew."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from actors.core.system import ActorSystem
from actors.core.watch import Gone
from actors.roles import RoleArgs, ServiceArgs
from actors.train_service.parked_files import remove_parked
from actors.train_service.service import TrainService
from actors.trainer.backends.service_backend import ServiceBackend, ServiceClient
from actors.trainer.backends.simulated_backend import SimulatedBackend, TrainCost
from actors.trainer.errors import BackendClosed, BundleLost, ServiceRefuses
from actors.trainer.trainer import Trainer
from configs.services import ServiceConfig
from tests.actors.trainer.trainer_world import NotingBackend, World
from tests.broken_links import break_link
from tests.simulated import run_simulated
from transport.address import ActorAddress, PeerId
from transport.memory_transport import MemoryNetwork, MemoryTransport

COST = TrainCost(accumulate_base_s=1.0, step_s=1.0)


class SharingWorld(World):
    """A trainer's world whose trainer asks a service in another process."""

    def __init__(self, run_dir: Path, **config: object) -> None:
        super().__init__(run_dir / "run")
        self.directory = run_dir / "service"
        self.config = ServiceConfig.model_validate(
            {"name": "s", "backend": "simulated", "device": "cpu", "threads": 1, "memory_bytes": 10**6} | config
        )
        self.network = MemoryNetwork()
        self._service_lives = 0
        self._trainer_lives = 0
        (run_dir / "run").mkdir()

    async def start(self) -> Trainer:
        self.system = ActorSystem(MemoryTransport(self.network, PeerId("head", 1)), limits=self.limits)
        await self.system.start()
        await self.system.spawn("scheduler.j", self.scheduler)
        self.scheduler.services["weights"] = (await self.system.spawn("weights", self.weights)).address
        await self.system.spawn("metrics.j", self.metrics)
        await self.start_service()
        return await self.start_trainer()

    async def start_service(self) -> None:
        self._service_lives += 1
        transport = MemoryTransport(
            self.network, PeerId("head.service.s", self._service_lives), listen=f"memory://s{self._service_lives}"
        )
        self.service_system, self.service_transport = ActorSystem(transport), transport
        await self.service_system.start()
        args = ServiceArgs(
            role="train_service", name="s", node="head", run_dir=str(self.directory),
            metrics=ActorAddress("metrics", self.system.peer), service=self.config.model_dump_json(),
        )  # fmt: skip
        await self.service_system.spawn("s", TrainService(args, lambda kind: SimulatedBackend(COST)))

    async def kill_service(self) -> None:
        self.service_transport.abort()
        await self.service_system.stop()

    async def start_trainer(self) -> Trainer:
        self._trainer_lives += 1
        transport = MemoryTransport(
            self.network, PeerId("head.j.trainer", self._trainer_lives), listen=f"memory://t{self._trainer_lives}"
        )
        self.trainer_system = ActorSystem(transport, limits=self.limits)
        await self.trainer_system.start()
        args = RoleArgs(
            role="trainer", name="trainer", node="n", job=self.job.model_dump_json(), model_path="m", run_id="r1",
            run_dir=str(self.run_dir), scheduler=self.system.address("scheduler.j"),
            metrics=self.system.address("metrics.j"), service=self.service_system.address("s"),
        )  # fmt: skip
        self.trainer = Trainer(args)
        await self.trainer_system.spawn("trainer", self.trainer)
        return self.trainer

    async def trainer_ended(self):
        """Wait for the end of the trainer's present life."""
        end = await self.trainer_system.wait_stopped("trainer", 3600.0)
        await asyncio.sleep(0.01)
        await self.trainer_system.stop()
        return end

    async def stop(self) -> None:
        await self.service_system.stop()
        await self.system.stop()


def by_itself(directory: Path) -> World:
    """The same job with a trainer of its own, run to its end."""
    world = World(directory, backend=NotingBackend(COST))

    async def main() -> None:
        await world.start()
        await world.finish()

    run_simulated(main())
    return world


def test_a_shared_trainer_publishes_and_commits_what_it_does_alone(tmp_path: Path) -> None:
    world = SharingWorld(tmp_path)

    async def main():
        await world.start()
        end = await world.trainer_ended()
        await world.stop()
        return end

    end = run_simulated(main())
    assert (end.gone, end.reason) == (Gone.STOPPED, "completed")
    alone = by_itself(tmp_path / "alone")
    assert world.weights.published == alone.weights.published == [0, 1, 2, 3]
    for version in range(4):
        assert world.weights.manifests[version].chunk_hashes == alone.weights.manifests[version].chunk_hashes
    for step in range(3):
        ours, theirs = world.scheduler.commits[step].metrics, alone.scheduler.commits[step].metrics
        assert set(ours) - set(theirs) == {"service_wait_s", "switch_s", "compute_s"}
        assert all(ours[name] == theirs[name] for name in ("loss", "grad_norm", "learning_rate", "tokens_trained"))
        assert ours["compute_s"] >= 1.0 + 1.0 * ours["micro_batches"]
    remove_parked(tmp_path / "service")


@pytest.mark.parametrize("after_s", [2.5, 4.5, 6.5, 9.5])
def test_a_trainer_whose_service_died_ends_by_a_typed_error_and_its_next_life_goes_on(
    tmp_path: Path, after_s: float
) -> None:
    world = SharingWorld(tmp_path)

    async def main():
        await world.start()
        await asyncio.sleep(after_s)
        await world.kill_service()
        first = await world.trainer_ended()
        await world.start_service()
        await world.start_trainer()
        second = await world.trainer_ended()
        await world.stop()
        return first, second

    first, second = run_simulated(main())
    assert isinstance(first.error, BundleLost) and first.error.blameless
    assert second.reason == "completed"
    alone = by_itself(tmp_path / "alone")
    assert world.weights.manifests[3].chunk_hashes == alone.weights.manifests[3].chunk_hashes
    for step in range(3):
        assert world.scheduler.commits[step].metrics["loss"] == alone.scheduler.commits[step].metrics["loss"]
    remove_parked(tmp_path / "service")


async def trainer_without_a_call(world: SharingWorld) -> None:
    """Start, and have the trainer wait for the groups of step 1."""
    world.scheduler.on_open = lambda message: message.step == 0
    await world.start()
    while 1 not in world.scheduler.opened:
        await asyncio.sleep(0.1)
    await asyncio.sleep(1.0)


@pytest.mark.parametrize("in_order", [False, True])
def test_a_trainer_that_has_no_call_under_way_hears_at_once_that_its_service_is_gone(
    tmp_path: Path, in_order: bool
) -> None:
    world = SharingWorld(tmp_path)

    async def main():
        await trainer_without_a_call(world)
        began_s = asyncio.get_running_loop().time()
        await (world.service_system.stop() if in_order else world.kill_service())
        end = await world.trainer_ended()
        await world.system.stop()
        return end, asyncio.get_running_loop().time() - began_s

    end, seconds = run_simulated(main())
    assert isinstance(end.error, BundleLost)
    assert seconds < (0.5 if in_order else world.limits.service_patience_s + 0.5)
    remove_parked(tmp_path / "service")


def test_a_link_that_breaks_while_no_call_is_under_way_costs_nothing(tmp_path: Path) -> None:
    world = SharingWorld(tmp_path)

    async def main():
        await trainer_without_a_call(world)
        for _ in range(2):
            break_link(world.network, "head.j.trainer", "head.service.s")
            await asyncio.sleep(2 * world.limits.service_patience_s)
        world.scheduler.on_open = lambda message: True
        world.scheduler.grant_step(1, world.trainer_system.address("trainer"))
        end = await world.trainer_ended()
        await world.stop()
        return end

    assert run_simulated(main()).reason == "completed"
    assert world._trainer_lives == 1
    remove_parked(tmp_path / "service")


def test_the_next_life_goes_on_from_what_the_service_has_kept(tmp_path: Path) -> None:
    """There is no checkpoint: without the kept state, step 0 would be opened again."""
    world = SharingWorld(tmp_path, queue={"gap_s": 0.01})

    async def main() -> None:
        world.scheduler.on_open = lambda message: message.step < 2 or world._trainer_lives > 1
        await world.start()
        while 2 not in world.scheduler.opened:
            await asyncio.sleep(0.1)
        await asyncio.sleep(5.0)
        await world.kill_service()
        await world.trainer_system.stop()
        await world.start_service()
        await world.start_trainer()
        assert (await world.trainer_ended()).reason == "completed"
        await world.stop()

    run_simulated(main())
    assert world.scheduler.opened == [0, 1, 2, 2]
    assert world.weights.manifests[3].chunk_hashes == by_itself(tmp_path / "a").weights.manifests[3].chunk_hashes
    remove_parked(tmp_path / "service")


def test_a_service_that_refuses_ends_the_trainer_for_good_with_its_sentence(tmp_path: Path) -> None:
    world = SharingWorld(tmp_path, memory_bytes=10)

    async def main():
        await world.start()
        end = await world.trainer_ended()
        await world.stop()
        return end

    end = run_simulated(main())
    assert isinstance(end.error, ServiceRefuses) and end.permanent
    assert "needs 2,312 bytes" in str(end.error)


LOADED = """
import sys
from actors.roles import RoleArgs
from actors.trainer.setup import backend_spec
from actors.trainer.trainer import build
from tests.actors.trainer.trainer_world import job_config
from transport.address import ActorAddress, PeerId

job = job_config(trainer={"backend": "torch", "device": "auto", "service": "s"}, rollout={"engine": "torch"})
there = ActorAddress("s", PeerId("head", 1))
args = RoleArgs(
    role="trainer", name="trainer", node="n", job=job.model_dump_json(), model_path="m", run_dir="r", run_id="x",
    scheduler=there, metrics=there, service=there,
)
build(args)
backend_spec(args, job)
print(sorted({"torch", "transformers", "safetensors"} & set(sys.modules)))
"""


def test_the_process_of_a_shared_trainer_imports_nothing_that_computes() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "[]\n", done.stderr


def test_a_trainer_without_a_service_has_no_part_of_it(tmp_path: Path) -> None:
    world = World(tmp_path)

    async def main() -> None:
        trainer = await world.start()
        assert not trainer._backend.is_shared
        await world.finish()

    run_simulated(main())
    assert "service_wait_s" not in world.scheduler.commits[0].metrics


def test_it_must_be_connected_first() -> None:
    there = ActorAddress("s", PeerId("head", 1))
    backend = ServiceBackend(ServiceClient(job="j", run="r", backend="simulated"), there)
    with pytest.raises(BackendClosed, match="before start"):
        backend.stored_bytes()
