"""Which functions end and how many are ordered, as a table; their lives are played in tests/supervisors/pool."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest

from actors.policies.pool.functions import FunctionEnd, FunctionRules, FunctionsView, ends, lacking

RULES = FunctionRules(
    least=1, most=4, join_s=10.0, start_s=30.0, idle_s=5.0, asleep_price=0.5, prewarm_buffer_s=1.0
)  # fmt: skip


@dataclass(frozen=True)
class Fact:
    node: str
    state: Literal["starting", "awake", "asleep"] = "awake"
    since_s: float = 0.0
    joined: bool = True


def view(*there: Fact, **changes: Any) -> FunctionsView:
    return replace(FunctionsView(there, 0, 0, None, (), (), 0.0), **changes)


LATE = FunctionEnd("f", "is not ready in time", missed=True)
LOST = FunctionEnd("f", "is lost", missed=True)
IDLE = FunctionEnd("f", "idle", missed=False)


@pytest.mark.parametrize(
    ("function", "changes", "now", "ended"),
    [
        (Fact("f", "starting", joined=False), {}, 9.9, []),
        (Fact("f", "starting", joined=False), {}, 10.0, [LATE]),
        (Fact("f", "starting", joined=False), {"adopted_until_s": 12.0}, 11.9, []),
        (Fact("f", "starting"), {}, 29.9, []),
        (Fact("f", "starting"), {}, 30.0, [LATE]),
        (Fact("f"), {}, 1e9, []),
        (Fact("f", joined=False), {"adopted_until_s": 12.0}, 12.0, [LOST]),
        (Fact("f", "asleep"), {}, 4.9, []),
        (Fact("f", "asleep"), {}, 5.0, [IDLE]),
    ],
)
def test_a_function_ends_when_it_is_late_or_lost_or_idle(
    function: Fact, changes: dict[str, Any], now: float, ended: list[FunctionEnd]
) -> None:
    assert ends(RULES, view(Fact("other"), function, **changes), now) == ended


def test_the_least_number_sleeps_on_and_so_does_who_would_be_ordered_again() -> None:
    asleep = [Fact(name, "asleep") for name in "abc"]
    assert [end.node for end in ends(RULES, view(*asleep), 5.0)] == ["a", "b"]
    soon = {"planned": 3, "ended_s": 0.0, "gaps_s": (6.0,), "starts_s": (2.0,)}
    assert ends(RULES, view(*asleep, **soon), 5.0) == []


def test_without_a_time_a_function_may_sleep_for_what_a_start_costs() -> None:
    rules = replace(RULES, idle_s=None)
    both = view(Fact("a", "asleep"), Fact("b"), starts_s=(3.0, 5.0))
    assert ends(rules, both, 7.9) == []
    assert [end.node for end in ends(rules, both, 8.0)] == ["a"]
    assert ends(rules, replace(both, starts_s=()), 1e9) == [], "nothing is known of starts"


@pytest.mark.parametrize(
    ("there", "changes", "ordered"),
    [
        ([], {}, 1),
        ([Fact("a")], {}, 0),
        ([Fact("a")], {"want": 3}, 2),
        ([Fact("a", "asleep")], {"want": 1}, 1),
        ([Fact("a")], {"want": 9}, 3),
        ([Fact("a")], {"planned": 3, "ended_s": 0.0, "gaps_s": (6.0,), "starts_s": (2.0,)}, 2),
        ([Fact("a")], {"planned": 3, "ended_s": 4.0, "gaps_s": (6.0,), "starts_s": (2.0,)}, 0),
        ([Fact("a")], {"planned": 3, "ended_s": -7.0, "gaps_s": (6.0,), "starts_s": (2.0,)}, 0),
    ],
    ids=["the least", "enough", "more wanted", "who sleeps is not busy", "at most", "prewarmed", "too early", "paused"],
)
def test_what_is_lacking_is_ordered(there: list[Fact], changes: dict[str, Any], ordered: int) -> None:
    assert lacking(RULES, view(*there, **changes), 5.0) == ordered
