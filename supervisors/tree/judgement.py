"""Judges each end of a child: whether the child is started again after it.

    ProcessExited · Down · a start that raised ─▶ End ─▶ Judge.why_give_up ─▶ "" : start it again
                                                                          └─▶ why not, for people

Invariants
- A permanent error is met once: no child is started again to meet it a second time.
- The budget, the failed starts and the crash loop are all checked: each sees failures that the others do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from actors.core.reason import Reason, reason_of
from actors.core.watch import Down, Gone
from configs.limits import Limits
from supervisors.tree.errors import ChildStartFailed, NoNode, ServiceNotReady
from supervisors.tree.messages import ProcessExited
from supervisors.tree.restart_budget import CrashLoop, ExitCause, RestartBudget, counts

_PERMANENT: Final = "{} (another start could only meet the same error)"


@dataclass(frozen=True)
class End:
    """Says how one life of a child ended, or why it did not begin."""

    cause: ExitCause
    detail: str
    reason: Reason | None = None
    """Error that the child has named; None: it named none."""
    node: str = ""
    """Node that is to blame for a failed start; empty: the one where the child ran."""
    blameless: bool = False
    """Flag that the end is not the child's fault: it had no node or service, or its agent gave no answer."""


def end_of_process(news: ProcessExited) -> End:
    """The end of a role process, as its node agent reports it."""
    return End(news.cause, news.detail, news.reason)


def end_of_actor(down: Down) -> End:
    """The end of an actor of this process. If it stopped with an unknown cause, its work is done."""
    if down.reason is Gone.STOPPED:
        cause = ExitCause(down.detail) if down.detail in set(ExitCause) else ExitCause.COMPLETED
        return End(cause, down.detail)
    if down.reason is Gone.UNREACHABLE:
        return End(ExitCause.UNREACHABLE, down.detail)
    error, _, text = down.detail.partition(": ")
    reason = Reason(error=error, message=text, permanent=down.permanent) if down.reason is Gone.CRASHED else None
    return End(ExitCause.CRASHED, down.detail, reason)


def end_of_start(error: Exception) -> End:
    """The end that a failed start stands for: its agent named the error of a process, an actor raised its own."""
    detail = str(error) or repr(error)
    if isinstance(error, ChildStartFailed):
        cause = error.cause if counts(error.cause) else ExitCause.CRASHED
        unanswered = error.cause is ExitCause.UNREACHABLE
        return End(cause, detail, error.reason, error.node, blameless=unanswered)
    return End(ExitCause.CRASHED, detail, reason_of(error), blameless=isinstance(error, NoNode | ServiceNotReady))


class Judge:
    """Keeps the restart budget of one supervisor, or of one node, and says when a child is given up."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._budget = RestartBudget(restarts_max=limits.restart_max, window_s=limits.restart_window_s)

    def crash_loop(self, lives_max: float | None = None) -> CrashLoop:
        """A fresh count for a new child. ``lives_max``: as in ``CrashLoop``; None: as the limits say."""
        limits = self._limits
        most = max(limits.restart_max, limits.fruitless_lives_max) if lives_max is None else lives_max
        return CrashLoop(restarts_max=limits.restart_max, healthy_s=limits.restart_healthy_s, lives_max=most)

    def spent(self, now_s: float) -> int:
        """Number of ends that count against the budget at this time."""
        return self._budget.spent(now_s)

    def why_give_up(
        self,
        loop: CrashLoop,
        end: End,
        *,
        lived_s: float,
        node: str,
        now_s: float,
        failed_starts: int = 0,
        joins: bool = False,
    ) -> str:
        """Reason not to start a child again after ``end``; empty: start it. Every end is judged once.

        Args:
            loop: the child's crash loop.
            failed_starts: failed starts in a row, of a child that was never ready.
            joins: the pending recovery of its group was judged already; only a permanent error counts now.
        """
        limits = self._limits
        permanent = _PERMANENT.format(end.reason) if end.reason is not None and end.reason.permanent else ""
        if joins:
            return permanent
        within = self._budget.spend(end.cause, now_s, node=node)
        no_loop = end.blameless or loop.ended(end.cause, lived_s=lived_s)
        if permanent:
            return permanent
        last = f"; last: {end.detail}"
        if not within:
            return f"{limits.restart_max} restarts in {limits.restart_window_s:g} s are used up{last}"
        if failed_starts >= limits.start_attempts_max:
            return f"{failed_starts} starts in a row failed{last}"
        if not no_loop:
            return f"it ended {loop.lives} times in a row without a step in between{last}"
        return ""
