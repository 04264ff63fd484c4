"""Where a simulation keeps its files, and which they are."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from actors.core.message import class_of
from actors.weights.segments import SIMULATED_HOST, Host, simulated_id
from supervisors.simulation.cluster.machine import SimulatedMachine
from supervisors.simulation.cluster.world import World
from supervisors.simulation.faults.plan import EPISODE_MOMENTS, MOMENTS, RANK_MOMENTS, SERVICE_MOMENTS
from supervisors.simulation.runner import directory
from tests.supervisors.simulation.scenarios import scenario
from transport.sim.loop import SimulatedLoop


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """Takes the place of shared memory."""
    token = SIMULATED_HOST.set(Host("here", tmp_path))
    yield tmp_path
    SIMULATED_HOST.reset(token)


def made_long_ago(path: Path) -> Path:
    path.mkdir()
    (path / "journal.db").touch()
    os.utime(path, (1, 1))
    return path


def test_what_a_killed_simulation_has_left_is_removed_and_what_is_in_use_or_just_made_is_not(memory: Path) -> None:
    dead, used, new = (memory / f"headrace-sim-{name}" for name in ("dead", "used", "new"))
    made_long_ago(dead)
    lock = os.open(made_long_ago(used), os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    new.mkdir()
    with directory() as root:
        assert sorted(memory.iterdir()) == sorted([root, used, new])
    os.close(lock)
    assert sorted(memory.iterdir()) == sorted([used, new])


def test_published_versions_are_told_from_what_pullers_hold_of_them(tmp_path: Path) -> None:
    with closing(SimulatedLoop(1)) as loop:
        world = World(scenario(), 1, tmp_path, loop)
        world.machines["head"] = machine = SimulatedMachine(world, "head", tmp_path / "head", slots=1)
        name = f"headrace-{simulated_id(tmp_path / 'a')}-v"
        for rest in ("0", "0.manifest", "0@rollout-1", "1.partial", "1"):
            (machine.host.memory / f"{name}{rest}").touch()
        assert [path.name for path in world.segments("a")] == [f"{name}0", f"{name}1"]


def test_every_moment_at_which_a_fault_may_strike_is_the_delivery_of_a_message_that_there_is() -> None:
    moments = {*MOMENTS, *SERVICE_MOMENTS, *EPISODE_MOMENTS, *RANK_MOMENTS}
    assert {tag for tag in moments if class_of(tag) is None} == set()
