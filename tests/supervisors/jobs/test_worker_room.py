"""More workers than cores are warned of; more than a machine takes are not started."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from actors.control.errors import BadArgs
from actors.protocol.jobs import JobState
from supervisors.head.operations import Operations
from supervisors.jobs import worker_room
from supervisors.jobs.worker_room import Room
from tests.smallest_job import smallest_job


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_room, "cores_here", lambda: 2)
    monkeypatch.setattr(worker_room, "has_gpu", lambda: False)


def node(slots: int, *, local: bool = False) -> Any:
    return SimpleNamespace(slots=slots, local=local)


def test_the_slots_of_other_nodes_are_room_too() -> None:
    room, job = Room.of([node(2, local=True), node(30)]), smallest_job()
    assert room.most(job) == 8 * 2 + 30
    assert room.warning(job, 32) == "" and "33 rollout workers share 2 cores and 30 slots" in room.warning(job, 33)


def test_engines_that_compute_nothing_on_the_cores_are_not_warned_of() -> None:
    room = Room.of([])
    assert room.warning(smallest_job(rollout={"engine": "simulated"}), 16) == ""
    assert room.warning(smallest_job(rollout={"engine": "torch"}), 3) != ""


async def test_scale_refuses_what_the_machines_cannot_take_and_warns_beyond_the_cores(tmp_path: Path) -> None:
    scaled: list[int] = []
    said: list[str] = []

    async def scale(workers: int) -> None:
        scaled.append(workers)

    run = SimpleNamespace(
        job=smallest_job(),
        state=JobState.RUNNING,
        say=said.append,
        tree=SimpleNamespace(pool=SimpleNamespace(scale=scale, workers_wanted=1)),
    )
    system = SimpleNamespace(actors=lambda: ["job.j"])
    head: Any = SimpleNamespace(
        jobs={"j": run}, nodes=SimpleNamespace(usable_by=lambda _: [node(2, local=True)]), system=system
    )
    operations = Operations(cast(Any, head))
    with pytest.raises(BadArgs, match=r"99 is more than the 16 that there is room for: limits.workers_per_core 8 x 2"):
        await operations.scale("j", 99)
    assert scaled == [] and said == []
    await operations.scale("j", 3)
    assert scaled == [3] and "3 rollout workers share 2 cores" in said[0]
    await operations.scale("j", 2)
    assert scaled == [3, 2] and len(said) == 1
