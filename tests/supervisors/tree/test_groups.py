"""Groups of children under one_for_one: they end together, start together, and are counted as one child."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from actors.core.context import Context
from supervisors.tree.children import ChildSpec, Running
from supervisors.tree.errors import SupervisorGaveUp
from supervisors.tree.restart_budget import ExitCause, RestartPolicy
from supervisors.tree.strategies import Strategy
from tests.supervisors.tree.test_supervisor import LIMITS, End, House


class GroupHouse(House):
    """``a`` stands alone; ``f`` and ``l`` are a group, of which ``l`` leads."""

    def __init__(self, names: str = "afl", **options: Any) -> None:
        super().__init__(Strategy.ONE_FOR_ONE, names, **options)

    def spec(self, name: str) -> ChildSpec:
        spec = super().spec(name)
        return dataclasses.replace(spec, group="group" if name in "fl" else "")

    async def end_both(self, turns: int) -> None:
        """``f`` ends, and ``l`` so many turns of the loop later, if it has not been stopped by then."""
        running = self.supervisor.running("l")
        assert running is not None
        self.end("f")
        for _ in range(turns):
            await asyncio.sleep(0)
        self.system.ref(running.address).tell(End(how="crash"))

    def told(self, kind: str) -> list[str]:
        return [event.child for event in self.events if event.kind == kind]


async def test_the_end_of_one_restarts_its_group_and_leaves_others_alone():
    async with GroupHouse() as house:
        await house.supervisor.ready(5)
        house.diary.clear()
        house.end("f")
        await house.until("started", "f", 2)
        await house.until("started", "l", 2)
        assert house.diary[:2] == ["-f", "-l"] and sorted(house.diary[2:]) == ["+f", "+l"]
        assert house.told("restarting") == ["f"]


async def test_two_ends_at_once_are_one_recovery_and_one_unit_of_budget():
    async with GroupHouse() as house:
        for count in range(1, LIMITS.restart_max + 1):
            await house.until("started", "f", count)
            await house.until("started", "l", count)
            house.supervisor.progressed()
            house.end("f")
            house.end("l")
        await house.until("started", "f", LIMITS.restart_max + 1)
        await house.until("started", "l", LIMITS.restart_max + 1)
        assert len(house.told("restarting")) == LIMITS.restart_max
        assert house.diary.count("+f") == house.diary.count("+l") == LIMITS.restart_max + 1


@pytest.mark.parametrize("turns", range(6))
async def test_ends_a_few_turns_of_the_loop_apart_are_one_recovery_too(turns: int):
    async with GroupHouse() as house:
        await house.supervisor.ready(5)
        await house.end_both(turns)
        await house.until("started", "f", 2)
        await house.until("started", "l", 2)
        assert len(house.told("restarting")) == 1
        await asyncio.sleep(LIMITS.backoff_max_s)
        assert house.diary.count("+f") == house.diary.count("+l") == 2


async def test_a_group_whose_members_fail_in_turn_is_in_one_crash_loop():
    async with GroupHouse(limits=LIMITS.model_copy(update={"restart_window_s": 1e-6})) as house:
        for count in range(1, LIMITS.restart_max + 2):
            await house.until("started", "f", count)
            await house.until("started", "l", count)
            house.end("fl"[count % 2])
        end = await house.system.wait_stopped("fleet")
        assert "it ended 4 times in a row without a step in between" in str(end.error)


async def test_an_end_that_is_held_against_nobody_lends_its_excuse_to_no_crash():
    """A member that is preempted and one that crashes at the same time: the crash is counted."""
    async with GroupHouse() as house:
        for count in range(1, LIMITS.restart_max + 2):
            await house.until("started", "f", count)
            await house.until("started", "l", count)
            house.supervisor.progressed()
            house.end("f", "preempted")
            house.end("l")
        end = await house.system.wait_stopped("fleet")
        assert "3 restarts in 60 s are used up" in str(end.error)


async def test_a_permanent_error_of_the_second_to_end_is_met_once():
    async with GroupHouse() as house:
        await house.supervisor.ready(5)
        house.end("f")
        house.end("l", "for good")
        end = await house.system.wait_stopped("fleet")
        assert "gave up on l: NoSuchModel: model.path: nothing is there" in str(end.error)
        assert house.diary.count("+l") == 1


async def test_members_start_at_once_and_a_start_that_waits_for_another_is_given_up_when_that_one_has_ended():
    """The leader is ready once it has met the follower, which ends before that."""
    async with GroupHouse("") as house:
        met = asyncio.Event()
        given_up: list[str] = []
        leader = house.spec("l")

        async def start(context: Context) -> Running:
            try:
                await met.wait()
            except asyncio.CancelledError:
                given_up.append("l")
                raise
            return await leader.start(context)

        house.supervisor.add_children([house.spec("f"), dataclasses.replace(leader, start=start)])
        await house.until("started", "f")
        assert house.told("started") == ["f"]
        house.end("f")
        await house.until("started", "f", 2)
        met.set()
        await house.until("started", "l")
        assert given_up == ["l"] and house.told("start_failed") == []


async def test_a_member_that_cannot_start_has_the_others_begin_anew_with_it():
    async with GroupHouse("") as house:
        fails = [True]
        follower = house.spec("f")

        async def start(context: Context) -> Running:
            if fails[0]:
                fails[0] = False
                raise OSError("no room")
            return await follower.start(context)

        house.supervisor.add_children([dataclasses.replace(follower, start=start), house.spec("l")])
        await house.until("started", "f")
        await house.supervisor.ready(5)
        assert house.diary.count("+l") - house.diary.count("-l") == 1
        assert {info.state for info in house.supervisor.snapshot()} == {"running"}


@pytest.mark.parametrize("restart", [RestartPolicy.PERMANENT, RestartPolicy.TEMPORARY])
@pytest.mark.parametrize("first", ["f", "l"])
async def test_a_start_that_fails_at_once_cuts_that_of_the_other_whose_end_is_told_if_it_stays_away(
    first: str, restart: RestartPolicy
):
    """The other one is ready once it has met the one that fails."""
    async with GroupHouse("", f={"restart": restart}, l={"restart": restart}) as house:
        fails, met = [True], asyncio.Event()
        one, other = house.spec(first), house.spec("fl".replace(first, ""))

        async def start(context: Context) -> Running:
            if fails[0]:
                fails[0] = False
                raise OSError("no room")
            met.set()
            return await one.start(context)

        async def meet(context: Context) -> Running:
            await met.wait()
            return await other.start(context)

        house.supervisor.add_children([dataclasses.replace(one, start=start), dataclasses.replace(other, start=meet)])
        if restart is RestartPolicy.PERMANENT:
            await house.until("started", first)
        else:
            await house.until("ended", other.name)
            assert sorted(house.told("ended")) == ["f", "l"] and house.diary == []
        async with asyncio.timeout(1):
            await house.supervisor.ready(5)


async def test_who_ends_for_good_takes_its_group_along():
    async with GroupHouse(f={"restart": RestartPolicy.TRANSIENT}, l={"restart": RestartPolicy.TRANSIENT}) as house:
        await house.supervisor.ready(5)
        house.end("l", "completed")
        assert (await house.until("ended", "f")).cause is ExitCause.COMPLETED
        assert house.supervisor.running("f") is None and house.supervisor.running("a") is not None
        await house.supervisor.ready(5)


async def test_of_a_temporary_group_each_is_told_to_have_ended_by_the_same_cause():
    async with GroupHouse(f={"restart": RestartPolicy.TEMPORARY}, l={"restart": RestartPolicy.TEMPORARY}) as house:
        await house.supervisor.ready(5)
        house.end("f")
        assert (await house.until("ended", "l")).cause is ExitCause.CRASHED
        await house.supervisor.remove_child("l")
        house.supervisor.add_children([house.spec("f"), house.spec("l")])
        await house.until("started", "l", 2)
        await house.until("started", "f", 2)


@pytest.mark.parametrize("turns", range(6))
async def test_whoever_of_a_temporary_group_ends_first_each_end_is_told_once(turns: int):
    async with GroupHouse(f={"restart": RestartPolicy.TEMPORARY}, l={"restart": RestartPolicy.TEMPORARY}) as house:
        await house.supervisor.ready(5)
        await house.end_both(turns)
        await house.until("ended", "l")
        await asyncio.sleep(1)
        assert house.told("ended") == ["f", "l"]


async def test_a_group_is_removed_by_the_name_of_any_member_its_last_one_first():
    async with GroupHouse() as house:
        await house.supervisor.ready(5)
        house.diary.clear()
        await house.supervisor.remove_child("l")
        assert house.diary == ["-l", "-f"]
        assert [info.name for info in house.supervisor.snapshot()] == ["a"]


async def test_a_group_that_is_removed_while_it_starts_leaves_nothing_behind():
    async with GroupHouse("") as house:
        started = asyncio.Event()

        async def start(_: Context) -> Running:
            started.set()
            await asyncio.Event().wait()
            raise AssertionError

        house.supervisor.add_children([house.spec("f"), dataclasses.replace(house.spec("l"), start=start)])
        await started.wait()
        await house.until("started", "f")
        async with asyncio.timeout(1):
            await house.supervisor.remove_child("l")
        assert house.diary == ["+f", "-f"] and house.supervisor.snapshot() == []


@pytest.mark.parametrize("how", ["removed", "shut down", "recovered"])
@pytest.mark.parametrize("turns", range(4))
async def test_a_start_that_succeeds_as_it_is_given_up_is_stopped_before_anybody_goes_on(how: str, turns: int):
    """``l`` is ready in the very turn of the loop in which its group ends, or a few later."""
    async with GroupHouse("") as house:
        ready = asyncio.get_running_loop().create_future()
        leader, lives, alive = house.spec("l"), [ready], list[str]()

        async def stop(deadline_s: float, cause: ExitCause) -> None:
            await asyncio.sleep(0.05)
            alive.remove("first")

        async def start(context: Context) -> Running:
            if not lives:
                assert alive == []
                return await leader.start(context)
            await lives.pop()
            alive.append("first")
            return Running(context.self_address, stop, pid=1, node="here", incarnation=1)

        house.supervisor.add_children([house.spec("f"), dataclasses.replace(leader, start=start)])
        await house.until("started", "f")
        ending = None
        if how == "recovered":
            house.end("f")
        else:
            end = house.supervisor.remove_child("f") if how == "removed" else house.supervisor.shutdown()
            ending = asyncio.create_task(end)
        for _ in range(turns):
            await asyncio.sleep(0)
        if not ready.done():
            ready.set_result(None)
        if ending is not None:
            await ending
        else:
            await house.until("started", "f", 2)
            await house.until("started", "l")
            assert "l" in house.system.actors()
        assert alive == []


@pytest.mark.parametrize("turns", range(6))
async def test_a_group_that_is_removed_as_its_start_begins_is_not_started_later(turns: int):
    async with GroupHouse("") as house:
        begun: list[str] = []

        def spec(name: str) -> ChildSpec:
            async def start(_: Context) -> Running:
                begun.append(name)
                await asyncio.Event().wait()
                raise AssertionError

            return dataclasses.replace(house.spec(name), start=start)

        house.supervisor.add_children([spec("f"), spec("l")])
        for _ in range(turns):
            await asyncio.sleep(0)
        async with asyncio.timeout(1):
            await house.supervisor.remove_child("l")
        were_begun = list(begun)
        await asyncio.sleep(0.05)
        assert begun == were_begun and house.supervisor.snapshot() == []


async def test_a_group_that_gives_up_stops_everybody():
    async with GroupHouse() as house:
        await house.supervisor.ready(5)
        house.end("f", "for good")
        end = await house.system.wait_stopped("fleet")
        assert isinstance(end.error, SupervisorGaveUp)
        assert all(house.diary.count(f"+{name}") == house.diary.count(f"-{name}") for name in "afl")
        with pytest.raises(SupervisorGaveUp):
            await house.supervisor.ready(5)
