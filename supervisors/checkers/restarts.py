"""Supervision: no supervisor restarted more often than its budget allows, and one that gave up stayed so."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Final

from supervisors.checkers.history import History, Row, Violation
from supervisors.checkers.replay import Replay
from supervisors.tree.restart_budget import ExitCause, counts

RESTARTS: Final = "restarts"
_CLOCK_SLACK_S: Final = 1.0
"""Seconds between a supervisor's decision and its line in the file, where only the latter has a time."""


def check_restarts(history: History, replay: Replay) -> Iterator[Violation]:
    """At most ``limits.restart_max`` counted restarts within ``limits.restart_window_s``, a supervisor at a time."""
    limits = history.job.limits
    recent: dict[str, deque[float]] = defaultdict(deque)
    gave_up: set[str] = set()
    life: object = None
    for row in history.named("child_restarting", "child_gave_up", "child_started"):
        supervisor = str(row.get("supervisor", ""))
        if row["event"] == "child_started":
            if supervisor.startswith("core.") and row.get("incarnation") != life:
                life = row.get("incarnation")  # another head: its supervisors begin anew
                recent.clear()
                gave_up.clear()
            continue
        if row["event"] == "child_gave_up":
            gave_up.add(supervisor)
            continue
        if supervisor in gave_up:
            yield Violation(checker=RESTARTS, what=f"{supervisor} had given up, and restarted {row.get('child')}")
        if not _counts(row, recent[supervisor]):
            continue
        now_s, slack_s = _time(row)
        exits = recent[supervisor]
        exits.append(now_s)
        while exits and exits[0] <= now_s - limits.restart_window_s + slack_s:
            exits.popleft()
        if len(exits) > limits.restart_max:
            what = f"{supervisor} made {len(exits)} restarts within {limits.restart_window_s:g} s"
            yield Violation(
                checker=RESTARTS, what=f"{what}, the last of {row.get('child')}; {limits.restart_max} are allowed"
            )
            exits.clear()


def _counts(row: Row, before: deque[float]) -> bool:
    """Whether this restart is held against the budget. A lost node costs one, however many children it had."""
    cause = str(row.get("cause", ""))
    if cause not in set(ExitCause) or not counts(ExitCause(cause)):
        return False
    return cause != ExitCause.UNREACHABLE or not before or _time(row)[0] - before[-1] > _CLOCK_SLACK_S


def _time(row: Row) -> tuple[float, float]:
    """When it was, and by how much that may be wrong; the supervisor's own clock if it was recorded."""
    if "at_s" in row:
        return float(row["at_s"]), 0.0
    return float(row.get("time_s", 0.0)), _CLOCK_SLACK_S
