"""Training services of a head: started, adopted, started again, given up and ended, each by itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from actors.core.errors import NotSent
from actors.protocol.training import QueryService, ServiceState
from actors.roles import ServiceArgs
from supervisors.sharing.services import Services
from supervisors.tree.errors import ServiceGone
from tests.supervisors.head.service_world import World, config


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path)
    await made.start()
    yield made
    await made.stop()


async def soon(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5.0):
        while not condition():
            await asyncio.sleep(0.005)


def states(services: Services) -> dict[str, str]:
    return {service.config.name: service.state for service in services.all}


async def test_a_service_is_a_process_of_its_own_that_is_told_its_configuration_and_no_job(world: World) -> None:
    services = await world.life()
    await services.begin(config(jobs_max=2))
    address = await services.address("train-0")
    (spec,) = world.machine.specs
    assert (spec.name, spec.peer, address.name) == ("service.train-0", "head.service.train-0", "train-0")
    args = spec.args
    assert isinstance(args, ServiceArgs)
    assert (args.role, args.config, args.metrics.name) == (
        "train_service", config(jobs_max=2), "metrics.service.train-0"
    )  # fmt: skip
    assert args.run_dir == str(world.run_root / "services" / "train-0")
    assert states(services) == {"train-0": "ready"}


async def test_ranks_of_a_service_start_and_end_with_it_and_it_is_told_their_addresses(world: World) -> None:
    services = await world.life()
    await services.begin(config(backend="fsdp", ranks=3))
    first = await services.address("train-0")
    names = ["train-0.rank1", "train-0.rank2", "train-0"]
    assert sorted(spec.args.name for spec in world.machine.specs) == sorted(names)
    assert world.machine.specs[-1].args.name == "train-0", "it starts when they are ready"
    for spec in world.machine.specs:
        args = spec.args
        assert isinstance(args, ServiceArgs)
        leads = args.name == "train-0"
        assert (args.role, args.size, args.name_of_job) == ("train_service" if leads else "rank", 3, "service.train-0")
        assert (args.rank, args.leader, args.kind) == (0, "", "") if leads else (
            names.index(args.name) + 1, "train-0", "shared-fsdp"
        )  # fmt: skip
        assert [found.name for found in args.followers] == (names[:2] if leads else [])
    world.machine.processes["train-0.rank2"].kill()
    await soon(lambda: len(world.machine.specs) == 6)
    second = await services.address("train-0")
    assert second != first
    *_, leader = (spec.args for spec in world.machine.specs if spec.args.name == "train-0")
    assert isinstance(leader, ServiceArgs)
    lives = [world.machine.processes[name].pid for name in names[:2]]
    assert [found.peer.incarnation for found in leader.followers] == lives
    assert [said.partition(" ended")[0] for _, said in world.news] == ["rank 2 of the service train-0"]
    await services.end("train-0")
    assert not any(process.running for process in world.machine.processes.values())


@pytest.mark.parametrize("ended", ["", "ranks.rank1", "ranks"])
async def test_ranks_of_a_service_are_adopted_all_or_none(world: World, ended: str) -> None:
    names = ["ranks.rank1", "ranks"]
    first = await world.life()
    await first.begin(config("ranks", backend="fsdp", ranks=2))
    before = await first.address("ranks")
    second = await world.life()
    if ended:
        world.machine.processes[ended].kill()
    await second.begin(config("ranks", backend="fsdp", ranks=2))
    after = await second.address("ranks")
    assert (after == before) == (not ended)
    assert [spec.args.name for spec in world.machine.specs] == names * (2 if ended else 1)
    assert all(world.machine.processes[name].running for name in names)


async def test_a_service_that_dies_is_started_again_and_whoever_asks_meanwhile_is_told_its_new_address(
    world: World,
) -> None:
    services = await world.life()
    await services.begin(config())
    before = await services.address("train-0")
    world.machine.processes["train-0"].kill()
    await soon(lambda: states(services) == {"train-0": "starting"})
    after = await services.address("train-0")
    assert after != before
    assert [name for name, _ in world.news] == ["train-0"]
    assert "starting it again" in world.news[0][1]
    assert world.ready == ["train-0", "train-0"]


async def test_a_service_that_is_given_up_takes_no_other_one_with_it_and_says_why_to_whoever_needs_it(
    world: World,
) -> None:
    services = await world.life()
    world.machine.unready.add("bad")
    await services.begin(config("bad"))
    await services.begin(config("good"))
    with pytest.raises(ServiceGone, match=r"gave up on bad: 2 starts in a row failed.*then resume the job"):
        await services.address("bad")
    assert (await services.address("good")).name == "good"
    assert states(services) == {"bad": "failed", "good": "ready"}
    assert "was given up" in world.news[-1][1]
    with pytest.raises(NotSent, match="bad is not ready"):
        await services.ask("bad", QueryService(), ServiceState)


async def test_the_next_life_of_the_head_adopts_a_service_that_still_runs_and_starts_one_that_does_not(
    world: World,
) -> None:
    first = await world.life()
    for name in ("kept", "ended"):
        await first.begin(config(name))
        await first.address(name)
    second = await world.life()
    world.machine.processes["ended"].kill()
    for name in ("kept", "ended"):
        await second.begin(config(name))
        await second.address(name)
    assert [spec.args.name for spec in world.machine.specs] == ["kept", "ended", "ended"]
    assert world.ready == ["kept", "ended"] * 2
    world.machine.processes["kept"].kill()  # the new owner hears of it
    await soon(lambda: [spec.args.name for spec in world.machine.specs][3:] == ["kept"])


async def test_a_service_that_is_ended_is_not_started_again_and_its_name_can_be_used_anew(world: World) -> None:
    services = await world.life()
    await services.begin(config())
    await services.address("train-0")
    waiting = asyncio.create_task(services.address("later"))
    await services.end("train-0")
    assert not world.machine.processes["train-0"].running
    with pytest.raises(ServiceGone, match="was removed"):
        await services.address("train-0")
    with pytest.raises(ServiceGone, match="was removed"):
        await waiting
    await services.begin(config())
    assert (await services.address("train-0")).name == "train-0"
    await services.stop()
    await services.stop()
    assert services.all == []
