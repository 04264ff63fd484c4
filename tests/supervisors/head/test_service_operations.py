"""Services over the control socket: what is shown of them, and what is refused with nothing disturbed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from actors.control.errors import NotFound, NotNow
from configs.errors import ConfigError
from configs.services import ServicesConfig
from supervisors.head import service_operations
from supervisors.head.service_operations import ServiceOperations
from supervisors.sharing.admission import Admission
from supervisors.sharing.service_register import ServiceRegister
from tests.smallest_job import smallest_job
from tests.supervisors.head.service_world import World, config


class Head:
    """As much of a head as these verbs look at."""

    def __init__(self, world: World, removed: list[Path]) -> None:
        self._world, self.removed = world, removed

    async def start(self) -> None:
        self.services = await self._world.life()
        self.service_register = ServiceRegister(self._world.run_root)
        self.service_register.begin(ServicesConfig(services=[config()]))
        self.admission = Admission(self.services, self.service_register, on_move=lambda *_: None)
        for service in self.service_register.now.rules.services:
            await self.services.begin(service)
            await self.services.address(service.name)
        self.ops = ServiceOperations(cast(Any, self))

    async def put(self, job: str, service: str = "train-0") -> None:
        wanted = smallest_job(name=job, trainer={"service": service, "threads": 1})
        await self.admission.admit(wanted, self._world.run_root, self._world.run_root, lambda _: None)

    def recorded(self) -> list[str]:
        fresh = ServiceRegister(self._world.run_root)
        fresh.read()
        return [service.name for service in fresh.now.rules.services]


@pytest.fixture
async def head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Head]:
    removed: list[Path] = []
    monkeypatch.setattr(service_operations, "remove_stored_of", removed.append)
    world = World(tmp_path)
    await world.start()
    made = Head(world, removed)
    await made.start()
    yield made
    await made.services.stop()
    await world.stop()


async def test_a_service_shows_whom_it_serves_what_it_cost_and_what_it_saves(
    head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: clock.now)
    for job in ("a", "b"):
        head.admission._set_places({**head.admission.places, job: place_on("train-0")})
        head.admission.submitted(job)
        head.admission._known[job].job = smallest_job(name=job, trainer={"service": "train-0"})
    clock.now = 10.0
    row = {"step": 1, "seconds": 10.0, "service_wait_s": 1.0, "switch_s": 0.0, "compute_s": 3.0}
    for job in ("a", "b"):
        head.admission.heard(job, row)

    async def away(*_: Any) -> Any:
        raise service_operations.AskError("it does not answer")

    monkeypatch.setattr(head.services, "ask", away)
    (shown,) = await head.ops.services()
    assert {key: shown[key] for key in ("service", "serves", "steps", "device_s_a_step", "alone_s_a_step")} == {
        "service": "train-0", "serves": "a, b", "steps": 2, "device_s_a_step": 5.0, "alone_s_a_step": 9.0,
    }  # fmt: skip
    assert (shown["bubble"], shown["saving"], shown["compute_s_a_step"]) == (0.4, 0.4444, 3.0)
    assert [(one["job"], one["waited_s_a_step"]) for one in shown["jobs"]] == [("a", 1.0), ("b", 1.0)]
    assert [shown["slowdown"], *(one["slowdown"] for one in shown["jobs"])] == [1.1111] * 3


def place_on(service: str) -> Any:
    from supervisors.sharing.service_register import ServicePlace

    return ServicePlace(service=service, state_bytes=1, since_s=0.0)


async def test_a_service_that_is_added_is_in_the_register_and_begins(head: Head) -> None:
    added = await head.ops.service_add(config("train-1").model_dump(mode="json"))
    assert (added["service"], head.recorded()) == ("train-1", ["train-0", "train-1"])
    assert (await head.services.address("train-1")).name == "train-1"
    with pytest.raises(NotNow, match="there is a service named 'train-1', and it is ready"):
        await head.ops.service_add(config("train-1").model_dump(mode="json"))
    with pytest.raises(ConfigError, match="the added service: memory_bytes: is missing"):
        await head.ops.service_add({"name": "train-2"})
    assert head.recorded() == ["train-0", "train-1"]


async def test_a_drained_service_keeps_its_jobs_takes_no_other_and_can_be_taken_back(head: Head) -> None:
    await head.put("a")
    drained = await head.ops.service_drain("train-0")
    assert (drained["state"], drained["serves"]) == ("draining", ["a"])
    waiting = asyncio.create_task(head.put("b"))
    await asyncio.sleep(0.05)
    (row,) = await head.ops.queue()
    assert (row["job"], "takes no further job" in row["why"]) == ("b", True)
    fresh = ServiceRegister(head._world.run_root)
    fresh.read()
    assert fresh.now.draining == ("train-0",)
    assert head.ops.undrain_service("train-0")
    await waiting
    assert not head.ops.undrain_service("nobody")


async def test_a_service_in_use_is_not_removed_and_one_that_is_not_leaves_nothing_behind(head: Head) -> None:
    await head.put("a")
    with pytest.raises(NotNow, match="train-0 is in use by a"):
        await head.ops.service_remove("train-0")
    assert (head.services.get("train-0"), head.removed) != (None, None)
    await head.admission.leave("a")
    assert (await head.ops.service_remove("train-0"))["state"] == "removed"
    assert (head.recorded(), head.services.all) == ([], [])
    assert head.removed == [head._world.run_root / "services" / "train-0"]
    with pytest.raises(NotFound, match="there is no service 'train-0'; there are none"):
        await head.ops.service_remove("train-0")
