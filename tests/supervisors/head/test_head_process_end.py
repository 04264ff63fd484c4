"""The end of a head's work is told, also where the link to the machine process breaks just then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from actors.core.errors import AskError, RemoteError, SentNoReply
from configs.limits import Limits
from supervisors.head.head_messages import HeadEnded, HeadHeard
from supervisors.head.head_process import Reporter
from tests.simulated import run_simulated


class Keeper:
    """Answers after so many failures."""

    def __init__(self, *failures: AskError) -> None:
        self.failures = list(failures)
        self.heard: list[HeadEnded] = []

    async def ask(self, news: HeadEnded, reply: type[HeadHeard]) -> HeadHeard:
        if self.failures:
            raise self.failures.pop(0)
        self.heard.append(news)
        return reply()


def reporter(keeper: Keeper) -> Reporter:
    system = SimpleNamespace(ref=lambda address: keeper)
    head = SimpleNamespace(system=system, nodes=None, endpoint="memory://head", limits=Limits())
    return Reporter(cast("Any", head), cast("Any", SimpleNamespace(keeper="keeper", life=3)))


def lost() -> SentNoReply:
    return SentNoReply("the link is down")


def test_the_end_is_told_again_until_the_link_is_there_once_more() -> None:
    keeper = Keeper(lost(), lost(), lost())
    run_simulated(reporter(keeper).ended({"state": "finished"}))
    assert [news.summary for news in keeper.heard] == [{"state": "finished"}]


def test_a_machine_process_that_stays_away_is_told_of_within_the_grace_of_a_link() -> None:
    keeper = Keeper(*(lost() for _ in range(1000)))
    with pytest.raises(SentNoReply):
        run_simulated(reporter(keeper).ended({}))
    assert keeper.failures


def test_an_error_that_no_repeat_can_cure_is_raised_at_once() -> None:
    keeper = Keeper(RemoteError("TypeError", "no such field", declared=False), lost())
    with pytest.raises(RemoteError):
        run_simulated(reporter(keeper).ended({}))
    assert len(keeper.failures) == 1
