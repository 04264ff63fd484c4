"""Bugs of rank groups, planted as those of ``planted_bugs.py``."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from actors.protocol.ranks import FollowLeader, RankDone, RankOrder
from actors.ranks.group import GroupFollowers
from actors.ranks.rank import Rank
from supervisors.jobs.adoption import adopt
from supervisors.jobs.group_adoption import GroupAdoption
from supervisors.tree import strategies, supervisor
from supervisors.tree.recovery import Rounds
from supervisors.tree.strategies import Plan
from tests.supervisors.simulation.planted_bugs import Replace

PLANTED: dict[str, Callable[[Replace], None]] = {}
SEEDS: dict[str, int] = {}
"""The first seeds that catch them."""
FOCUS: dict[str, dict[str, Any]] = {}
"""Faults to draw, where those of the scenario would take many seeds."""


def caught_by(seed: int, **focus: Any) -> Callable[[Callable[[Replace], None]], Callable[[Replace], None]]:
    """A bug that the seeds before ``seed`` let pass, of faults that are drawn as ``focus`` says."""

    def plant_it(plant: Callable[[Replace], None]) -> Callable[[Replace], None]:
        PLANTED[plant.__name__], SEEDS[plant.__name__], FOCUS[plant.__name__] = plant, seed, focus
        return plant

    return plant_it


# ------------------------------------------------------------ supervision


@caught_by(1)
def one_member_alone_is_restarted(replace: Replace) -> None:
    right = strategies.decide

    def decide(strategy: Any, children: Any, failed: str, cause: Any) -> Plan:
        return right(strategy, [dataclasses.replace(child, group="") for child in children], failed, cause)

    replace(supervisor, "decide", decide)


@caught_by(2)
def the_end_of_each_member_costs_a_unit_of_budget(replace: Replace) -> None:
    replace(Rounds, "has_failed", lambda self, group: None)


@caught_by(0, kinds=["kill"], roles=["head", "rank"], faults=(6, 10))
def what_is_left_of_a_group_is_adopted(replace: Replace) -> None:
    async def look_for(self: GroupAdoption, context: Any, leader: str, replicas: list[list[str]], *, lent: bool) -> Any:
        found: dict[str, Any] = {}
        for replica in replicas:
            group = [self._process_of(one) for one in replica] if sum(map(len, replicas)) > 1 else []
            for name in replica:
                running = await adopt(context, self._nodes, self._process_of(name), name, group=group, lent=lent)
                if running is not None:
                    found[name] = running
        return found

    replace(GroupAdoption, "_look_for", look_for)


# ------------------------------------------------------------ leaders and followers


@caught_by(1, kinds=["partition", "drop"], roles=["rank"], faults=(6, 10))
def an_order_that_is_repeated_is_taken_twice(replace: Replace) -> None:
    right = Rank.order

    async def order(self: Rank, message: RankOrder) -> RankDone:
        if message.number == self._number:
            self._number, self._done = self._number - 1, None
        return await right(self, message)

    replace(Rank, "order", _handler_like(right, order))


@caught_by(0, kinds=["kill"], roles=["trainer"], faults=(4, 6))
def a_follower_obeys_the_next_life_of_its_leader(replace: Replace) -> None:
    """It is not restarted with its leader, and counts anew."""
    one_member_alone_is_restarted(replace)
    right_follow = Rank.follow

    async def follow(self: Rank, message: FollowLeader) -> None:
        self._leader, self._number, self._done = None, 0, None
        await right_follow(self, message)

    replace(Rank, "follow", _handler_like(right_follow, follow))


@caught_by(8, kinds=["slow", "hang"], roles=["rank"], faults=(6, 10))
def a_leader_goes_on_with_the_first_answer(replace: Replace) -> None:
    right = GroupFollowers._of_all

    async def of_all(self: GroupFollowers, asked: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        if asked[0].__name__ == "_meet":
            return await right(self, asked)
        answers = [asyncio.ensure_future(one) for one in asked]
        for answer in answers:
            answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.wait(answers, timeout=3600.0, return_when=asyncio.FIRST_COMPLETED)
        return [answer.result() for answer in answers if answer.done()]

    replace(GroupFollowers, "_of_all", of_all)


def _handler_like(right: Any, new: Any) -> Any:
    new.__dict__.update(right.__dict__)
    return new
