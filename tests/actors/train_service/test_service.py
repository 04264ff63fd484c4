"""What a training service refuses, what it remembers of deaths, and that waiting and computing have a limit each."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from actors.core.message import Done
from actors.protocol.training import DetachBundle
from actors.train_service.errors import MoveStuck
from actors.train_service.parked_files import remove_parked
from actors.trainer.backend import BackendSpec, TrainBackend
from actors.trainer.backends import service_backend
from actors.trainer.backends.simulated_backend import SimulatedBackend, TrainCost
from actors.trainer.errors import (
    BundleLost,
    CheckpointCorrupt,
    ModelNotLoadable,
    ServiceBusy,
    ServiceFailed,
    ServiceRefuses,
)
from configs.limits import Limits
from tests.actors.train_service.played_jobs import LOSS, batches
from tests.actors.train_service.service_world import ServiceWorld, Trainer, settled, spec_of
from tests.simulated import run_simulated


def play(directory: Path, scenario: Any, **config: Any) -> None:
    async def main() -> None:
        world = ServiceWorld(directory, **config)
        await world.start()
        await scenario(world)
        await world.stop()

    run_simulated(main())
    remove_parked(directory)


async def burst(trainer: Trainer, directory: Path, step: int = 0) -> None:
    """One step of a job, all of it."""
    backend = trainer.backend
    for batch in batches("x", step):
        await backend.accumulate(batch, LOSS)
    await backend.step(weight=1.0)
    directory.mkdir(exist_ok=True)
    await backend.export_segment(directory / "v", job="x", policy_version=step + 1, chunk_bytes=1 << 20)


# ------------------------------------------------------------ what can never be


@pytest.mark.parametrize(
    ("config", "spec", "sentence"),
    [
        (
            {"threads": 2},
            {"threads": 3},
            r"job a: trainer\.threads is 3, and the service train-0 computes with 2",
        ),
        ({"dtype": "bfloat16"}, {}, r"job a: model\.dtype is float32, and the service train-0 computes with bfloat16"),
        ({"device": "cpu"}, {"device": "cuda"}, r"trainer\.device is cuda, and the service train-0 computes with cpu"),
        ({"memory_bytes": 1000}, {}, r"needs 2,312 bytes .* and the service has 1,000"),
    ],
)
def test_a_job_that_disagrees_is_refused_in_a_sentence_for_good(
    tmp_path: Path, config: dict[str, Any], spec: dict[str, Any], sentence: str
) -> None:
    async def scenario(world: ServiceWorld) -> None:
        trainer = await world.trainer("a")
        with pytest.raises(ServiceRefuses, match=sentence) as refused:
            await trainer.attach(spec_of(**spec))
        assert refused.value.permanent

    play(tmp_path, scenario, **config)


def test_another_kind_of_backend_is_refused(tmp_path: Path) -> None:
    async def scenario(world: ServiceWorld) -> None:
        trainer = await world.trainer("a", kind="torch")
        with pytest.raises(ServiceRefuses, match=r"trainer\.backend is torch, and the service train-0 computes w"):
            await trainer.attach()

    play(tmp_path, scenario)


def test_a_trainer_of_another_machine_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(world: ServiceWorld) -> None:
        trainer = await world.trainer("a")
        monkeypatch.setattr(service_backend, "host_id", lambda: "elsewhere/1")
        with pytest.raises(ServiceRefuses, match=r"runs on elsewhere/1, and the service train-0 on .*one machine"):
            await trainer.attach()

    play(tmp_path, scenario)


def test_a_model_that_does_not_fit_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    """A million float32 parameters: weights, two moments, and the sums of one replica."""
    model = tmp_path / "model"
    model.mkdir()
    save_file({"w": np.zeros((1000, 1000), np.float32)}, model / "model.safetensors")
    made: list[TrainBackend] = []

    def make(kind: str) -> TrainBackend:
        made.append(SimulatedBackend())
        return made[-1]

    async def scenario(world: ServiceWorld) -> None:
        trainer = await world.trainer("a")
        with pytest.raises(ServiceRefuses, match=r"needs 16\.0 MB .* has memory_bytes: 15\.0 MB; give it more"):
            await trainer.attach(spec_of(model))

    play(tmp_path / "service", scenario, memory_bytes=15_000_000, make=make)
    assert made == []


def test_more_jobs_than_it_may_serve_have_to_wait_for_a_place(tmp_path: Path) -> None:
    async def scenario(world: ServiceWorld) -> None:
        first = await world.attached("a")
        second = await world.trainer("b")
        with pytest.raises(ServiceBusy, match="serves 1 jobs already"):
            await second.attach()
        await first.backend.close(keep=False)
        await settled()
        await second.attach()

    play(tmp_path, scenario, jobs_max=1)


# ------------------------------------------------------------ what a backend raises


class Raising(SimulatedBackend):
    """Raises in whatever ``what`` names."""

    what: str = ""
    error: Exception = RuntimeError()

    async def start(self, spec: BackendSpec) -> None:
        await super().start(spec)
        self._raise("start")

    async def accumulate(self, batch: Any, loss: Any) -> Any:
        self._raise("accumulate")
        return await super().accumulate(batch, loss)

    async def export_checkpoint(self, directory: Path) -> None:
        self._raise("export_checkpoint")
        await super().export_checkpoint(directory)

    def _raise(self, what: str) -> None:
        if what == self.what:
            raise self.error


@pytest.mark.parametrize(
    ("raised", "seen"),
    [
        (ModelNotLoadable("no model"), ModelNotLoadable),
        (CheckpointCorrupt("torn"), CheckpointCorrupt),
        (ValueError("a shape"), ValueError),
        (OSError(28, "No space left on device"), OSError),
        (MemoryError("too much"), ServiceFailed),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA"), ServiceFailed),
    ],
)
@pytest.mark.parametrize("what", ["start", "accumulate", "export_checkpoint"])
def test_what_a_backend_raises_is_raised_at_its_trainer_and_nowhere_else(
    tmp_path: Path, what: str, raised: Exception, seen: type[Exception]
) -> None:
    made: list[Raising] = []

    def make(kind: str) -> TrainBackend:
        made.append(Raising())
        if len(made) == 2:
            made[-1].what, made[-1].error = what, raised
        return made[-1]

    async def scenario(world: ServiceWorld) -> None:
        other = await world.attached("a")
        trainer = await world.trainer("b")
        with pytest.raises(seen) as error:
            await trainer.attach()
            await trainer.backend.accumulate(batches("b", 0)[0], LOSS)
            await trainer.backend.export_checkpoint(tmp_path / "c")
        assert str(raised) in str(error.value)
        assert getattr(error.value, "errno", None) == getattr(raised, "errno", None)
        if what == "export_checkpoint":
            await trainer.backend.step(weight=1.0)  # it has changed nothing
        elif what == "accumulate":
            with pytest.raises(BundleLost):
                await trainer.backend.step(weight=1.0)
        await burst(other, tmp_path / "v")

    play(tmp_path / "service", scenario, make=make)


# ------------------------------------------------------------ limits


def test_waiting_has_its_own_limit_and_takes_nothing_from_computing(tmp_path: Path) -> None:
    """Each call may compute for 5 s; behind another's burst of 20 s it waits for longer, and still may."""
    limits = Limits(train_step_timeout_s=5.0, service_wait_s=100.0)

    async def scenario(world: ServiceWorld) -> None:
        first, second = await world.attached("a"), await world.attached("b")

        async def long_burst() -> None:
            for batch in batches("a", 0) * 5:
                await first.backend.accumulate(batch, LOSS)

        burst = asyncio.ensure_future(long_burst())
        await asyncio.sleep(1.0)
        await second.backend.accumulate(batches("b", 0)[0], LOSS)
        times = second.backend.taken_times()
        assert times.waited_s > 20.0
        assert times.compute_s == pytest.approx(4.0)
        await burst

    play(tmp_path, scenario, limits=limits, make=lambda kind: SimulatedBackend(TrainCost(accumulate_base_s=4.0)))


