"""Decides which other children are stopped and started when one ends: pure functions over names.

Invariants
- Children stop in reverse start order and start in start order.
- A child that is stopped for a sibling's sake is started again, unless it is temporary.
- A *group* shares its fate whatever the strategy: an end stops the others, and all of them start again, or none.
- No clock, no I/O: ``decide`` sees a tuple of child views and returns a plan.

    one_for_one     a b [c] d e      stop -        start c
    c and d grouped a b [c] d e      stop d        start c d
    rest_for_one    a b [c] d e      stop e d      start c d e
    one_for_all     a b [c] d e      stop e d b a  start a b c d e
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from supervisors.tree.restart_budget import ExitCause, RestartPolicy, is_restarted


class Strategy(enum.StrEnum):
    """Says which siblings one child's end affects."""

    ONE_FOR_ONE = "one_for_one"
    """Children are independent, or groups of them are: a rollout fleet, a trainer and its ranks."""
    ONE_FOR_ALL = "one_for_all"
    """Children only work together."""
    REST_FOR_ONE = "rest_for_one"
    """Later children depend on earlier ones: the parts of a job."""


@dataclass(frozen=True)
class ChildView:
    """Holds what a decision needs to know of one child."""

    name: str
    restart: RestartPolicy
    running: bool
    """Flag that the child runs or is being started, so that it must be stopped before it is started again."""
    group: str = ""
    """Name of the child's group, under one_for_one; empty: it has none."""


@dataclass(frozen=True)
class Plan:
    """Lists the children to stop and to start after an end, each in that order."""

    stop: tuple[str, ...] = ()
    start: tuple[str, ...] = ()


def reach(strategy: Strategy, children: Sequence[ChildView], failed: str) -> tuple[str, ...]:
    """The children that share the fate of ``failed``, itself included, in start order."""
    names = [child.name for child in children]
    if strategy is Strategy.ONE_FOR_ONE:
        group = children[names.index(failed)].group
        return tuple(child.name for child in children if child.group == group) if group else (failed,)
    if strategy is Strategy.ONE_FOR_ALL:
        return tuple(names)
    return tuple(names[names.index(failed) :])


def decide(strategy: Strategy, children: Sequence[ChildView], failed: str, cause: ExitCause) -> Plan:
    """Decide what to stop and start now that ``failed`` has ended by ``cause``.

    Args:
        children: all children in start order.

    Raises:
        KeyError: ``failed`` is not a child.
    """
    by_name = {child.name: child for child in children}
    child = by_name[failed]
    shared = reach(strategy, children, failed)
    stop = tuple(name for name in reversed(shared) if name != failed and by_name[name].running)
    grouped = strategy is Strategy.ONE_FOR_ONE and bool(child.group)
    if not is_restarted(child.restart, cause):
        return Plan(stop=stop) if grouped else Plan()
    start = tuple(name for name in shared if name == failed or grouped or _comes_back(by_name[name]))
    return Plan(stop=stop, start=start)


def _comes_back(child: ChildView) -> bool:
    """Whether a sibling that is stopped is started again: not if it had ended for good before, or is temporary."""
    return child.running and child.restart is not RestartPolicy.TEMPORARY
