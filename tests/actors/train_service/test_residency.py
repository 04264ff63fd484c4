"""Where bundles lie: who leaves, what is written, what a next life finds, what happens when nothing fits any more."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import gc
import os
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from actors.train_service import parked_files
from actors.train_service.errors import DirectoryInUse, MoveStuck, NeverFits, NoRoomToPark, NotParkable
from actors.train_service.parked_manifest import decode, encode
from actors.train_service.residency import remove_parked
from actors.trainer.backend import LossSpec
from actors.trainer.errors import ParkedStateDamaged, StateParked
from actors.weights.segments import files_in_memory, known_run_id, memory_of
from tests.actors.train_service.residency_world import COPY, PAGE, RESIDENT, World, batch, bits


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path / "service")
    await made.residency.open()
    yield made
    World.end()
    remove_parked(made.directory)


def with_rules(world: World, **rules: int) -> World:
    """The same directory with less room; before anything is added."""
    world.residency._stored._files.close()
    return World(world.directory, **rules)


def files(world: World, pattern: str = "parked-*") -> list[Path]:
    found = [*files_in_memory(world.directory, pattern), *(world.directory / "parked").glob(pattern)]
    return [path for path in found if not path.name.endswith(".lock")]


# ------------------------------------------------------------ budget


async def test_what_fits_stays_and_the_least_recently_used_leaves_first(world: World) -> None:
    await world.add("a", "b")
    await world.train("a")
    await world.train("b")
    assert await world.residency.make_resident("a") == 0.0
    await world.add("c")
    assert [world.tier(job) for job in "abc"] == ["budget", "host", "budget"]
    assert await world.residency.make_resident("b") > 0
    assert [world.tier(job) for job in "abc"] == ["host", "budget", "budget"]
    report = world.residency.report()
    assert report.budget_bytes == 2 * RESIDENT
    assert (report.parked, report.resumed) == (2, 1)


async def test_a_bundle_larger_than_the_budget_is_refused_with_both_numbers(world: World) -> None:
    world = with_rules(world, budget_bytes=RESIDENT - 1)
    await world.residency.open()
    with pytest.raises(NeverFits, match=rf"needs {RESIDENT:,} bytes .* has {RESIDENT - 1:,}"):
        await world.add("a")
    assert world.residency.report().bundles == ()


async def test_a_reservation_counts_until_its_bundle_is_there(world: World) -> None:
    await world.add("a", "b")
    await world.residency.reserve("c", RESIDENT)
    assert sorted(world.tier(job) for job in "ab") == ["budget", "host"]
    await world.residency.reserve("d", RESIDENT)
    assert [world.tier(job) for job in "ab"] == ["host", "host"]
    assert world.residency.report().budget_bytes == 2 * RESIDENT
    with pytest.raises(NoRoomToPark, match="reserved"):
        await world.residency.make_resident("a")
    await world.residency.remove("d")
    await world.residency.make_resident("a")
    await world.add("c")
    assert world.residency.report().budget_bytes == 2 * RESIDENT


async def test_parked_state_comes_back_bit_for_bit_and_a_parked_backend_refuses_to_compute(world: World) -> None:
    await world.add("a")
    await world.train("a")
    await world.backends["a"].accumulate(batch(3), LossSpec())
    before = await bits(world.backends["a"])
    await world.residency.park("a")
    with pytest.raises(StateParked):
        await world.backends["a"].step(weight=1.0)
    assert world.residency.report().budget_bytes == 0
    await world.residency.make_resident("a")
    assert await bits(world.backends["a"]) == before


async def test_nobody_knows_a_job_that_was_not_added(world: World) -> None:
    for call in (world.residency.make_resident, world.residency.park, world.residency.store, world.residency.prefetch):
        with pytest.raises(NotParkable, match="'x'"):
            await call("x")
    await world.add("a")
    with pytest.raises(NotParkable, match="already"):
        await world.add("a")


# ------------------------------------------------------------ what is written


async def test_only_what_has_changed_is_written(world: World) -> None:
    async def written(*calls: str) -> int:
        before = world.residency.report().written_bytes
        for call in calls:
            await world.residency.make_resident("a")
            if call == "score":
                await world.backends["a"].score(batch(1), temperature=1.0, reference=False)
            elif call == "accumulate":
                await world.backends["a"].accumulate(batch(1), LossSpec())
            else:
                await world.backends["a"].step(weight=10.0)
        await world.residency.park("a")
        return world.residency.report().written_bytes - before

    await world.add("a")
    trained, sums = 64 + 576 + 576, 2 * 576
    assert await written("accumulate", "step") == trained
    assert await written("score", "score") == 0
    assert await written("accumulate") == sums
    assert await written("accumulate", "step") == trained


async def test_stored_state_outlives_the_process_and_a_half_step_is_dropped(world: World) -> None:
    await world.add("a", "b")
    await world.train("a", seed=1)
    await world.train("a", seed=2)
    after_two = await bits(world.backends["a"])
    await world.residency.store("a")
    await world.backends["a"].accumulate(batch(3), LossSpec())
    await world.residency.store("a")
    await world.backends["a"].step(weight=10.0)  # never stored
    await world.killed_and_started()
    found = await world.residency.find_parked("a")
    assert found is not None
    assert (found.steps, found.tier, found.job) == (2, "host", "a")
    assert await world.residency.find_parked("b") is None
    world.backends["a"] = await world.backend()
    await world.residency.add("a", world.backends["a"], parked=found)
    assert await bits(world.backends["a"]) == after_two


async def test_sums_of_a_dropped_half_step_do_not_come_back_with_the_next_parking(world: World) -> None:
    await world.add("a")
    await world.train("a")
    before = await bits(world.backends["a"])
    await world.backends["a"].accumulate(batch(3), LossSpec())
    await world.residency.park("a")
    await world.killed_and_started()
    world.backends["a"] = await world.backend()
    await world.residency.add("a", world.backends["a"], parked=await world.residency.find_parked("a"))
    await world.residency.park("a")
    await world.residency.make_resident("a")
    assert await bits(world.backends["a"]) == before


async def test_equal_state_has_an_equal_hash_wherever_it_lies(world: World) -> None:
    await world.add("a", "b")
    hashes = set[str]()
    for job in ("a", "b"):
        await world.train(job, seed=1)
        await world.residency.park(job)
        found = await world.residency.find_parked(job)
        assert found is not None
        hashes.add(found.hash)
    assert len(hashes) == 1
    await world.train("a", seed=2)
    await world.residency.store("a")
    found = await world.residency.find_parked("a")
    assert found is not None and found.hash not in hashes


async def test_a_bundle_that_starts_from_a_checkpoint_forgets_what_was_parked(world: World) -> None:
    await world.add("a")
    await world.residency.park("a")
    await world.killed_and_started()
    await world.add("a")
    assert await world.residency.find_parked("a") is None
    await world.killed_and_started()
    assert await world.residency.find_parked("a") is None
    assert files(world) == []


async def test_a_job_that_leaves_takes_its_files_along_unless_it_is_to_come_back(world: World) -> None:
    await world.add("a", "b")
    for job in ("a", "b"):
        await world.train(job)
        await world.residency.park(job)
    await world.residency.remove("a")
    await world.residency.remove("b", forget=False)
    assert await world.residency.find_parked("a") is None
    assert await world.residency.find_parked("b") is not None
    await world.residency.remove("b")
    assert files(world) == []
    assert (world.residency.report().host_bytes, world.residency.report().disk_bytes) == (0, 0)


# ------------------------------------------------------------ what a next life finds


@pytest.mark.parametrize("damage", ["bit", "cut", "gone", "manifest", "manifest cut"])
@pytest.mark.parametrize("tier", ["host", "disk"])
async def test_a_damaged_copy_is_refused_and_removed(world: World, damage: str, tier: str) -> None:
    world = with_rules(world, host_bytes=100 * PAGE if tier == "host" else 0)
    await world.residency.open()
    await world.add("a", "b")
    for job in ("a", "b"):
        await world.train(job)
        await world.residency.park(job)
    manifest = next(path for path in files(world, "parked-*.manifest") if decode(path.read_bytes()).job == "a")
    (part,) = (manifest.with_name(described.file) for described in decode(manifest.read_bytes()).parts)
    if damage == "bit":
        with part.open("r+b") as file:
            file.seek(700)
            byte = file.read(1)[0]
            file.seek(700)
            file.write(bytes([byte ^ 1]))
    elif damage == "cut":
        os.truncate(part, part.stat().st_size - 1)
    elif damage == "gone":
        part.unlink()
    elif damage == "manifest":
        data = bytearray(manifest.read_bytes())
        data[10] ^= 1
        manifest.write_bytes(data)
    else:
        os.truncate(manifest, 20)
    await world.killed_and_started()
    assert await world.residency.find_parked("a") is None
    assert await world.residency.find_parked("b") is not None
    assert len(files(world)) == 2
    report = world.residency.report()
    assert report.host_bytes + report.disk_bytes == COPY


async def test_half_written_files_are_removed_and_the_copy_before_them_is_found(world: World) -> None:
    """Whoever is killed while it stores has the new file, and the old manifest."""
    await world.add("a")
    await world.train("a")
    await world.residency.store("a")
    stored = await bits(world.backends["a"])
    await world.train("a", seed=2)

    async def killed(*_: object) -> None:
        raise asyncio.CancelledError

    world.backends["a"].copy_out = killed  # type: ignore[method-assign, assignment]
    world.residency._stored._drop = killed  # type: ignore[method-assign, assignment]  nobody cleans up
    with pytest.raises(asyncio.CancelledError):
        await world.residency.store("a")
    assert len(files(world)) == 3
    await world.killed_and_started()
    assert len(files(world)) == 2
    found = await world.residency.find_parked("a")
    assert found is not None and found.steps == 1
    world.backends["a"] = await world.backend()
    await world.residency.add("a", world.backends["a"], parked=found)
    assert await bits(world.backends["a"]) == stored


async def test_of_two_tiers_the_newer_copy_counts(world: World) -> None:
    """Whoever is killed between a copy's arrival on disk and its removal from memory has both."""
    await world.add("a")
    await world.train("a")
    await world.residency.store("a")
    (manifest,) = files(world, "parked-*.manifest")
    (part,) = (manifest.with_name(described.file) for described in decode(manifest.read_bytes()).parts)
    older, bytes_of_part = manifest.read_bytes(), part.read_bytes()
    await world.train("a", seed=2)
    await world.residency.store("a")
    disk = world.directory / "parked"
    (disk / "parked-0123-ab").write_bytes(bytes_of_part)
    copy = decode(older)
    (described,) = copy.parts
    moved = replace(copy, parts=(replace(described, file="parked-0123-ab"),))
    (disk / manifest.name[manifest.name.index("parked-") :]).write_bytes(encode(moved))
    await world.killed_and_started()
    found = await world.residency.find_parked("a")
    assert found is not None
    assert (found.steps, found.tier) == (2, "host")
    assert list(disk.iterdir()) == []