def test_a_call_that_waits_longer_than_it_may_is_told_so_and_nothing_was_computed(tmp_path: Path) -> None:
    async def scenario(world: ServiceWorld) -> None:
        first, second = await world.attached("a"), await world.attached("b")
        computing = asyncio.ensure_future(first.backend.step(weight=1.0))
        await asyncio.sleep(1.0)
        with pytest.raises(ServiceBusy, match=r"no slice within 10 s \(limits\.service_wait_s\): the job a has"):
            await second.backend.step(weight=1.0)
        await computing
        assert (await second.backend.step(weight=1.0)).grad_norm == 0.0, "the life goes on"

    make = lambda kind: SimulatedBackend(TrainCost(step_s=30.0))  # noqa: E731
    play(tmp_path, scenario, limits=Limits(service_wait_s=10.0), make=make)


def test_a_call_that_computes_longer_than_it_may_breaks_its_bundle_only(tmp_path: Path) -> None:
    async def scenario(world: ServiceWorld) -> None:
        first, second = await world.attached("a"), await world.attached("b")
        with pytest.raises(ServiceFailed, match="TimeoutError: it was not done within 5 s"):
            await first.backend.step(weight=1.0)
        with pytest.raises(BundleLost):
            await first.backend.step(weight=1.0)
        await second.backend.accumulate(batches("b", 0)[0], LOSS)

    make = lambda kind: SimulatedBackend(TrainCost(step_s=30.0))  # noqa: E731
    play(tmp_path, scenario, limits=Limits(train_step_timeout_s=5.0), make=make)


