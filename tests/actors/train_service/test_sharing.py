"""Jobs that share a service are trained as they are alone, bit for bit, however their calls come between each other."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.train_service.parked_files import remove_parked
from actors.trainer.backend import MicroBatch
from actors.trainer.backends.simulated_backend import SimulatedBackend, TrainCost
from tests.actors.train_service.played_jobs import JUDGED, STEPS, SharedJob, alone
from tests.actors.train_service.service_world import ServiceWorld
from tests.simulated import run_simulated
from tests.tiny_checkpoint import make_tiny_checkpoint

COST = TrainCost(accumulate_base_s=1.0, step_s=0.5, export_s=0.2, save_s=0.3, moved_byte_s=1e-4)
JOBS = ["a", "b", "c"]
STATE_BYTES = 2_400
"""A little more than the simulated backend's state."""


class Noting(SimulatedBackend):
    """Notes who computes when, in a list that all share."""

    def __init__(self, log: list[tuple[str, int]]) -> None:
        super().__init__(COST)
        self._log = log

    async def accumulate(self, batch: MicroBatch, loss: Any):
        self._log.append(("accumulate", id(self)))
        return await super().accumulate(batch, loss)

    async def step(self, **of: Any):
        self._log.append(("step", id(self)))
        return await super().step(**of)

    async def export_segment(self, path: Path, **of: Any):
        self._log.append(("export", id(self)))
        return await super().export_segment(path, **of)


def pauses(seed: int, longest_s: float):
    """A trainer's waits for its samples, drawn."""
    rng = random.Random(seed)

    async def pause() -> None:
        await asyncio.sleep(rng.random() * longest_s)

    return pause


Fault = tuple[float, str]
"""After how many seconds who is killed: a job's trainer by the job's name, or ``service``."""


def play(
    directory: Path, jobs: list[str], *, seed: int = 0, faults: Sequence[Fault] = (), longest_s: float = 2.0, **of: Any
) -> tuple[list[SharedJob], list[tuple[str, int]]]:  # fmt: skip
    """Jobs in one service in virtual time, with ``faults``; then all that each has come to is what it is alone."""
    log: list[tuple[str, int]] = []

    async def main() -> list[SharedJob]:
        world = ServiceWorld(directory / "service", make=lambda kind: Noting(log), **of)
        await world.start()
        shared = [SharedJob(world, job, directory / job, pauses(seed + i, longest_s)) for i, job in enumerate(jobs)]
        playing = asyncio.gather(*(job.play() for job in shared))
        for after_s, whom in faults:
            await asyncio.sleep(after_s)
            if whom != "service":
                await shared[jobs.index(whom)].kill()
            else:
                await world.kill()
                await world.start()
        await playing
        await world.stop()
        return shared

    shared = run_simulated(main(), seed=seed)
    for job, name in zip(shared, jobs, strict=True):
        expected = run_simulated(alone(SimulatedBackend, name, directory / f"{name}-alone"))
        assert job.record.result == expected.result, name
    remove_parked(directory / "service")
    return shared, log


@pytest.mark.parametrize("jobs", [JOBS[:2], JOBS])
@pytest.mark.parametrize("policy", ["hrrs", "fifo", "round_robin"])
def test_jobs_that_share_a_service_come_to_what_they_do_alone(tmp_path: Path, jobs: list[str], policy: str) -> None:
    shared, log = play(tmp_path, jobs, queue={"policy": policy})
    assert all(job.record.lives == 1 for job in shared)
    assert len([one for one in log if one[0] == "export"]) == STEPS * len(jobs)


def test_with_room_for_one_they_are_parked_between_their_bursts_and_nothing_is_lost(tmp_path: Path) -> None:
    _, log = play(tmp_path, JOBS, memory_bytes=STATE_BYTES)
    assert len({who for _, who in log}) == len(JOBS), "nobody was started anew"


