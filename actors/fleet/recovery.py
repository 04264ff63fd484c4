"""Measures how long a loss holds up the job: from the news of it to the moment when work goes on.

    a worker is lost    ─▶ its samples are queued ─▶ the last of them is with another worker    reassign_s
    the trainer is lost ─▶ its next life ─▶ the next step that was not committed before         trainer_to_progress_s
    the head is lost    ─▶ the next scheduler opens ─▶ the next such step                       head_to_progress_s

Invariants
- These are only measurements: nothing that the scheduler does depends on them.
- Times are of the scheduler's clock, so they begin with the news. The time before that is a worker's ``detect_s``, from
  its last message to the news of its loss. That is an upper bound, since a healthy worker is silent at times, too.
- A loss that cost nothing (an idle worker, a trainer after the last step) is no recovery, and is not recorded.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from actors.ledger.batch import SampleState
from actors.ledger.ledger import Ledger


@dataclass(slots=True)
class _Loss:
    """A worker was lost, and some of its samples still wait."""

    worker: str
    at_s: float
    samples: int
    rows: dict[int, np.ndarray]


@dataclass(frozen=True, slots=True)
class Recovered:
    """A loss has been made good, with these fields for an event."""

    part: str
    """Name of the worker, or ``trainer`` or ``head``."""
    after_s: float
    samples: int = 0
    """Number of samples that had to move."""


class Recoveries:
    """The newest recovery of each kind is kept, and of workers also the longest."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._losses: list[_Loss] = []
        self._stopped_s: dict[str, float] = {}
        """``trainer`` or ``head`` → time since which the job has made no progress without it."""
        self._crashed: set[str] = set()
        """Names of actors whose last life ended badly, so that their next one counts as a restart."""
        self._restarts = 0
        self._times: dict[str, float] = dict.fromkeys(
            ("detect_s", "detect_max_s", "reassign_s", "reassign_max_s", "trainer_to_progress_s", "head_to_progress_s"),
            0.0,
        )

    def lost_worker(self, worker: str, queued: dict[int, np.ndarray], *, silent_s: float, now: float) -> None:
        """A worker is lost. ``queued``: step → rows for other workers. ``silent_s``: seconds since its last message."""
        samples = sum(len(rows) for rows in queued.values())
        if samples:
            self._losses.append(_Loss(worker, now, samples, dict(queued)))
            self._note("detect", silent_s)

    def lost(self, part: str, now: float) -> None:
        """``trainer`` or ``head`` is gone; only the first loss before the next progress counts."""
        self._stopped_s.setdefault(part, now)

    def assigned(self, now: float) -> list[Recovered]:
        """Samples have been handed out; returns the losses that are made good by that."""
        done: list[Recovered] = []
        for loss in list(self._losses):
            waiting = {step: self._waiting(step, rows) for step, rows in loss.rows.items()}
            loss.rows = {step: rows for step, rows in waiting.items() if len(rows)}
            if not loss.rows:
                self._losses.remove(loss)
                self._note("reassign", now - loss.at_s)
                done.append(Recovered(loss.worker, now - loss.at_s, loss.samples))
        return done

    def _waiting(self, step: int, rows: np.ndarray) -> np.ndarray:
        batch = self._ledger.batches.get(step)
        return rows[batch.state[rows] == SampleState.QUEUED] if batch is not None else rows[:0]

    def _note(self, kind: str, seconds: float) -> None:
        self._times[f"{kind}_s"] = seconds
        self._times[f"{kind}_max_s"] = max(self._times[f"{kind}_max_s"], seconds)

    def committed(self, now: float) -> list[Recovered]:
        """A step has been committed for the first time; returns the losses that are made good by that."""
        done = [Recovered(part, now - at_s) for part, at_s in self._stopped_s.items()]
        self._stopped_s.clear()
        for recovered in done:
            self._times[f"{recovered.part}_to_progress_s"] = recovered.after_s
        return done

    # ------------------------------------------------------------ restarts

    def mark_crashed(self, name: str) -> None:
        """Note that the present life of a worker or service has ended badly."""
        self._crashed.add(name)

    def begins(self, name: str, *, again: bool) -> None:
        """A life of the worker or service ``name`` begins; ``again``: another one was registered before it."""
        if again or name in self._crashed:
            self._crashed.discard(name)
            self._restarts += 1

    def metrics(self) -> dict[str, float]:
        """Columns of metrics.jsonl: 0 before the first loss.

        ``restarts`` counts lives that began after another of their name had ended in a crash or out of reach.
        """
        return {"restarts": self._restarts} | self._times
