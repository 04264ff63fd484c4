"""Which workers start and which leave, as a table."""

from __future__ import annotations

import pytest

from actors.policies.pool.placing import Leave, NodeSlot, Placing, PlacingView, PoolNode, by_number, decide

A, B = PoolNode("a", ("w-a", "w-a.1")), PoolNode("b", ("w-b",))
GOES = PoolNode("a", ("w-a", "w-a.1"), leaves_s=30.0)
ALL = {"w-a", "w-a.1", "w-b"}
ON_A = [NodeSlot("w-a", "a"), NodeSlot("w-a.1", "a")]
ON_B = [NodeSlot("w-b", "b")]


@pytest.mark.parametrize(
    ("view", "granted", "placing"),
    [
        pytest.param(PlacingView([A, B], {}), ALL, Placing([], ON_A + ON_B), id="machines have joined"),
        pytest.param(PlacingView([B, A], {}), ALL, Placing([], ON_B + ON_A), id="in the order of their joining"),
        pytest.param(PlacingView([A], {"w-a": "a"}), {"w-a"}, Placing([], ON_A[:1]), id="who runs stays"),
        pytest.param(PlacingView([B], {"w-a": "a"}), ALL, Placing([Leave("w-a", None)], ON_B), id="a machine is gone"),
        pytest.param(
            PlacingView([GOES], {"w-a": "a"}), ALL, Placing([Leave("w-a", 20.0)], []), id="a machine is told to go"
        ),
        pytest.param(
            PlacingView([A], {"w-a": "a", "w-a.1": "a"}), {"w-a"}, Placing([Leave("w-a.1", 0.0)], ON_A[:1]),
            id="a slot is granted no longer",
        ),
        pytest.param(
            PlacingView([A, B], {"w-a": "a"}, {"a"}), {"w-b"}, Placing([], ON_B),
            id="on a machine that is passed over nothing starts, and what runs goes on",
        ),
        pytest.param(
            PlacingView([GOES], {"w-a": "a"}, {"a"}), set[str](), Placing([Leave("w-a", 20.0)], []),
            id="also there it leaves with its machine",
        ),
    ],
)  # fmt: skip
def test_workers_follow_the_machines(view: PlacingView, granted: set[str], placing: Placing) -> None:
    assert decide(view, granted, now_s=10.0) == placing


def test_machines_that_go_or_are_passed_over_offer_no_slots() -> None:
    assert PlacingView([GOES, B], {}).slots() == ON_B
    assert PlacingView([A, B], {}, {"b"}).slots() == ON_A


@pytest.mark.parametrize(
    ("present", "wanted", "start", "leave"),
    [
        (set[str](), 2, [0, 1], list[str]()),
        ({"rollout-0", "rollout-2"}, 2, [1], ["rollout-2"]),
        ({"rollout-0", "rollout-1"}, 0, [], ["rollout-0", "rollout-1"]),
        ({"rollout-0"}, 1, [], []),
    ],
)
def test_workers_on_machines_that_stay_have_the_lowest_numbers(
    present: set[str], wanted: int, start: list[int], leave: list[str]
) -> None:
    assert by_number(present, wanted) == (start, leave)
