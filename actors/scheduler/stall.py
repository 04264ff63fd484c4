"""Who waits for whom: one sentence from plain facts, for people who look at a job that does not move."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StallView:
    """These are the facts. Counts are of samples, all steps together, unless said otherwise."""

    quiet_s: float
    """Seconds since the ledger has last changed."""
    quiet_limit_s: float
    paused: bool
    step: int
    """Step that the trainer commits next."""
    steps: int
    issued: bool
    """Whether the step's batch is here."""
    queued: int
    in_flight: dict[str, int]
    """Samples by worker."""
    finished: int
    has_rewards: bool
    has_prompts: bool
    has_trainer: bool
    workers: dict[str, int]
    """Policy version that each worker serves."""
    needed_version: int
    newest_version: int
    waiting: int = 0
    """Episodes that wait for their environments."""


def waiting_for(view: StallView) -> str:
    """Empty while things move or nothing is left to do."""
    if view.step >= view.steps:
        return ""
    if view.paused:
        return "a resume: the job is paused"
    if view.quiet_s < view.quiet_limit_s:
        return ""
    return f"{_reason(view)}, since {view.quiet_s:.0f} s"


def _reason(view: StallView) -> str:
    if not view.issued:
        return f"the prompts of step {view.step}" + ("" if view.has_prompts else ": no prompt source has registered")
    busy = {name: n for name, n in view.in_flight.items() if n}
    if busy:
        return "tokens from " + ", ".join(f"{name} ({n} samples)" for name, n in sorted(busy.items()))
    if view.queued:
        return _queued_reason(view)
    if view.finished:
        return f"verdicts on {view.finished} samples" + (
            "" if view.has_rewards else ": no reward worker has registered"
        )
    if view.waiting:
        return f"the environments of {view.waiting} episodes"
    if not view.has_trainer:
        return f"the trainer to open step {view.step}"
    return f"the trainer to commit step {view.step}"


def _queued_reason(view: StallView) -> str:
    if not view.workers:
        return f"a rollout worker: {view.queued} samples are queued and none has registered"
    if max(view.workers.values()) >= view.needed_version:
        return f"room at a rollout worker: {view.queued} samples are queued"
    if view.newest_version < view.needed_version:
        return f"version {view.needed_version} of the weights to be published, the newest is {view.newest_version}"
    slow = ", ".join(f"{name} (serves {v})" for name, v in sorted(view.workers.items()))
    return f"version {view.needed_version} to be loaded by {slow}"
