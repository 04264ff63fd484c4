"""The end of a child, however it was heard, and whether the child is started again after it.

    ProcessExited · Down · a start that raised ─▶ End ─▶ Judge.why_give_up ─▶ "" : start it again
                                                                          └─▶ why not, for people

Invariants
- A permanent error is met once: nobody is started again to meet it a second time.
- The budget, the attempts to start and the crash loop are all asked: each sees what the others do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from actors.core.reason import Reason, reason_of
from actors.core.watch import Down, Gone
from configs.limits import Limits
from supervisors.tree.child_record import Child
from supervisors.tree.errors import ChildStartFailed, NoNode, ServiceNotReady
from supervisors.tree.messages import ProcessExited
from supervisors.tree.restart_budget import CrashLoop, ExitCause, RestartBudget, counts

_PERMANENT: Final = "{} (another start could only meet the same error)"


@dataclass(frozen=True)
class End:
    """An end says how one life of a child was over, or that it did not begin."""

    cause: ExitCause
    detail: str
    reason: Reason | None = None
    """The error that the child has named."""
    node: str = ""
    """The node that is to blame for a start that failed; empty: the one where the child ran."""
    blameless: bool = False
    """True if it says nothing of the child: no node or service was there for it, or its agent gave no answer."""


def end_of_process(news: ProcessExited) -> End:
    """The end of a role process, as its node agent tells it."""
    return End(news.cause, news.detail, news.reason)


def end_of_actor(down: Down) -> End:
    """The end of an actor of this process. An unknown word, when it has stopped, means that its work is done."""
    if down.reason is Gone.STOPPED:
        cause = ExitCause(down.detail) if down.detail in set(ExitCause) else ExitCause.COMPLETED
        return End(cause, down.detail)
    if down.reason is Gone.UNREACHABLE:
        return End(ExitCause.UNREACHABLE, down.detail)
    error, _, text = down.detail.partition(": ")
    reason = Reason(error=error, message=text, permanent=down.permanent) if down.reason is Gone.CRASHED else None
    return End(ExitCause.CRASHED, down.detail, reason)


def end_of_start(error: Exception) -> End:
    """What a start has raised. Of a process its agent has told what it said; an actor here has raised it itself."""
    detail = str(error) or repr(error)
    if isinstance(error, ChildStartFailed):
        cause = error.cause if counts(error.cause) else ExitCause.CRASHED
        unanswered = error.cause is ExitCause.UNREACHABLE
        return End(cause, detail, error.reason, error.node, blameless=unanswered)
    return End(ExitCause.CRASHED, detail, reason_of(error), blameless=isinstance(error, NoNode | ServiceNotReady))


class Judge:
    """A judge keeps one supervisor's budget, and knows when a child is given up."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._budget = RestartBudget(restarts_max=limits.restart_max, window_s=limits.restart_window_s)

    def crash_loop(self) -> CrashLoop:
        """A fresh count for a new child."""
        limits = self._limits
        return CrashLoop(
            restarts_max=limits.restart_max,
            healthy_s=limits.restart_healthy_s,
            lives_max=max(limits.restart_max, limits.fruitless_lives_max),
        )

    def why_give_up(
        self, child: Child, end: End, *, lived_s: float, node: str, now_s: float, joins: bool = False
    ) -> str:
        """Why ``child`` is not to be started again after ``end``; empty: it is. Every end is judged once.

        ``joins``: an end of its group that the same recovery mends has been judged; only a permanent error counts now.
        """
        limits = self._limits
        if joins:
            permanent = end.reason is not None and end.reason.permanent
            return _PERMANENT.format(end.reason) if permanent else ""
        within = self._budget.spend(end.cause, now_s, node=node)
        no_loop = end.blameless or child.loop.ended(end.cause, lived_s=lived_s)
        if end.reason is not None and end.reason.permanent:
            return _PERMANENT.format(end.reason)
        last = f"; last: {end.detail}"
        if not within:
            return f"{limits.restart_max} restarts in {limits.restart_window_s:g} s are used up{last}"
        if child.failed_starts >= limits.start_attempts_max:
            return f"{child.failed_starts} starts in a row failed{last}"
        if not no_loop:
            return f"it ended {child.loop.lives} times in a row without a step in between{last}"
        return ""
