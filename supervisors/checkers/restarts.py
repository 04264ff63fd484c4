"""Supervision: no supervisor restarted more often than its budget allows, and one that gave up stayed so.

Rank groups: all members are adopted or none, they start and end together, and a recovery costs one unit of budget.

    child_adopted, child_started ─▶ a member is up        child_exited, child_stopped ─▶ it is gone
    child_restarting, if it counts ─▶ a unit is spent     another head ─▶ nothing is known of what runs

A life of a group begins with its first member and is over when all members that came up in it are gone.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from configs.names import follows, leader_of
from supervisors.checkers.history import History, Row, Violation
from supervisors.checkers.replay import Replay
from supervisors.tree.restart_budget import ExitCause, counts

RESTARTS, GROUPS = "restarts", "groups"
_CLOCK_SLACK_S: Final = 1.0
"""Most seconds between a supervisor's decision and its line in the file; often only the line has a time."""


def check_restarts(history: History, replay: Replay) -> Iterator[Violation]:
    """A supervisor makes at most ``limits.restart_max`` counted restarts within ``limits.restart_window_s``."""
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
    return _is_counted(cause) and (
        cause != ExitCause.UNREACHABLE or not before or _time(row)[0] - before[-1] > _CLOCK_SLACK_S
    )


def _is_counted(cause: str) -> bool:
    return cause in set(ExitCause) and counts(ExitCause(cause))


def _time(row: Row) -> tuple[float, float]:
    """Time of the row and its possible error, in seconds; by the supervisor's own clock if that was recorded."""
    if "at_s" in row:
        return float(row["at_s"]), 0.0
    return float(row.get("time_s", 0.0)), _CLOCK_SLACK_S


# ------------------------------------------------------------ rank groups

_ROWS: Final = (
    "child_adopted", "child_started", "child_exited", "child_stopped", "child_start_failed", "child_restarting",
)  # fmt: skip


@dataclass
class _Group:
    """Keeps what is known of one group under one life of the head."""

    up: dict[str, str] = field(default_factory=dict[str, str])
    """Member → ``child_adopted`` or ``child_started``; all members of this life of the group, gone ones included."""
    gone: set[str] = field(default_factory=set[str])
    spent: int = 0
    """Units of budget since a member was last started, or failed to."""

    def comes(self, name: str, how: str) -> str:
        """Record that a member is up; returns what is wrong with that, empty if nothing."""
        wrong = ""
        self.spent = 0
        if name in self.up and name not in self.gone:  # its end is not in the record
            self.up, self.gone = {}, set()
        elif name in self.gone:
            wrong = f"{name} was started again, while {_listed(self.up.keys() - self.gone)} went on"
            self.gone.discard(name)
        elif set(self.up.values()) - {how}:
            wrong = f"{name} was {_SAID[how]}, and {_listed(self.up.keys())} {_SAID[next(iter(self.up.values()))]}"
        self.up[name] = how
        return wrong

    def goes(self, name: str) -> None:
        """Record that a member is gone."""
        if name in self.up:
            self.gone.add(name)
        if self.gone == self.up.keys():
            self.up, self.gone = {}, set()


_SAID: Final = {"child_adopted": "adopted", "child_started": "started"}


def check_groups(history: History, replay: Replay) -> Iterator[Violation]:
    """A rank group starts, ends and recovers as one. Groups are those of which the record names a follower."""
    leaders = {leader_of(_child(row)) for row in history.named(*_ROWS) if follows(_child(row))}
    groups: dict[str, _Group] = {}
    life: object = None
    for row in history.named(*_ROWS):
        if str(row.get("supervisor", "")).startswith("core."):
            if row["event"] == "child_started" and row.get("incarnation") != life:
                life = row.get("incarnation")  # another head: what it adopts was up before
                groups.clear()
            continue
        name = _child(row)
        if (leader := leader_of(name)) not in leaders:
            continue
        group = groups.setdefault(leader, _Group())
        for wrong in _wrong(group, name, row):
            yield Violation(checker=GROUPS, what=f"of the group of {leader}, {wrong}", worker=leader)


def _wrong(group: _Group, name: str, row: Row) -> Iterator[str]:
    match row["event"]:
        case "child_adopted" | "child_started":
            if wrong := group.comes(name, row["event"]):
                yield wrong
        case "child_exited" | "child_stopped":
            group.goes(name)
        case "child_start_failed":
            group.spent = 0
        case _:
            group.spent += _is_counted(str(row.get("cause", "")))
            if group.spent > 1:
                yield f"the end of {name} cost a unit of budget, though a recovery under way had cost one"


def _child(row: Row) -> str:
    return str(row.get("child", ""))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
