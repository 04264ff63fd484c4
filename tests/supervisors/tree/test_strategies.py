"""Restart decisions as pure functions, with their general laws by hypothesis."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisors.tree.restart_budget import ExitCause, RestartPolicy
from supervisors.tree.strategies import ChildView, Plan, Strategy, decide


def _children(names: str = "abcde", **changes: dict) -> list[ChildView]:
    base = {"restart": RestartPolicy.PERMANENT, "running": True}
    return [ChildView(**{"name": n, **base, **changes.get(n, {})}) for n in names]


@pytest.mark.parametrize(
    ("strategy", "stop", "start"),
    [
        (Strategy.ONE_FOR_ONE, "", "c"),
        (Strategy.REST_FOR_ONE, "ed", "cde"),
        (Strategy.ONE_FOR_ALL, "edba", "abcde"),
    ],
)
def test_a_crash_reaches_as_far_as_the_strategy_says(strategy, stop, start):
    plan = decide(strategy, _children(c={"running": False}), "c", ExitCause.CRASHED)
    assert plan == Plan(stop=tuple(stop), start=tuple(start))


def test_a_child_that_ended_for_good_disturbs_nobody():
    children = _children(c={"running": False, "restart": RestartPolicy.TRANSIENT})
    assert decide(Strategy.ONE_FOR_ALL, children, "c", ExitCause.COMPLETED) == Plan()
    assert decide(Strategy.ONE_FOR_ALL, _children(), "c", ExitCause.STOPPED) == Plan()


def test_temporary_siblings_are_stopped_and_stay_away():
    children = _children(c={"running": False}, d={"restart": RestartPolicy.TEMPORARY})
    assert decide(Strategy.REST_FOR_ONE, children, "c", ExitCause.KILLED) == Plan(("e", "d"), ("c", "e"))


def test_the_end_of_one_of_a_group_reaches_all_of_it_and_nobody_else():
    children = _children(b={"group": "g"}, c={"group": "g", "running": False}, e={"group": "g"})
    assert decide(Strategy.ONE_FOR_ONE, children, "c", ExitCause.CRASHED) == Plan(("e", "b"), ("b", "c", "e"))
    assert decide(Strategy.ONE_FOR_ONE, children, "a", ExitCause.CRASHED) == Plan((), ("a",))


@given(
    st.lists(st.tuples(st.sampled_from(RestartPolicy), st.booleans(), st.sampled_from(["", "g", "h"])), min_size=1),
    st.data(),
    st.sampled_from(ExitCause),
)
def test_a_group_is_stopped_whole_and_started_whole_or_not_at_all(kinds, data, cause):
    failed = data.draw(st.integers(0, len(kinds) - 1))
    views = [
        ChildView(f"c{i}", policy, running and i != failed, group) for i, (policy, running, group) in enumerate(kinds)
    ]
    plan = decide(Strategy.ONE_FOR_ONE, views, f"c{failed}", cause)
    group = views[failed].group
    circle = {view.name for view in views if group and view.group == group} | {f"c{failed}"}
    assert set(plan.stop) == {view.name for view in views if view.running} & circle
    assert set(plan.start) in (circle, set())


def test_an_unknown_child_is_refused():
    with pytest.raises(KeyError):
        decide(Strategy.ONE_FOR_ONE, _children(), "z", ExitCause.CRASHED)


@given(
    st.sampled_from(Strategy),
    st.lists(st.tuples(st.sampled_from(RestartPolicy), st.booleans()), min_size=1, max_size=8),
    st.integers(0, 7),
    st.sampled_from(ExitCause),
)
def test_stops_are_in_reverse_order_and_no_running_child_is_started_without_a_stop(strategy, kinds, failed, cause):
    failed %= len(kinds)
    children = [ChildView(f"c{i}", policy, running and i != failed) for i, (policy, running) in enumerate(kinds)]
    plan = decide(strategy, children, f"c{failed}", cause)
    order = [c.name for c in children]
    running = {c.name for c in children if c.running}
    assert list(plan.stop) == sorted(plan.stop, key=order.index, reverse=True)
    assert list(plan.start) == sorted(plan.start, key=order.index)
    assert set(plan.stop) <= running
    assert set(plan.start) & running <= set(plan.stop)