async def test_state_that_is_altered_while_it_is_parked_costs_that_bundle_alone(world: World) -> None:
    await world.add("a", "b")
    for job in ("a", "b"):
        await world.train(job)
        await world.residency.park(job)
    world.residency._stored.copies["a"].files["trained"].memory[100] ^= 1
    with pytest.raises(ParkedStateDamaged):
        await world.residency.make_resident("a")
    with pytest.raises(ParkedStateDamaged, match="gone"):
        await world.residency.make_resident("a")
    await world.residency.make_resident("b")
    await world.residency.remove("a")
    await world.add("a")
    await world.train("a")


async def test_another_models_state_is_not_used(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.add("a")
    await world.residency.park("a")
    await world.killed_and_started()
    found = await world.residency.find_parked("a")
    other = await world.backend()
    monkeypatch.setattr(other, "fingerprint", lambda: "another model")
    with pytest.raises(ParkedStateDamaged, match="another model"):
        await world.residency.add("a", other, parked=found)
    assert world.residency.report().bundles == ()
    assert await world.residency.find_parked("a") is None


async def test_files_are_for_their_owner_only_under_names_that_nobody_can_know(world: World) -> None:
    world = with_rules(world, host_bytes=COPY)
    await world.residency.open()
    await world.add("a", "b")
    await world.residency.park("a")
    await world.residency.park("b")
    assert {world.tier("a"), world.tier("b")} == {"host", "disk"}
    run = known_run_id(world.directory)
    assert run is not None
    for directory in (memory_of(run), world.directory / "parked"):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    for path in files(world):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert remove_parked(world.directory) == 5
    assert not memory_of(run).exists()
    assert not (world.directory / "parked").exists()


async def test_two_processes_do_not_share_a_directory(world: World) -> None:
    other = World(world.directory)
    with pytest.raises(DirectoryInUse, match="has not ended"):
        await other.residency.open()
    await world.add("a")
    await world.residency.park("a")
    await world.residency.close()
    await other.residency.open()
    assert await other.residency.find_parked("a") is not None


KILLED = """
import asyncio, os, sys
from pathlib import Path
from typing import Any
from tests.actors.train_service.residency_world import World

async def main():
    world = World(Path(sys.argv[1]))
    await world.residency.open()
    await world.add("a")
    await world.train("a")
    await world.residency.park("a")
    print((await world.residency.find_parked("a")).hash, flush=True)
    os.kill(os.getpid(), 9)

asyncio.run(main())
"""


async def test_a_process_that_is_killed_leaves_what_it_has_stored(tmp_path: Path) -> None:
    directory = tmp_path / "service"
    command = [sys.executable, "-c", KILLED, str(directory)]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
    assert done.returncode == -9, done.stderr
    world = World(directory)
    await world.residency.open()
    found = await world.residency.find_parked("a")
    assert found is not None and found.hash == done.stdout.strip()
    World.end()
    remove_parked(directory)


# ------------------------------------------------------------ full


async def test_when_host_memory_is_full_the_copy_that_was_used_longest_ago_moves_to_disk(world: World) -> None:
    world = with_rules(world, host_bytes=2 * COPY)
    await world.residency.open()
    await world.add("a", "b")
    await world.residency.park("a")
    await world.residency.park("b")
    await world.add("c")
    await world.residency.park("c")
    assert [world.tier(job) for job in "abc"] == ["disk", "host", "host"]
    report = world.residency.report()
    assert (report.host_bytes, report.disk_bytes, report.demoted) == (2 * COPY, COPY, 1)
    await world.residency.make_resident("a")
    await world.residency.make_resident("b")


async def test_what_is_stored_and_stored_again_keeps_one_file_more_for_the_next_time(world: World) -> None:
    await world.add("a")
    names = set[str]()
    for seed in range(6):
        await world.train("a", seed=seed)
        await world.residency.store("a")
        names |= {path.name for path in files(world) if not path.name.endswith(".manifest")}
    assert len(names) == 2
    assert world.residency.report().host_bytes == 2 * COPY


async def test_a_copy_never_lies_in_two_tiers(world: World) -> None:
    """Host memory has both parts and no more: the next sums fit only on disk, and so the rest goes there too."""
    world = with_rules(world, host_bytes=2 * COPY)
    await world.residency.open()
    await world.add("a")
    await world.train("a")
    for seed in (1, 2):
        await world.backends["a"].accumulate(batch(seed), LossSpec())
        await world.residency.store("a")
    before = await bits(world.backends["a"])
    assert world.residency.report().disk_bytes == 2 * COPY
    assert len(files(world, "parked-*.manifest")) == 1
    await world.residency.park("a")
    await world.residency.make_resident("a")
    assert await bits(world.backends["a"]) == before
    await world.killed_and_started()
    assert await world.residency.find_parked("a") is not None


async def test_a_copy_that_was_altered_does_not_reach_the_disk(world: World) -> None:
    world = with_rules(world, host_bytes=COPY)
    await world.residency.open()
    await world.add("a", "b")
    await world.residency.park("a")
    world.residency._stored.copies["a"].files["trained"].memory[100] ^= 1
    await world.residency.park("b")
    assert world.residency.report().disk_bytes == 0
    assert world.tier("b") == "host"
    with pytest.raises(ParkedStateDamaged):
        await world.residency.make_resident("a")


async def test_without_room_for_a_second_file_a_copy_goes_to_disk_and_the_first_stays_until_it_is_whole(
    world: World,
) -> None:
    world = with_rules(world, host_bytes=COPY)
    await world.residency.open()
    await world.add("a")
    for seed in range(3):
        await world.train("a", seed=seed)
        await world.residency.store("a")
        report = world.residency.report()
        assert report.host_bytes <= COPY
        assert report.host_bytes + report.disk_bytes == COPY


@pytest.mark.parametrize("full", ["limits", "host", "both"])
async def test_full_tiers_are_said_and_disturb_nobody(world: World, full: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By our own limits, by the system for shared memory alone (then the disk takes it), or by the system for both."""
    if full == "limits":
        world = with_rules(world, host_bytes=2 * COPY, disk_bytes=0)
        await world.residency.open()
    await world.add("a", "b")
    for job in ("a", "b"):
        await world.train(job)
        await world.residency.store(job)
    states = {job: await bits(world.backends[job]) for job in ("a", "b")}
    if full != "limits":

        def no_room(opened: int, _: int, __: int) -> None:
            path = Path(f"/proc/self/fd/{opened}").resolve()
            if full == "both" or path.parent != world.directory / "parked":
                raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(parked_files.os, "posix_fallocate", no_room)
    count = len(files(world))
    await world.train("a", seed=2)
    if full == "host":
        await world.residency.park("a")
        assert world.tier("a") == "disk"
    else:
        with pytest.raises(NoRoomToPark, match=r"job 'a'.*host_bytes or disk_bytes"):
            await world.residency.park("a")
        with pytest.raises(NoRoomToPark):
            await world.residency.store("a")
        assert world.tier("a") == "budget"
        assert len(files(world)) == count
        found = await world.residency.find_parked("a")
        assert found is not None and found.steps == 1
    await world.residency.park("b")
    await world.residency.make_resident("b")
    assert await bits(world.backends["b"]) == states["b"]
    await world.residency.make_resident("a")
    await world.train("a", seed=3)


async def test_a_full_budget_whose_bundles_cannot_be_parked_keeps_them_and_refuses_the_newcomer(world: World) -> None:
    world = with_rules(world, host_bytes=0, disk_bytes=0)
    await world.residency.open()
    await world.add("a", "b")
    with pytest.raises(NoRoomToPark):
        await world.add("c")
    assert [world.tier(job) for job in "ab"] == ["budget", "budget"]
    assert len(world.residency.report().bundles) == 2
    await world.train("a")


async def test_relief_brings_host_memory_below_its_high_water(world: World) -> None:
    world = with_rules(world, host_bytes=4 * COPY, budget_bytes=4 * RESIDENT)
    await world.residency.open()
    await world.add(*"abcd")
    for job in "abcd":
        await world.train(job)
        await world.residency.park(job)
    assert world.residency.report().host_bytes == 4 * COPY
    await world.residency.relieve()
    assert [world.tier(job) for job in "abcd"] == ["disk", "host", "host", "host"]
    await world.residency.relieve()
    assert world.residency.report().demoted == 1


async def test_prefetch_uses_room_that_is_there_and_moves_nobody(world: World) -> None:
    world = with_rules(world, host_bytes=2 * COPY)
    await world.residency.open()
    await world.add("a", "b")
    await world.residency.park("a")
    await world.residency.prefetch("a")
    assert world.tier("a") == "budget"
    await world.add("c", "d")
    assert [world.tier(job) for job in "abcd"] == ["host", "host", "budget", "budget"]
    await world.residency.make_resident("a")
    assert sorted(world.tier(job) for job in "abcd") == ["budget", "budget", "disk", "host"]
    before = {job: world.tier(job) for job in "abcd"}
    (parked,) = (job for job, tier in before.items() if tier == "disk")
    await world.residency.prefetch(parked)
    report = world.residency.report()
    assert {job: world.tier(job) for job in "abcd"} in (before, before | {parked: "host"})
    assert report.budget_bytes == 2 * RESIDENT
    assert report.host_bytes <= 2 * COPY


async def test_after_a_move_that_takes_too_long_nothing_is_moved_and_the_next_life_has_what_was_stored(
    world: World,
) -> None:
    world = with_rules(world)
    world.residency._rules = dataclasses.replace(world.rules, move_timeout_s=0.05)
    await world.residency.open()
    await world.add("a")
    await world.train("a")
    await world.residency.store("a")
    await world.train("a", seed=2)

    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    world.backends["a"].copy_out = never  # type: ignore[method-assign, assignment]
    with pytest.raises(MoveStuck, match="service_move_timeout_s"):
        await world.residency.park("a")
    with pytest.raises(MoveStuck, match="must start again"):
        await world.residency.make_resident("a")
    await world.killed_and_started()
    found = await world.residency.find_parked("a")
    assert found is not None and found.steps == 1


async def test_a_caller_that_is_cancelled_leaves_a_move_that_ends(world: World) -> None:
    await world.add("a")
    await world.train("a")
    entered, go_on = asyncio.Event(), asyncio.Event()
    copy_out = world.backends["a"].copy_out

    async def slow(*args: object) -> object:
        entered.set()
        await go_on.wait()
        return await copy_out(*args)  # type: ignore[arg-type]

    world.backends["a"].copy_out = slow  # type: ignore[method-assign, assignment]
    parking = asyncio.create_task(world.residency.park("a"))
    await entered.wait()
    parking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await parking
    resuming = asyncio.create_task(world.residency.make_resident("a"))
    go_on.set()
    await resuming
    assert (world.residency.report().parked, world.residency.report().resumed) == (1, 1)


async def test_the_failure_of_a_move_that_nobody_waits_for_any_more_is_nobodys_surprise(world: World) -> None:
    await world.add("a")
    await world.train("a")
    surprises: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: surprises.append(context))
    entered, go_on = asyncio.Event(), asyncio.Event()

    async def fails(*_: object) -> None:
        entered.set()
        await go_on.wait()
        raise NoRoomToPark("full")

    world.backends["a"].copy_out = fails  # type: ignore[method-assign, assignment]
    parking = asyncio.create_task(world.residency.park("a"))
    await entered.wait()
    parking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await parking
    go_on.set()
    while world.residency._moves:
        await asyncio.sleep(0)
    gc.collect()
    assert surprises == []
