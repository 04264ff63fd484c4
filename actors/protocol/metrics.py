"""What the metrics actor hears. That actor owns metrics.jsonl, events.jsonl, trace.json and the TensorBoard files.

job ──StepRow, Flush──▶ metrics ──Flushed──▶ job          workers, trainer, training service ──Spans──▶ metrics
every actor of the job ──Event──▶ metrics                 every process ──ProcessHealth──▶ metrics
rewards ──Samples──▶ metrics
"""

from __future__ import annotations

import msgspec

from actors.core.look import Sight
from actors.core.message import Message, message


class TraceSpan(msgspec.Struct, frozen=True, array_like=True):
    """Describes one coloured bar on a track of the trace, in wall-clock seconds, for people only."""

    name: str
    """Activity: generate, idle, pull, train, publish, wait, score, checkpoint, episode, answer; of a training service
    also load, burst, switch, prefetch."""
    start_s: float
    end_s: float
    args: dict[str, float | int | str] = {}


@message("metrics.spans")
class Spans(Message):
    job: str
    track: str
    """Name of the worker or the trainer; in a training service's trace, of the job."""
    spans: list[TraceSpan]


@message("metrics.step_row")
class StepRow(Message):
    """The job adds a line to metrics.jsonl; None stands for a mean of nothing."""

    job: str
    row: dict[str, float | int | str | None]


class ShownTurn(msgspec.Struct, frozen=True):
    """Holds one turn of a sample, as text."""

    role: str
    """Speaker: ``model``, ``environment`` or ``tool``."""
    text: str
    tokens: int
    name: str = ""
    """Name of the tool."""
    fresh: bool = False
    """Whether a fresh context begins with this turn: the model sees nothing of what stands before it."""


class ShownSample(msgspec.Struct, frozen=True):
    """Holds one sample of a committed step, as text: a line of samples.jsonl (``samples.py`` describes its fields)."""

    step: int
    chosen: str
    prompt: int
    sibling: int
    source: str
    row: int
    reward: float | None
    reward_parts: dict[str, float | None]
    finish: str
    tokens: int
    versions: list[int]
    reason: str
    prompt_text: str
    turns: list[ShownTurn]
    answer: str


@message("metrics.samples")
class Samples(Message):
    """The reward worker has decoded some samples of a step."""

    job: str
    step: int
    rows: list[ShownSample]


@message("metrics.event")
class Event(Message):
    """An actor adds a line to events.jsonl, which people and checkers read."""

    job: str
    name: str
    fields: dict[str, float | int | str]


@message("metrics.process_health")
class ProcessHealth(Message):
    """A process tells every ``health_interval_s`` how late its event loop is, and of lost messages and long waits."""

    job: str
    process: str
    loop_lag_p50_s: float
    loop_lag_p99_s: float
    loop_lag_max_s: float
    dead_letters: int
    """Number of messages without a receiver since the process began."""
    oldest_wait_s: float
    """Longest wait of those that have lasted longer than ``stall_report_s``; 0 if none has."""

    @classmethod
    def of(cls, job: str, sight: Sight) -> ProcessHealth:
        """The health that a look into a process shows; its loop must be probed."""
        assert sight.loop_lag is not None, "under virtual time there is no lag to tell of"
        return cls(
            job=job,
            process=sight.process,
            loop_lag_p50_s=sight.loop_lag.p50_s,
            loop_lag_p99_s=sight.loop_lag.p99_s,
            loop_lag_max_s=sight.loop_lag.max_s,
            dead_letters=sum(sight.dead_letter_counts.values()),
            oldest_wait_s=max((stall.since_s for stall in sight.stalls), default=0.0),
        )

    @property
    def gauges(self) -> dict[str, float]:
        """Gauges by name, without the process."""
        return {
            "loop_lag_p50_s": self.loop_lag_p50_s,
            "loop_lag_p99_s": self.loop_lag_p99_s,
            "loop_lag_max_s": self.loop_lag_max_s,
            "dead_letters": self.dead_letters,
            "oldest_wait_s": self.oldest_wait_s,
        }


@message("metrics.flush")
class Flush(Message):
    """An actor asks for everything to be written. Reply: Flushed, once all that it has told before is in the files."""

    job: str


@message("metrics.flushed")
class Flushed(Message):
    pass
