"""All checkers, and what they say of one history.

    History ─▶ replay ─▶ each checker ─▶ violations ─▶ Report: a table for people, a map for scripts

Checkers are pure: equal histories give equal reports, and nothing is read but what is handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from actors.ledger.errors import JournalUnreadable
from supervisors.checkers.episode_rows import EPISODES, check_episodes
from supervisors.checkers.history import History, RunState, Violation
from supervisors.checkers.replay import Replay, replay
from supervisors.checkers.restarts import GROUPS, RESTARTS, check_groups, check_restarts
from supervisors.checkers.samples import SAMPLES, TOKENS, check_samples, check_tokens
from supervisors.checkers.steps import FINISH, STEPS, check_finish, check_steps
from supervisors.checkers.versions import STALENESS, VERSIONS, check_staleness, check_versions
from supervisors.checkers.waits import ASKS, CREDIT, PLANS, check_asks, check_credit, check_plans

Checker = Callable[[History, Replay], Iterator[Violation]]

PROMISES: Final[dict[str, str]] = {
    SAMPLES: "every sample ends in exactly one of committed and dropped, the latter with a reason",
    TOKENS: "no token index twice, none missing, each a token that an engine can draw",
    VERSIONS: "policy versions never go back",
    STALENESS: "no token is older than the staleness bound allows",
    STEPS: "a step's samples are trained once, and its commit names exactly those that were granted",
    ASKS: "every ask has ended",
    CREDIT: "slots that were given out were given back",
    EPISODES: "tokens of an episode are marked as whose they are, and the model's are trained once",
    PLANS: "the longest part of a planned step is never cut",
    GROUPS: "a rank group is adopted whole or not at all, and its recovery costs one unit of budget",
    RESTARTS: "no supervisor restarted more often than its budget allows",
    FINISH: "a finished job has finished all its steps",
}
_CHECKERS: Final[dict[str, Checker]] = {
    SAMPLES: check_samples,
    TOKENS: check_tokens,
    VERSIONS: check_versions,
    STALENESS: check_staleness,
    STEPS: check_steps,
    ASKS: check_asks,
    CREDIT: check_credit,
    EPISODES: check_episodes,
    PLANS: check_plans,
    GROUPS: check_groups,
    RESTARTS: check_restarts,
}


_ODD: Final = (TypeError, ValueError, LookupError, AttributeError, OverflowError)
"""What reading a record raises that no run has written."""


@dataclass
class Report:
    """Holds what the checkers say of a run."""

    job: str
    state: RunState
    steps: int
    """Number of committed steps."""
    steps_wanted: int
    counted: dict[str, int]
    """Number of things that were checked, by kind: samples, tokens, …"""
    violations: list[Violation]
    notes: list[str] = field(default_factory=list[str])

    @property
    def untrainable(self) -> str:
        """What is wrong, in a sentence, with a sample that the trainer has still to take; empty: nothing is."""
        open_ = (v for v in self.violations if v.step is not None and v.step >= self.steps)
        return next((f"{v.what}: the trainer cannot take it" for v in open_ if v.checker in (TOKENS, STALENESS)), "")

    @property
    def clean(self) -> bool:
        return not self.violations

    def of(self, checker: str) -> list[Violation]:
        """The violations that ``checker`` found."""
        return [violation for violation in self.violations if violation.checker == checker]

    def as_map(self) -> dict[str, Any]:
        """The report as ``--json`` prints it."""
        return {
            "job": self.job,
            "state": str(self.state),
            "steps": self.steps,
            "steps_wanted": self.steps_wanted,
            "checked": dict(self.counted),
            "checkers": {name: len(self.of(name)) for name in PROMISES},
            "violations": [violation.as_map() for violation in self.violations],
            "notes": list(self.notes),
        }


def check(history: History, *, must_finish: bool = False) -> Report:
    """Hold ``history`` against every promise.

    Args:
        must_finish: whether an unfinished job is a violation, as it is once all faults have healed.

    Raises:
        JournalUnreadable: the journal's events fit no job.
    """
    try:
        folded = replay(history.ledger, history.pruned_below, history.vocabulary)
    except _ODD as error:
        raise JournalUnreadable(f"the journal's events fit no job: {type(error).__name__}: {error}") from error
    violations = [
        violation for name, checker in _CHECKERS.items() for violation in _found(name, checker, history, folded)
    ]
    violations += check_finish(history, folded, must_finish=must_finish)
    return Report(
        job=history.job.name,
        state=history.state,
        steps=folded.committed_steps,
        steps_wanted=history.job.steps,
        counted=_counted(history, folded),
        violations=violations,
        notes=list(history.notes),
    )


def _found(name: str, checker: Checker, history: History, folded: Replay) -> Iterator[Violation]:
    """What a checker finds; that it cannot read what a file says is a violation, too."""
    try:
        yield from checker(history, folded)
    except _ODD as error:
        what = f"the record holds what no run writes: {type(error).__name__}: {error}"
        yield Violation(checker=name, what=what)


def _counted(history: History, folded: Replay) -> dict[str, int]:
    asks = {
        (str(row.get("process")), str(row.get("incarnation"))): opened
        for row in history.named("asks_counted")
        if isinstance(opened := row.get("opened"), int)
    }
    return {
        "ledger_events": folded.events,
        "samples": len(history.samples),
        "tokens": sum(record.n_tokens for record in history.samples),
        "tokens_followed": sum(len(sample.tokens) for sample in folded.samples),
        "commits": len(folded.commits),
        "replays": len(folded.replayed),
        "scheduler_lives": len(folded.terms),
        "hand_outs": sum(len(sample.workers) for sample in folded.samples),
        "asks": sum(asks.values()),
        "restarts": len(history.named("child_restarting")),
        "faults": len(history.named("fault_injected")),
    }