def test_a_slice_that_comes_too_late_goes_to_the_next(tmp_path: Path) -> None:
    """The wait is over while the state is on its way: bringing it takes longer than may be waited for."""
    cost = TrainCost(moved_byte_s=0.005)

    async def scenario(world: ServiceWorld) -> None:
        first, second = await world.attached("a"), await world.attached("b")
        await second.backend.step(weight=1.0)
        with pytest.raises(ServiceBusy):
            await first.backend.step(weight=1.0)
        await asyncio.sleep(60.0)
        assert (await world.state()).holder == ""

    play(
        tmp_path,
        scenario,
        limits=Limits(service_wait_s=4.0),
        memory_bytes=2_400,
        make=lambda kind: SimulatedBackend(cost),
    )


def test_a_move_that_does_not_end_ends_the_service_and_not_the_jobs(tmp_path: Path) -> None:
    async def scenario(world: ServiceWorld) -> None:
        first, second = await world.attached("a"), await world.attached("b")
        await second.backend.step(weight=1.0)
        for backend in made:
            backend._cost = TrainCost(moved_byte_s=1.0)
        asked = asyncio.ensure_future(first.backend.step(weight=1.0))
        end = await world.system.wait_stopped("train-0", 100.0)
        assert isinstance(end.error, MoveStuck)
        with pytest.raises(BundleLost):
            await asked
        world.service._residency._stored._files.close()  # as the end of its process does

    made: list[SimulatedBackend] = []

    def make(kind: str) -> SimulatedBackend:
        made.append(SimulatedBackend())
        return made[-1]

    play(tmp_path, scenario, limits=Limits(service_move_timeout_s=5.0), memory_bytes=2_400, make=make)


def test_times_are_told_and_add_up_to_the_services_own(tmp_path: Path) -> None:
    async def scenario(world: ServiceWorld) -> None:
        first, second = await world.attached("a"), await world.attached("b")
        await asyncio.gather(burst(first, tmp_path / "a"), burst(second, tmp_path / "b"))
        one, two = first.backend.taken_times(), second.backend.taken_times()
        assert one.compute_s == two.compute_s > 0
        assert max(one.waited_s, two.waited_s) >= one.compute_s, "one of them has waited for the other's burst"
        assert first.backend.taken_times().compute_s == 0.0
        state = await world.state()
        assert state.compute_s == pytest.approx(one.compute_s + two.compute_s)
        assert [(bundle.job, bundle.bursts, bundle.tier) for bundle in state.bundles] == [
            ("a", 1, "memory"),
            ("b", 1, "memory"),
        ]

    play(tmp_path / "service", scenario, make=lambda kind: SimulatedBackend(TrainCost(accumulate_base_s=1.0)))


