"""Rank groups: all of one are adopted or none, they come and go together, and one recovery costs one unit of budget.

    child_adopted, child_started ─▶ a member is up        child_exited, child_stopped ─▶ it is gone
    child_restarting, if it counts ─▶ a unit is spent     another head ─▶ nothing is known of what runs

A life of a group begins with its first member and is over when all that came up in it are gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from configs.names import follows, leader_of
from supervisors.checkers.history import History, Row, Violation
from supervisors.checkers.replay import Replay
from supervisors.tree.restart_budget import ExitCause, counts

GROUPS: Final = "groups"
_ROWS: Final = (
    "child_adopted", "child_started", "child_exited", "child_stopped", "child_start_failed", "child_restarting",
)  # fmt: skip


@dataclass
class _Group:
    """Keeps what is known of one group, under one head."""

    up: dict[str, str] = field(default_factory=dict[str, str])
    """Member of this life of the group → ``child_adopted`` or ``child_started``, also of members that are gone."""
    gone: set[str] = field(default_factory=set[str])
    spent: int = 0
    """Units of budget since a member was last started, or failed to."""

    def comes(self, name: str, how: str) -> str:
        """A member is up; what is wrong with that."""
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
        """A member is gone."""
        if name in self.up:
            self.gone.add(name)
        if self.gone == self.up.keys():
            self.up, self.gone = {}, set()


_SAID: Final = {"child_adopted": "adopted", "child_started": "started"}


def check_groups(history: History, replay: Replay) -> Iterator[Violation]:
    """Groups are those of which a follower is named in the record."""
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
            cause = str(row.get("cause", ""))
            group.spent += cause in set(ExitCause) and counts(ExitCause(cause))
            if group.spent > 1:
                yield f"the end of {name} cost a unit of budget, though a recovery under way had cost one"


def _child(row: Row) -> str:
    return str(row.get("child", ""))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