def test_bursts_are_not_interleaved(tmp_path: Path) -> None:
    """From a job's first micro-batch to its export nobody else computes, if it does not keep others waiting."""
    _, log = play(tmp_path, JOBS, longest_s=0.5)
    owner = None
    for call, who in log:
        assert owner in (None, who), "another job's call within a burst"
        owner = None if call == "export" else who


def test_a_job_that_has_nothing_ready_yields_after_the_gap(tmp_path: Path) -> None:
    """Waits of up to a minute between micro-batches: others compute meanwhile, and nobody's result changes."""
    _, log = play(tmp_path, JOBS[:2], longest_s=60.0)
    inside = 0
    owner = None
    for call, who in log:
        inside += owner not in (None, who)
        owner = None if call == "export" else who
    assert inside > 0


def test_a_service_killed_in_mid_burst_gives_each_job_its_last_parked_state(tmp_path: Path) -> None:
    faults = [(14.0, "service"), (9.0, "service")]
    shared, _ = play(tmp_path, JOBS, faults=faults, memory_bytes=STATE_BYTES)
    assert all(job.record.lives >= 2 for job in shared)
    assert any(job.record.resumed for job in shared)


def test_a_job_with_a_critic_shares_a_service_and_goes_on_from_its_parked_state(tmp_path: Path) -> None:
    """There is room for its two models, or for one of another job, never for both jobs."""
    faults = [(14.0, "service"), (3.0, JUDGED), (9.0, "service")]
    shared, _ = play(tmp_path, ["a", JUDGED], faults=faults, memory_bytes=2 * STATE_BYTES)
    assert all(job.record.lives >= 2 for job in shared)
    assert any(job.record.resumed for job in shared)


def test_a_trainer_killed_in_mid_burst_disturbs_nobody_else(tmp_path: Path) -> None:
    shared, _ = play(tmp_path, JOBS, faults=[(6.0, "a"), (5.0, "a"), (3.0, "a")])
    assert [job.record.lives for job in shared] == [4, 1, 1]


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_whatever_is_killed_when_every_job_comes_to_what_it_does_alone(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    jobs = JOBS[: data.draw(st.integers(1, 3), label="jobs")]
    times = st.floats(0.0, 12.0, allow_nan=False)
    faults = data.draw(st.lists(st.tuples(times, st.sampled_from([*jobs, "service", "service"])), max_size=6))
    room = data.draw(st.sampled_from([STATE_BYTES, 2 * STATE_BYTES, 10**9]), label="memory_bytes")
    longest_s = data.draw(st.sampled_from([0.1, 2.0, 10.0]), label="longest_s")
    seed = data.draw(st.integers(0, 2**16), label="seed")
    play(tmp_path_factory.mktemp("run"), jobs, seed=seed, faults=faults, longest_s=longest_s, memory_bytes=room)


async def test_torch_jobs_that_share_a_service_come_to_what_they_do_alone(tmp_path: Path) -> None:
    """Losses, gradient norms, weights of each version, master weights and Adam's moments: the same bytes."""
    from actors.trainer.backends.torch.torch_backend import TorchBackend

    model = make_tiny_checkpoint(tmp_path / "model")
    made: list[TorchBackend] = []

    def make(kind: str) -> TorchBackend:
        made.append(TorchBackend())
        return made[-1]

    world = ServiceWorld(tmp_path / "service", make=make, backend="torch", memory_bytes=1_000_000)
    await world.start()
    jobs = [*JOBS[:2], JUDGED]
    shared = [SharedJob(world, job, tmp_path / job, pauses(i, 0.02), model) for i, job in enumerate(jobs)]
    await asyncio.gather(*(job.play() for job in shared))
    await world.stop()
    for job, name in zip(shared, jobs, strict=True):
        expected = await alone(TorchBackend, name, tmp_path / f"{name}-alone", model)
        assert job.record.result == expected.result, name
    remove_parked(tmp_path / "service")
