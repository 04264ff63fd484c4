"""Planned steps: whom a cut may take samples from."""

from __future__ import annotations

from collections.abc import Iterator

from supervisors.checkers.history import History, Violation
from supervisors.checkers.replay import Replay

PLANS = "plans"


def check_plans(history: History, replay: Replay) -> Iterator[Violation]:
    """The longest part, for which everybody waits, is never cut, and nobody hands samples over to itself."""
    longest = ""
    for row in history.named("step_planned", "samples_cut"):
        if row["event"] == "step_planned":
            longest = str(row["longest"])
        elif row["worker"] in (longest, row["target"]):
            why = "it had the longest part" if row["worker"] == longest else "what it handed over went to itself"
            step, worker = int(row["step"]), str(row["worker"])
            yield Violation(checker=PLANS, what=f"{worker} was cut in step {step}: {why}", step=step, worker=worker)