# ------------------------------------------------------------ deaths


async def die_in_a_call(world: ServiceWorld, trainer: Trainer) -> None:
    """The service is killed while it computes for ``trainer``."""
    asked = asyncio.ensure_future(trainer.backend.step(weight=1.0))
    await asyncio.sleep(0.5)
    await world.kill()
    await world.start()
    with pytest.raises(BundleLost):
        await asked


def test_a_job_that_was_computed_for_in_two_deaths_computes_alone_from_then_on(tmp_path: Path) -> None:
    async def scenario(world: ServiceWorld) -> None:
        for _ in range(2):
            assert not any(bundle.isolated for bundle in (await world.state()).bundles)
            trainer = await world.attached("a")
            await die_in_a_call(world, trainer)
        state = await world.state()
        assert (state.bundles, state.isolated) == ([], ["a"]), "it is known before the job attaches again"
        suspect, other = await world.attached("a"), await world.attached("b")
        tiers: list[dict[str, str]] = []
        for trainer in (other, suspect, other, suspect):
            await burst(trainer, tmp_path / "v")
            tiers.append({bundle.job: bundle.tier for bundle in (await world.state()).bundles})
        assert {bundle.job: bundle.isolated for bundle in (await world.state()).bundles} == {"a": True, "b": False}
        assert [found["b"] for found in tiers] == ["memory", "host", "memory", "host"]

    play(tmp_path / "service", scenario, make=lambda kind: SimulatedBackend(TrainCost(step_s=1.0)))


def test_a_job_that_ends_the_service_again_and_again_is_not_served_any_more(tmp_path: Path) -> None:
    async def scenario(world: ServiceWorld) -> None:
        other = await world.attached("b")
        for _ in range(world.limits.service_deaths_max):
            await die_in_a_call(world, await world.attached("a"))
        with pytest.raises(ServiceRefuses, match="died 4 times in a row while it computed for this job"):
            await world.attached("a")
        with pytest.raises(BundleLost):
            await other.backend.step(weight=1.0)
        other = await world.attached("b")
        await burst(other, tmp_path / "v")

    play(tmp_path / "service", scenario, make=lambda kind: SimulatedBackend(TrainCost(step_s=1.0)))


def test_a_burst_in_between_ends_the_row_of_deaths(tmp_path: Path) -> None:
    async def scenario(world: ServiceWorld) -> None:
        for _ in range(2 * world.limits.service_deaths_max):
            trainer = await world.attached("a")
            await burst(trainer, tmp_path / "v")
            await die_in_a_call(world, trainer)

    play(tmp_path / "service", scenario, make=lambda kind: SimulatedBackend(TrainCost(step_s=1.0)))


def test_a_death_between_calls_is_nobodys(tmp_path: Path) -> None:
    async def scenario(world: ServiceWorld) -> None:
        for _ in range(3):
            trainer = await world.attached("a")
            await trainer.backend.accumulate(batches("a", 0)[0], LOSS)
            await world.kill()
            await world.start()
        await world.attached("a")
        assert [bundle.isolated for bundle in (await world.state()).bundles] == [False]

    play(tmp_path / "service", scenario)


# ------------------------------------------------------------ what is kept


def test_a_call_that_still_computes_is_waited_for_before_its_backend_is_closed(tmp_path: Path) -> None:
    told: list[str] = []

    class Slow(SimulatedBackend):
        async def export_segment(self, path: Path, **of: Any) -> Any:
            told.append("export")
            await asyncio.sleep(10.0)
            told.append("exported")
            return await super().export_segment(path, **of)

        async def close(self) -> None:
            told.append("close")
            await super().close()

    async def scenario(world: ServiceWorld) -> None:
        trainer = await world.attached("a")
        exporting = asyncio.ensure_future(
            trainer.backend.export_segment(tmp_path / "v", job="a", policy_version=1, chunk_bytes=1 << 20)
        )
        await asyncio.sleep(1.0)
        exporting.cancel()
        await trainer.kill()
        await world.attached("a")
        assert told == ["export", "exported", "close"]

    play(tmp_path / "service", scenario, make=lambda kind: Slow())


