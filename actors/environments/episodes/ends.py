"""How an episode has ended, from what its process has left: whose fault it was, and what people are told.

    said a reward ─────────────▶ reward, and what ended it
    said why it failed ────────▶ that
    killed by us for its time ─▶ no result: the environment hung
    ended without a word ──────▶ by SIGKILL or SIGTERM: infrastructure, somebody outside; else no result: its own doing
    its zygote died ───────────▶ infrastructure

What infrastructure did never becomes a reward; it is begun again, and *replayed*: the ledger answers with what the
model has said already. So a model gains nothing by breaking its environment: the same words lead there again, until
``environment.attempts`` are over, and a sample without a result teaches nothing. Whatever an environment knows to be
the model's doing, it grades.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from actors.environments.episodes.interface import NOTHING
from actors.environments.episodes.zygote_handle import Ended
from actors.protocol.failures import Failure, FailureKind

_OUTSIDE: Final = frozenset([128 + signal.SIGKILL, 128 + signal.SIGTERM, 128 + signal.SIGHUP])
"""Exit codes of processes that somebody else has ended: an operator, or the kernel for want of memory."""


class Verdict(NamedTuple):
    """It is a reward, or a failure."""

    reward: float | None
    cause: str
    metrics: Mapping[str, float] = NOTHING
    failure: Failure | None = None


def failed(kind: FailureKind, text: str) -> Verdict:
    return Verdict(None, "failed", failure=Failure(kind, text))


def late(seconds: float) -> Verdict:
    """The verdict on an episode that had to be killed for its time."""
    text = f"the environment did not end within the episode's time and {seconds:g} s more: it hangs"
    return Verdict(None, "time", failure=Failure(FailureKind.NO_RESULT, text))


def verdict_on(ended: Ended) -> Verdict:
    """The verdict on an episode whose process has ended by itself."""
    if ended.code is None:
        return failed(FailureKind.INFRASTRUCTURE, "the process that the episode was forked from has died")
    if ended.said is None:
        return failed(*_wordless(ended.code))
    try:
        return _said(ended.said)
    except (KeyError, TypeError, ValueError) as error:
        return failed(FailureKind.NO_RESULT, f"its process gave a result that nobody can read: {error!r}")


def _said(said: dict[str, Any]) -> Verdict:
    if "failed" in said:
        return failed(FailureKind(said["kind"]), str(said["failed"]))
    reward = float(said["reward"])
    if not math.isfinite(reward):
        raise ValueError(f"the reward is {reward}")
    return Verdict(reward, str(said["cause"]), {str(name): float(value) for name, value in said["metrics"].items()})


def _wordless(code: int) -> tuple[FailureKind, str]:
    if code in _OUTSIDE:
        name = signal.Signals(code - 128).name
        return FailureKind.INFRASTRUCTURE, f"its process was ended from outside ({name}): the machine lacks memory, say"
    if code > 128:
        try:
            return FailureKind.NO_RESULT, f"its process crashed ({signal.Signals(code - 128).name})"
        except ValueError:
            pass
    return FailureKind.NO_RESULT, f"its process ended without a result, with exit code {code}"
