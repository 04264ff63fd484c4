"""Says how a child ended, whether that costs restart budget, and how long to wait before the next try.

Invariants
- Exactly one exit cause per end of a child; what each cause does is the table below and nowhere else.
- Being preempted, stopped or completed costs no budget; the loss of a node costs one unit, not one per child.
- The window belongs to the supervisor, not to a child: ten children that crash once each are as bad as one
  that crashes ten times.
- A crash loop belongs to a child, and has no window, since a child that takes long to start fails seldom, but for ever.
  The child is given up after more than ``restarts_max`` short lives in a row, or ``lives_max`` of any length, without a
  committed step. A step resets both counts, a long life the first.
- This module has no clock and no randomness of its own: ``now_s`` and the generator are passed in.

    cause         permanent            transient            counts
    completed     restart, backoff     end                  no
    stopped       end                  end                  no
    preempted     replace, at once     replace, at once     no
    crashed       restart, backoff     restart, backoff     yes
    killed        restart, backoff     restart, backoff     yes
    unreachable   replace              replace              yes, once per node

A temporary child is never restarted.
"""

from __future__ import annotations

import enum
import random
from collections import deque
from dataclasses import dataclass


class ExitCause(enum.StrEnum):
    """Cause of a child's end."""

    COMPLETED = "completed"
    """The child ended by itself, its work done."""
    STOPPED = "stopped"
    """Somebody asked the child to stop."""
    PREEMPTED = "preempted"
    """The machine was taken away with notice or drained, the child's owner was away for too long, or something that it
    needs went away through no fault of its own."""
    CRASHED = "crashed"
    """The child raised an exception, caused a fatal signal itself, or exited with a code other than 0."""
    KILLED = "killed"
    """A signal from outside killed it: from the out-of-memory killer, an operator, or us because it hung."""
    UNREACHABLE = "unreachable"
    """The child's node is cut off; the process may still run."""


class RestartPolicy(enum.StrEnum):
    """Says after which ends a child is started again; see the table above."""

    PERMANENT = "permanent"
    TRANSIENT = "transient"
    TEMPORARY = "temporary"


_COUNTS = frozenset({ExitCause.CRASHED, ExitCause.KILLED, ExitCause.UNREACHABLE})
_LOOPS = frozenset({ExitCause.CRASHED, ExitCause.KILLED})
_AT_ONCE = frozenset({ExitCause.PREEMPTED, ExitCause.UNREACHABLE})


def is_restarted(policy: RestartPolicy, cause: ExitCause) -> bool:
    """Whether a child of ``policy`` that ended by ``cause`` is started again."""
    if policy is RestartPolicy.TEMPORARY or cause is ExitCause.STOPPED:
        return False
    return policy is RestartPolicy.PERMANENT or cause is not ExitCause.COMPLETED


def counts(cause: ExitCause) -> bool:
    """Whether ``cause`` is held against the supervisor's budget."""
    return cause in _COUNTS


def restarts_at_once(cause: ExitCause) -> bool:
    """Whether the replacement may start without backoff: nothing suggests that it would fail again."""
    return cause in _AT_ONCE


class RestartBudget:
    """Allows at most ``restarts_max`` counted exits within ``window_s`` seconds."""

    def __init__(self, *, restarts_max: int, window_s: float) -> None:
        if restarts_max < 0 or window_s <= 0:
            raise ValueError(f"restarts_max must be >= 0 and window_s > 0, got {restarts_max} and {window_s}")
        self._restarts_max = restarts_max
        self._window_s = window_s
        self._exits_s: deque[float] = deque(maxlen=restarts_max + 1)
        self._node_losses_s: dict[str, float] = {}

    def spend(self, cause: ExitCause, now_s: float, *, node: str = "") -> bool:
        """Record one exit; False when the budget is exceeded and the supervisor must give up."""
        if counts(cause) and not self._same_node_loss(cause, now_s, node):
            self._exits_s.append(now_s)
        return self.spent(now_s) <= self._restarts_max

    def spent(self, now_s: float) -> int:
        """Number of counted exits in the window that ends now."""
        while self._exits_s and self._exits_s[0] <= now_s - self._window_s:
            self._exits_s.popleft()
        return len(self._exits_s)

    def _same_node_loss(self, cause: ExitCause, now_s: float, node: str) -> bool:
        if cause is not ExitCause.UNREACHABLE or not node:
            return False
        self._node_losses_s = {n: at for n, at in self._node_losses_s.items() if at > now_s - self._window_s}
        known = node in self._node_losses_s
        self._node_losses_s.setdefault(node, now_s)
        return known


class CrashLoop:
    """Counts the lives of one child that ended by a failure of its own, or by a signal, one after another.

    Args:
        restarts_max: most short lives in a row that are no loop yet.
        healthy_s: seconds from which a life is not short.
        lives_max: most lives of any length without a step in between that are no loop yet; infinite: any number.
    """

    def __init__(self, *, restarts_max: int, healthy_s: float, lives_max: float) -> None:
        if restarts_max < 0 or lives_max < restarts_max:
            raise ValueError(f"0 <= restarts_max <= lives_max is needed, got {restarts_max} and {lives_max}")
        self._restarts_max, self._healthy_s, self._lives_max = restarts_max, healthy_s, lives_max
        self.short_lives = 0
        self.lives = 0

    def ended(self, cause: ExitCause, *, lived_s: float) -> bool:
        """Count a life that is over; False when this is a loop, and the supervisor must give up.

        The loss of a node, a preemption and an orderly end say nothing of the child: they change no count.
        """
        if cause in _LOOPS:
            self.short_lives = self.short_lives + 1 if lived_s < self._healthy_s else 0
            self.lives += 1
        return self.short_lives <= self._restarts_max and self.lives <= self._lives_max

    def progressed(self) -> None:
        """Reset the counts after a committed step: the run advances despite the failures."""
        self.short_lives = self.lives = 0


@dataclass(frozen=True)
class BackoffPolicy:
    """Sets the delay: ``first_s``, doubled up to ``max_s``, spread by ``jitter`` (0.2: 20 % either way)."""

    first_s: float
    max_s: float
    quiet_s: float
    """Seconds of life after which the delay starts again from ``first_s``."""
    jitter: float = 0.2

    def delay_s(self, failures: int, rng: random.Random) -> float:
        """Seconds to wait before the start that follows the ``failures``-th failure in a row (1: the first)."""
        doublings = min(max(failures - 1, 0), 62)
        base_s = min(self.max_s, self.first_s * 2.0**doublings)
        return base_s * (1.0 + self.jitter * (2.0 * rng.random() - 1.0))


class Backoff:
    """Counts one child's failures in a row. Preemption and the loss of a node add none."""

    def __init__(self, policy: BackoffPolicy) -> None:
        self._policy = policy
        self._failures = 0

    def after(self, cause: ExitCause, *, lived_s: float, rng: random.Random) -> float:
        """Seconds to wait before the next start of a child that lived ``lived_s`` and ended by ``cause``."""
        if lived_s >= self._policy.quiet_s:
            self._failures = 0
        if restarts_at_once(cause):
            return 0.0
        self._failures += 1
        return self._policy.delay_s(self._failures, rng)