def test_a_step_that_outlives_its_trainer_is_no_part_of_the_next_ones_burst(tmp_path: Path) -> None:
    class Slow(SimulatedBackend):
        async def step(self, **of: Any) -> Any:
            await asyncio.sleep(10.0)
            return await super().step(**of)

    async def scenario(world: ServiceWorld) -> None:
        trainer = await world.attached("a")
        stepping = asyncio.ensure_future(trainer.backend.step(weight=1.0))
        await asyncio.sleep(1.0)
        stepping.cancel()
        await trainer.kill()
        await world.attached("a", checkpoint_step=1)  # so that the burst goes on: it is to load that
        assert not world.service._slices._jobs["a"].has_stepped

    play(tmp_path / "service", scenario, make=lambda kind: Slow())


def test_state_that_a_failed_call_may_have_half_changed_is_not_kept(tmp_path: Path) -> None:
    """The step changes the weights and raises; its number of steps is one that the job has committed."""

    class Torn(SimulatedBackend):
        async def step(self, **of: Any) -> Any:
            if self.steps == 1 and not torn:
                torn.append(self)
                self._policy.weights += 1.0
                self._changed("trained")
                raise RuntimeError("torn")
            return await super().step(**of)

    torn: list[SimulatedBackend] = []
    weights: list[bytes] = []

    async def scenario(world: ServiceWorld) -> None:
        trainer = await world.attached("a")
        await burst(trainer, tmp_path / "v")
        weights.append((tmp_path / "v" / "v").read_bytes())
        trainer.backend.committed(1)
        await asyncio.sleep(5.0)
        with pytest.raises(RuntimeError, match="torn"):
            await trainer.backend.step(weight=1.0)
        await trainer.kill()
        trainer = await world.attached("a")
        assert trainer.resumed_step == 1
        await trainer.backend.export_segment(tmp_path / "again", job="x", policy_version=1, chunk_bytes=1 << 20)
        assert (tmp_path / "again").read_bytes() == weights[0]

    play(tmp_path / "service", scenario, make=lambda kind: Torn())
    assert torn


def test_state_that_the_job_has_not_committed_is_of_no_use(tmp_path: Path) -> None:
    async def scenario(world: ServiceWorld) -> None:
        trainer = await world.attached("a")
        await burst(trainer, tmp_path / "v")
        await asyncio.sleep(5.0)
        await trainer.kill()
        assert (await world.attached("a")).resumed_step is None

    play(tmp_path / "service", scenario)


def test_committed_state_is_gone_on_from_by_the_same_run_if_it_is_newer_than_the_checkpoint(tmp_path: Path) -> None:
    async def scenario(world: ServiceWorld) -> None:
        async def life(step: int, **how: Any) -> int | None:
            trainer = await world.attached("a", **how)
            resumed = trainer.resumed_step
            await burst(trainer, tmp_path / "v", step)
            trainer.backend.committed(1 + (resumed or 0))
            await asyncio.sleep(5.0)
            await trainer.kill()
            return resumed

        assert await life(0) is None
        assert await life(1) == 1
        assert await life(2, checkpoint_step=1) == 2
        assert await life(3, checkpoint_step=3) is None
        assert await life(3, run="another") is None

    play(tmp_path / "service", scenario)


def test_of_a_job_that_is_over_nothing_is_kept(tmp_path: Path) -> None:
    async def scenario(world: ServiceWorld) -> None:
        trainer = await world.attached("a")
        await burst(trainer, tmp_path / "v")
        trainer.backend.committed(1)
        await asyncio.sleep(5.0)
        await trainer.kill()
        await asyncio.sleep(5.0)
        service = world.system.ref(world.system.address("train-0"))
        await service.ask(DetachBundle(job="a"), Done)
        assert (await world.state()).bundles == []
        assert (await world.attached("a")).resumed_step is None

    play(tmp_path / "service", scenario)
